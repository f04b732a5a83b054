"""Attention of a pass's rows: the Triton kernel against the definition in float64, wherever it runs."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_dllm.kernels.row_attention import Group, ScoreSum, attend_rows
from flash_dllm.kernels.row_attention import triton as kernel
from flash_dllm.kernels.row_attention.groups import BlockTables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")


@dataclass
class Case:
    """A pass of two groups: whole canvases of unequal length, and rows that see intervals."""

    q: Tensor
    keys: Tensor
    values: Tensor
    groups: list[Group]
    rank: Tensor
    lo: Tensor
    hi: Tensor
    ends: Tensor
    base: int

    def run(self, impl: str, score: ScoreSum | None = None) -> Tensor:
        interval = (self.lo, self.hi)
        kv = (self.keys, self.values)
        return attend_rows(self.q, kv, self.groups, self.rank, interval, self.ends, self.base, score, impl)

    def to(self, dtype: torch.dtype) -> Case:
        q, keys, values = (t.to(dtype) for t in (self.q, self.keys, self.values))
        return Case(q, keys, values, self.groups, self.rank, self.lo, self.hi, self.ends, self.base)

    def rounded(self, dtype: torch.dtype) -> Case:
        """The same numbers after rounding to ``dtype``, in float64."""
        return self.to(dtype).to(torch.float64)


def build(
    lengths: list[int],
    whole: int,
    ranked: int,
    heads: tuple[int, int],
    dim: int,
    seed: int = 0,
    base: int = 5,
) -> Case:
    """``whole`` rows a slot that see its canvas, then ``ranked`` rows a slot with intervals on every place."""
    made, drawn = torch.Generator().manual_seed(seed), torch.Generator(device=DEVICE).manual_seed(seed)
    slots, places = len(lengths), base + max(lengths) + 3

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=drawn, dtype=torch.float64, device=DEVICE)

    n = slots * (whole + ranked)
    lo = torch.randint(0, 3, (slots, places), generator=made, dtype=torch.int32)
    hi = lo + torch.randint(0, 3, (slots, places), generator=made, dtype=torch.int32)
    ends = torch.tensor([base + length for length in lengths], dtype=torch.int32)
    for slot, end in enumerate(ends.tolist()):
        # Rank 0 of a whole group sees exactly the canvas, whatever the higher ranks see.
        lo[slot, base:end], hi[slot, base:end] = 0, hi[slot, base:end].clamp_min(1)
        lo[slot, :base] = lo[slot, :base].clamp_min(1)
        hi[slot, end:] = 0
        hi[slot] = torch.maximum(lo[slot], hi[slot])
    rank = torch.randint(0, 5, (n,), generator=made, dtype=torch.int32)
    rank[: slots * whole] = 0
    every = tuple(range(slots))
    groups = [Group(every, 0, whole, max(ends.tolist()), whole=True)] if whole else []
    groups += [Group(every, slots * whole, ranked, places)] if ranked else []
    case = Case(
        normal(n, heads[0], dim), normal(slots, places, heads[1], dim), normal(slots, places, heads[1], dim),
        groups, rank, lo, hi, ends, base,
    )  # fmt: skip
    for name in ("q", "keys", "values", "rank", "lo", "hi", "ends"):
        setattr(case, name, getattr(case, name).to(DEVICE))
    return case


def poison(case: Case) -> None:
    """NaN wherever no rank sees anything."""
    never = case.hi <= case.lo
    case.keys[never], case.values[never] = NAN, NAN


def check(case: Case, dtype: torch.dtype, bound: float = 2.0) -> None:
    """The kernel's error is at most ``bound`` times that of PyTorch in the same dtype."""
    exact = case.rounded(dtype).run("ref")
    plain = (case.to(dtype).run("ref").double() - exact).abs()
    poison(case)
    got = case.to(dtype).run("triton").double()
    assert got.isfinite().all()
    floor = torch.finfo(dtype).eps
    assert (got - exact).abs().max() <= bound * plain.max() + floor
    assert (got - exact).abs().mean() <= bound * plain.mean() + floor


@settings(max_examples=12)
@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=3), st.integers(0, 20), st.integers(1, 20),
    st.sampled_from([((2, 2), 16), ((4, 2), 8), ((7, 1), 24)]), st.integers(0, 99),
)  # fmt: skip
def test_rows_see_exactly_their_keys(
    lengths: list[int], whole: int, ranked: int, shape: tuple[tuple[int, int], int], seed: int
) -> None:
    check(build(lengths, whole, ranked, shape[0], shape[1], seed), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    check(build([40, 97], 17, 5, (2, 2), 32), dtype)


@pytest.mark.parametrize("splits", [2, 3, 8])
def test_keys_in_several_ranges(splits: int) -> None:
    case = build([130, 33], 6, 3, (4, 2), 16)
    exact = case.run("ref")
    poison(case)
    tiles = kernel.Tiles(16, 16, splits)
    few = case.to(torch.float32)
    out = kernel.attend_rows(
        few.q, (few.keys, few.values), few.groups, few.rank, (few.lo, few.hi), few.ends, few.base, None, tiles
    )
    assert torch.allclose(out.double(), exact, atol=2e-6)


def test_keys_and_values_in_8_bits() -> None:
    case = build([40, 21], 9, 5, (4, 2), 16)
    rough = case.to(torch.bfloat16)
    rough.keys, rough.values = (t.to(torch.float8_e4m3fn) for t in (case.keys, case.values))
    fine = Case(**{**vars(rough), "keys": rough.keys.double(), "values": rough.values.double()})
    exact = Case(**{**vars(fine), "q": rough.q.double()}).run("ref")
    plain = (rough.run("ref").double() - exact).abs().max()
    assert (rough.run("triton").double() - exact).abs().max() <= 2 * plain + 2**-8


def test_a_row_that_sees_nothing_gives_zeros() -> None:
    case = build([9], 0, 4, (2, 1), 8).to(torch.float32)
    case.rank.fill_(40)
    case.hi.clamp_max_(30)
    for impl in ("ref", "triton"):
        assert torch.equal(case.run(impl), torch.zeros_like(case.q))


def test_a_nan_that_is_seen_stays_one() -> None:
    case = build([9, 12], 3, 0, (2, 2), 8).to(torch.float32)
    case.values[1, case.base + 4] = NAN
    for impl in ("ref", "triton"):
        out = case.run(impl)
        assert out[:3].isfinite().all() and out[3:].isnan().all()


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (7, 1)])
@pytest.mark.parametrize(("splits", "m"), [(1, 16), (3, 16), (1, 128)])
def test_the_score_is_added_up_over_layers(heads: tuple[int, int], splits: int, m: int) -> None:
    """From mean queries, and where a block holds all rows of its slot (m = 128) from those."""
    case = build([50, 21], 15, 2, heads, 16).to(torch.float32)
    poison(case)
    case.q[20] = NAN  # A row that does not count; its own output is NaN.
    reads = torch.tensor([[3, 9, 14, 0], [19, 25, 20, 0]], device=DEVICE)
    flags = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.bool, device=DEVICE)
    logits = torch.stack([
        torch.einsum(
            "chd,phd->chp",
            case.q[reads[s][flags[s]]].double(),
            case.keys[s, case.base :].double().repeat_interleave(heads[0] // heads[1], 1),
        ).mean((0, 1))
        for s in range(2)
    ])  # fmt: skip
    sums = {impl: ScoreSum(reads, flags, case.base, own_rows=True) for impl in ("ref", "triton")}
    for _ in range(2):
        case.run("ref", sums["ref"])
        into = sums["triton"].into(case.q, case.keys)
        kernel.attend_rows(
            case.q, (case.keys, case.values), case.groups, case.rank, (case.lo, case.hi), case.ends, case.base,
            into, kernel.Tiles(m, 16, splits),
        )  # fmt: skip
    for slot, end in enumerate((case.ends - case.base).tolist()):
        for total in (sums["ref"].total, sums["triton"].total):
            assert total is not None
            assert torch.allclose(total[slot, :end].double(), 2 * logits[slot, :end], atol=1e-4)


@pytest.mark.parametrize(("heads", "m", "warps"), [((4, 4), 128, 4), ((4, 4), 64, 4), ((7, 1), 128, 8)])
def test_lanes_add_up_to_the_score(heads: tuple[int, int], m: int, warps: int) -> None:
    """Scoring rows in every lane, some lanes without one; a lane's part has no other's in it."""
    case = build([50, 40], 16, 0, heads, 16).to(torch.bfloat16)
    reads = torch.tensor([[3, 9, 14, 0], [16, 25, 31, 20]], device=DEVICE)
    flags = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool, device=DEVICE)
    sums = {impl: ScoreSum(reads, flags, case.base, own_rows=True) for impl in ("ref", "triton")}
    case.run("ref", sums["ref"])
    into = sums["triton"].into(case.q, case.keys)
    kernel.attend_rows(
        case.q, (case.keys, case.values), case.groups, case.rank, (case.lo, case.hi), case.ends, case.base,
        into, kernel.Tiles(m, 16, 1, warps),
    )  # fmt: skip
    group, lanes = heads[0] // heads[1], kernel.lanes(m, warps, torch.bfloat16)
    for slot in range(2):
        rows = (reads[slot][flags[slot]] % 16).tolist()
        expected_lanes = {(row * group + g) // 16 % lanes for row in rows for g in range(group)}
        parts = into.total[slot].abs().amax(1).view(heads[1], kernel.LANES)
        assert {int(i) for i in parts.amax(0).nonzero()} == expected_lanes
    for slot, end in enumerate((case.ends - case.base).tolist()):
        expected, found = sums["ref"].total, sums["triton"].total
        assert expected is not None and found is not None
        assert torch.allclose(found[slot, :end], expected[slot, :end], atol=2e-3)


@pytest.mark.parametrize("inside", [True, False])
def test_rows_that_see_intervals_score_too(inside: bool) -> None:
    """The released code pads its canvases, so that no row of it sees a whole canvas."""
    case = build([50, 21], 0, 7, (4, 2), 16).to(torch.float32)
    reads = torch.tensor([[3, 6, 0], [8, 13, 12]], device=DEVICE)
    flags = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool, device=DEVICE)
    sums = {impl: ScoreSum(reads, flags, case.base, own_rows=inside) for impl in ("ref", "triton")}
    for impl, total in sums.items():
        case.run(impl, total)
    for slot, end in enumerate((case.ends - case.base).tolist()):
        expected, found = sums["ref"].total, sums["triton"].total
        assert expected is not None and found is not None
        seen = (case.lo < case.hi)[slot, case.base : case.base + end]
        assert seen.any() and expected[slot, :end][seen].abs().min() > 0
        assert torch.allclose(found[slot, :end][seen], expected[slot, :end][seen], atol=1e-4)


def test_an_unknown_implementation_is_named() -> None:
    with pytest.raises(ValueError, match="'cuda'"):
        build([4], 1, 0, (1, 1), 16).run("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 32), (28, 4)])
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("length", [1, 127, 129, 1512, 4096])
@pytest.mark.parametrize("rows", [1, 17, 128])
def test_at_the_sizes_of_real_models(heads: tuple[int, int], dim: int, length: int, rows: int) -> None:
    case = build([length, max(1, length - 40)], rows, 32, heads, dim, base=65)
    check(case, torch.bfloat16)
    check(build([length], rows, 16, heads, dim), torch.float32, bound=4.0)


def test_tables_of_recorded_steps_live_as_long_as_somebody_keeps_them() -> None:
    """Other threads' engines come and go meanwhile, and other shapes push them out of what is kept anyway."""
    tables, device = BlockTables(keep=2), torch.device("cpu")

    def get(n: int) -> torch.Tensor:
        return tables.get((Group((0,), 0, n, 64, True),), 16, device)

    with tables.held() as used:
        other = threading.Thread(target=lambda: tables.held().__enter__())
        other.start(), other.join()
        first = get(40)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(get, 50).result()
    assert [t.data_ptr() for t in used] == [first.data_ptr()]
    for n in range(1, 9):
        get(n)
    assert get(40) is first
    where = weakref.ref(first)
    used.clear()
    del first
    for n in range(1, 9):
        get(n)
    gc.collect()
    assert where() is None and get(40).tolist()[0] == [0, 0, 16, 64, 1]
