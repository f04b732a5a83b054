"""Measures the tiles of each op on this GPU and keeps the fastest that gives the right result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from torch import Tensor

from flash_dllm.bench.kernels import TOLERANCE, Case, Maker, Sizes, error_of
from flash_dllm.bench.timing import Timing
from flash_dllm.kernels.devices import H200, limits
from flash_dllm.kernels.head_confidence.tiles import AMPERE, HOPPER, SMALL, VARIANTS
from flash_dllm.kernels.linear.op import FEW
from flash_dllm.kernels.tuned import Entry, Table, use

TUNED_OPS = ("qkv_rope_write", "row_attention", "head_confidence", "linear")


@dataclass(frozen=True)
class Candidate:
    """A way to run a case."""

    impl: str
    tiles: dict[str, Any]


@dataclass(frozen=True)
class Tried:
    """What a candidate took; ``why`` where it gives no right result."""

    case: Case
    candidate: Candidate
    timing: Timing | None
    why: str = ""


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def candidates(case: Case, maker: Maker) -> Iterator[Candidate]:
    """What is worth measuring for a case; what does not fit the device fails, and is reported as that."""
    rows = case.size["rows"]
    if case.op == "qkv_rope_write":
        yield Candidate("triton", {})
        half = max(16, next_power_of_2(maker.config.head_dim // 2))
        for m, pairs, k, warps, stages in product((16, 64, 128), (16, 32, 64), (64, 128), (4, 8), (3, 4)):
            if m <= max(16, 2 * rows) and (rows <= 256 or m == 128) and half // 2 <= pairs <= half:
                wide = max(1, 128 // pairs) if rows > 256 and pairs == half else 1
                tiles = {"m": m, "heads": wide, "pairs": pairs, "k": k, "warps": warps, "stages": stages}
                yield Candidate("fused", tiles)
    elif case.op == "row_attention":
        group = maker.config.n_heads // maker.config.n_kv_heads
        width = rows // case.size["slots"] * group
        # Where TMA is, keys by pointer never won.
        hopper = limits(maker.device).shared >= H200.shared
        for m, n, splits, warps, stages in product(
            (16, 32, 64, 128), (32, 64, 128), (1, 2, 4, 8), (4, 8), (2, 3)
        ):
            fits = m <= max(16, 2 * width) and (m >= min(width, 64))
            if fits and (splits == 1 or case.size["slots"] <= 8):
                tiles = {"m": m, "n": n, "splits": splits, "warps": warps, "stages": stages}
                yield Candidate("triton", {**tiles, "descriptor": hopper})
    elif case.op == "linear":
        yield Candidate("library", {})
        for m, n, k, warps, stages in product((16, 64, 128), (32, 64), (64, 128, 256), (4, 8), (3, 4)):
            if rows <= FEW and m // 4 < rows <= 2 * m:
                tiles = {"m": m, "n": n, "k": k, "warps": warps, "stages": stages, "group": 1}
                yield Candidate("triton", tiles)
    else:
        nearest = min(VARIANTS, key=lambda n: abs(n - rows))
        tables = (tile for table in (HOPPER, AMPERE, SMALL) for _, tile in table)
        for tile in dict.fromkeys([*VARIANTS[nearest], *tables]):
            if tile.rows <= max(16, 2 * rows):
                yield Candidate("triton", asdict(tile))


def identity(case: Case, maker: Maker) -> tuple[int, dict[str, int]]:
    """Rows and the equal parts under which an op looks its choice up."""
    c = maker.config
    if case.op == "row_attention":
        width = case.size["rows"] // case.size["slots"]
        group, score = c.n_heads // c.n_kv_heads, case.size["score"]
        return case.size["rows"], {"group": group, "dim": c.head_dim, "width": width, "score": score}
    if case.op == "qkv_rope_write":
        return case.size["rows"], {"depth": c.d_model, "width": c.qkv_rows}
    if case.op == "linear":
        return case.size["rows"], {"depth": case.size["depth"], "width": case.size["width"]}
    return case.size["rows"], {"depth": c.d_model}


def tune(
    maker: Maker,
    sizes: Sizes,
    timer: Callable[[Callable[[], object]], Timing],
    ops: Sequence[str] = TUNED_OPS,
    seen: Callable[[Tried], None] = lambda tried: None,
) -> Table:
    """Measure every candidate of every case; ``seen`` is told of each.

    A candidate counts only if its result is that of the definition within the tolerance of the benchmarks.
    """
    kept: list[Entry] = []
    for case in maker.cases(ops, sizes):
        if "sampled" in case.size:
            # Draws have tiles of their own, which no table replaces.
            continue
        rows, same = identity(case, maker)
        reference = case.checked("ref")
        best: Entry | None = None
        for candidate in candidates(case, maker):
            entry = Entry(case.op, rows, same, candidate.impl, candidate.tiles, float("inf"))
            tried = _try(case, entry, candidate, reference, timer, TOLERANCE[maker.dtype])
            seen(tried)
            if tried.timing is not None and (best is None or tried.timing.ms < best.ms):
                best = Entry(case.op, rows, same, candidate.impl, candidate.tiles, round(tried.timing.ms, 5))
        if best is not None:
            kept.append(best)
    use(Table(kept))
    return Table(kept)


def _try(
    case: Case, entry: Entry, candidate: Candidate, reference: Sequence[Tensor],
    timer: Callable[[Callable[[], object]], Timing], tolerance: float,
) -> Tried:  # fmt: skip
    use(Table([entry]))
    # A product asks for its stored tiles only where nothing is forced.
    forced = None if case.op == "linear" else "triton"
    try:
        error = error_of(case.checked(forced), reference)
        if not error <= tolerance:
            return Tried(case, candidate, None, f"relative error {error:.3g}")
        return Tried(case, candidate, timer(lambda: case.run(forced)))
    except Exception as exc:  # too much shared memory, a tile that does not compile
        return Tried(case, candidate, None, f"{type(exc).__name__}: {exc}"[:200])
    finally:
        use(Table([]))
