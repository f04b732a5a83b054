"""Each op by shape: every implementation against the definition, the library's own call and the floor.

An implementation's output is compared with the definition's on the same random inputs before it is timed, and a wrong
one is reported as wrong, not timed. The floor is the larger of operations over the measured matrix product rate and
bytes (each input read once, each output written once) over the measured copy rate.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_dllm.bench.floors import Ceilings
from flash_dllm.bench.timing import BenchError, Timer
from flash_dllm.core.noise import CounterNoise
from flash_dllm.kernels import gated_linear as gated_op
from flash_dllm.kernels import head_confidence as head_op
from flash_dllm.kernels import linear as linear_op
from flash_dllm.kernels import qkv_rope_write as qkv_op
from flash_dllm.kernels import rms_norm as norm_op
from flash_dllm.kernels import row_attention as attention_op
from flash_dllm.kernels import silu_mul as silu_op
from flash_dllm.models.config import ModelConfig
from flash_dllm.models.layers import rope_tables

SCRATCH = 65
"""Key places before position 0: the trash place and room for the views."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Relative error to the definition in the same dtype above which an implementation counts as wrong."""
IMPLS: dict[str, tuple[str, ...]] = {
    "qkv_rope_write": ("ref", "triton", "scattered", "streamed", "fused", "invariant"),
    "row_attention": ("ref", "triton", "invariant"),
    "head_confidence": ("ref", "triton", "invariant"),
    "rms_norm": ("ref", "triton"),
    "silu_mul": ("ref", "triton"),
    "gated_linear": ("ref", "triton", "fused"),
    "linear": ("ref", "triton", "invariant"),
}
"""What is measured of each op on a GPU unless something else is asked for; on the CPU the definition."""
OPS = tuple(IMPLS)


@dataclass(frozen=True)
class Sizes:
    """What to measure: ``rows`` of a pass for the row-wise ops; for attention ``slots`` canvases of ``keys`` positions
    with ``width`` rows each; ``reads`` candidate rows a slot for the head.
    """

    rows: tuple[int, ...]
    slots: tuple[int, ...]
    width: int
    keys: int
    reads: int = 16

    @classmethod
    def default(cls, config: ModelConfig, device: torch.device) -> Sizes:
        """Those of a step of 128 rows a slot over 1,512 positions; on the CPU sizes that take no time."""
        if device.type == "cuda":
            return cls((16, 128, 1024, 2048, 4096), (1, 8, 16, 32), 128, 1512)
        return cls((16, 64), (1, 4), 16, 96, 4)


@dataclass
class Case:
    """One op at one size.

    Attributes:
        run: calls the op with a named implementation and gives the tensors to compare; this is what is timed.
        fresh: forgets what an earlier run wrote, before a run that is checked; ``more``: what else to compare then.
        operations, moved: floating-point operations and bytes, for the floor.
        library: the same work, or its main part, by a library call.
    """

    op: str
    size: dict[str, int]
    run: Callable[[str | None], Sequence[Tensor]]
    operations: float
    moved: float
    library: dict[str, Callable[[], object]] = field(default_factory=dict)
    fresh: Callable[[], None] = lambda: None
    more: Callable[[], Sequence[Tensor]] = tuple

    def checked(self, impl: str | None) -> list[Tensor]:
        """Copies of everything that a run gives."""
        self.fresh()
        out = self.run(impl)
        return [t.clone() for t in (*out, *self.more())]


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has an argument of that name."""
    return name in inspect.signature(function).parameters


def call(function: Callable[..., Any], impl: str | None, *args: Any, **more: Any) -> Any:
    """Call an op with a forced implementation.

    Raises:
        BenchError: the op has one implementation only, and it is not the one asked for.
    """
    if takes(function, "impl"):
        return function(*args, **more, impl=impl)
    if impl not in (None, "ref"):
        raise BenchError(f"{function.__name__} has no implementation {impl!r}, only 'ref'")
    return function(*args, **more)


class Maker:
    """Builds cases with random inputs.

    Args:
        config: widths, heads and vocabulary.
        dtype, device: of the inputs.
        seed: fresh numbers for each.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.itemsize = torch.empty((), dtype=dtype).element_size()

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        made = torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.float32)
        return (scale * made).to(self.dtype)

    def qkv_rope_write(self, rows: int) -> Case:
        """The rows of a pass, spread over slots of 128 rows each."""
        c = self.config
        slots = max(1, rows // 128)
        places = SCRATCH + max(128, -(-rows // slots))
        h, weight = self.random(rows, c.d_model), self.random(c.qkv_rows, c.d_model, scale=c.d_model**-0.5)
        bias = self.random(c.qkv_rows) if c.qkv_bias else None
        kv = tuple(self.random(slots, places, c.n_kv_heads, c.head_dim) for _ in range(2))
        index = torch.arange(rows, device=self.device)
        pos = index // slots
        cos, sin = rope_tables(c, int(pos.max()) + 1, self.device)
        target = (index % slots, SCRATCH + pos)

        angles = (cos[pos], sin[pos])

        def run(impl: str | None) -> Sequence[Tensor]:
            return (call(qkv_op.qkv_rope_write, impl, h, weight, bias, angles, target, kv, c.rope_fp32), *kv)

        def fresh() -> None:
            for tensor in kv:
                tensor.zero_()

        moved = self.itemsize * (weight.numel() + h.numel() + rows * c.qkv_rows)
        gemm = partial(F.linear, h, weight, bias)
        return Case(
            "qkv_rope_write",
            {"rows": rows},
            run,
            2 * rows * weight.numel(),
            moved,
            {"projection alone": gemm},
            fresh,
        )

    def row_attention(self, slots: int, width: int, keys: int, score: bool) -> Case:
        """``width`` rows of each slot over its whole canvas, with the score of Flash-Cache if asked for."""
        c = self.config
        n, places = slots * width, SCRATCH + keys
        q = self.random(n, c.n_heads, c.head_dim)
        k, v = (self.random(slots, places, c.n_kv_heads, c.head_dim) for _ in range(2))
        groups = [attention_op.Group(tuple(range(slots)), 0, width, places, whole=True)]
        rank = torch.zeros(n, dtype=torch.int32, device=self.device)
        lo = torch.zeros(slots, places, dtype=torch.int32, device=self.device)
        hi = (torch.arange(places, device=self.device) >= SCRATCH).int().expand(slots, places).contiguous()
        ends = torch.full((slots,), places, dtype=torch.int32, device=self.device)
        reads = torch.arange(n, device=self.device).view(slots, width)[:, : min(16, width)]
        flags = torch.ones_like(reads, dtype=torch.bool)

        sums: list[attention_op.ScoreSum] = []

        def fresh() -> None:
            sums[:] = [attention_op.ScoreSum(reads, flags, SCRATCH, own_rows=not c.shift)]

        def run(impl: str | None) -> Sequence[Tensor]:
            args = (q, (k, v), groups, rank, (lo, hi), ends, SCRATCH)
            return (call(attention_op.attend_rows, impl, *args, score=sums[0] if score else None),)

        def more() -> Sequence[Tensor]:
            return [t for s in sums if score and (t := s.total) is not None]

        fresh()

        heads = (t[:, SCRATCH:].transpose(1, 2) for t in (k, v))
        sdpa_k, sdpa_v = (t.contiguous() for t in heads)
        sdpa_q = q.view(slots, width, c.n_heads, c.head_dim).transpose(1, 2).contiguous()
        grouped = c.n_heads != c.n_kv_heads
        sdpa = partial(F.scaled_dot_product_attention, sdpa_q, sdpa_k, sdpa_v, enable_gqa=grouped)
        operations = 4 * n * keys * c.n_heads * c.head_dim
        moved = self.itemsize * (2 * slots * keys * c.n_kv_heads * c.head_dim + 2 * q.numel())
        size = {"slots": slots, "rows": n, "keys": keys, "score": int(score)}
        return Case("row_attention", size, run, operations, moved, {"SDPA, no score": sdpa}, fresh, more)

    def head_confidence(self, rows: int, sampled: str | None = None) -> Case:
        """Argmax, its probability and the logsumexp over the vocabulary; or a draw, ``plain`` or of the ``nucleus``."""
        c = self.config
        h, weight = (
            self.random(rows, c.d_model),
            self.random(c.vocab_size, c.d_model, scale=c.d_model**-0.5),
        )
        assert c.mask_id is not None
        spec = head_op.HeadSpec(c.n_tokens, c.mask_id)
        if sampled is not None:
            wanted = head_op.head_confidence(h, weight, spec).token
            spec = replace(spec, sampling=self._sampling(rows, sampled == "nucleus"), wanted=wanted)

        def run(impl: str | None) -> Sequence[Tensor]:
            out = call(head_op.head_confidence, impl, h, weight, spec)
            # Tokens may differ where two logits are equal but for rounding, and draws hang on more than that; the
            # probabilities of the best tokens may not, as the filters leave them.
            return (out.prob if out.prob_wanted is None else out.prob_wanted,)

        gemm = partial(F.linear, h, weight)
        moved = self.itemsize * (weight.numel() + h.numel())
        size: dict[str, Any] = {"rows": rows, "vocabulary": c.vocab_size}
        if sampled is not None:
            size["sampled"] = sampled
        return Case("head_confidence", size, run, 2 * rows * weight.numel(), moved, {"head alone": gemm})

    def _sampling(self, rows: int, nucleus: bool) -> head_op.Sampling:
        """Temperature 0.7 for every row; with ``nucleus`` top-p 0.9 and top-k 50."""
        noise, pos = CounterNoise(), torch.arange(rows, device=self.device)[None]
        noise.begin(torch.tensor([1], device=self.device), torch.tensor([0], device=self.device), rows)
        # A step makes them once, in small launches that would count here.
        hashes = noise.token_hashes(pos)
        heat = torch.full((rows,), 0.7, device=self.device)
        return head_op.Sampling(
            heat, torch.full_like(heat, 0.9), torch.full_like(heat, 50, dtype=torch.int64),
            partial(noise.per_token, pos), categorical=True, filters=nucleus, counter=lambda: hashes,
        )  # fmt: skip

    def linear(self, rows: int, matrix: str) -> Case:
        """One of a layer's matrices: wo, w_gate_up or w_down."""
        c = self.config
        width, depth = {
            "wo": (c.d_model, c.n_heads * c.head_dim), "w_gate_up": (2 * c.d_ffn, c.d_model),
            "w_down": (c.d_model, c.d_ffn),
        }[matrix]  # fmt: skip
        x, weight = self.random(rows, depth), self.random(width, depth, scale=depth**-0.5)

        def run(impl: str | None) -> Sequence[Tensor]:
            return (call(linear_op.linear, impl, x, weight),)

        moved = self.itemsize * (weight.numel() + x.numel() + rows * width)
        size = {"rows": rows, "depth": depth, "width": width}
        gemm = partial(F.linear, x, weight)
        return Case("linear", size, run, 2 * rows * weight.numel(), moved, {"product": gemm})

    def rms_norm(self, rows: int) -> Case:
        """The residual add and the norm: two inputs read, two outputs written."""
        c = self.config
        x, delta, weight = self.random(rows, c.d_model), self.random(rows, c.d_model), self.random(c.d_model)

        def run(impl: str | None) -> Sequence[Tensor]:
            normed, residual = call(norm_op.rms_norm, impl, x, weight, c.rms_eps, delta)
            return normed, residual

        return Case("rms_norm", {"rows": rows}, run, 6 * x.numel(), 4 * self.itemsize * x.numel())

    def silu_mul(self, rows: int) -> Case:
        """Two halves read, one written."""
        gate_up = self.random(rows, 2 * self.config.d_ffn)

        def run(impl: str | None) -> Sequence[Tensor]:
            return (call(silu_op.silu_mul, impl, gate_up),)

        elements = gate_up.numel() // 2
        return Case("silu_mul", {"rows": rows}, run, 5 * elements, 3 * self.itemsize * elements)

    def gated_linear(self, rows: int) -> Case:
        """Gate, up and activation: ``triton`` is the library's product and a kernel behind it, ``fused`` one kernel."""
        c = self.config
        h, weight = self.random(rows, c.d_model), self.random(2 * c.d_ffn, c.d_model, scale=c.d_model**-0.5)

        def run(impl: str | None) -> Sequence[Tensor]:
            if impl == "fused":
                if not gated_op.fits(h, weight):
                    raise BenchError(
                        "one kernel for both needs 16-bit numbers and a GPU of compute capability 9"
                    )
                return (gated_op.in_one(h, weight),)
            return (gated_op.gated_linear(h, weight, gate=impl, product="library"),)

        moved = self.itemsize * (weight.numel() + h.numel() + rows * c.d_ffn)
        product = partial(F.linear, h, weight)
        return Case(
            "gated_linear", {"rows": rows}, run, 2 * rows * weight.numel(), moved, {"product alone": product}
        )

    def cases(self, ops: Sequence[str], sizes: Sizes) -> Iterator[Case]:
        """Every case of the chosen ops, one at a time: each holds its own inputs."""
        for name in ops:
            if name not in OPS:
                raise BenchError(f"op {name!r} is not known; there are {', '.join(OPS)}")
            if name == "row_attention":
                for slots in sizes.slots:
                    yield self.row_attention(slots, sizes.width, sizes.keys, True)
                    yield self.row_attention(slots, sizes.width, sizes.keys, False)
                yield self.row_attention(1, sizes.keys, sizes.keys, False)
            elif name == "head_confidence":
                for slots in sizes.slots:
                    yield self.head_confidence(slots * sizes.reads)
                for slots in (sizes.slots[0], sizes.slots[-1]):
                    for sampled in ("plain", "nucleus"):
                        yield self.head_confidence(slots * sizes.reads, sampled)
            elif name == "linear":
                for rows in sizes.rows:
                    for matrix in ("wo", "w_gate_up", "w_down"):
                        yield self.linear(rows, matrix)
            else:
                for rows in sizes.rows:
                    yield getattr(self, name)(rows)


def error_of(out: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Largest relative error ‖out - reference‖ / ‖reference‖ over the outputs; inf where one is not finite."""
    worst = 0.0
    for a, b in zip(out, reference, strict=True):
        wide, right = a.double(), b.double()
        if not bool(wide.isfinite().all()):
            return float("inf")
        worst = max(worst, float((wide - right).norm() / right.norm().clamp_min(1e-30)))
    return worst


def measure_case(
    case: Case, impls: Sequence[str], timer: Timer, ceilings: Ceilings, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Rows of one case: each implementation, then the library's call."""
    floor = ceilings.ms(case.operations, case.moved)
    base: dict[str, Any] = {"op": case.op, **case.size, "floor_ms": round(floor, 5)}
    reference = case.checked("ref")
    rows: list[dict[str, Any]] = []
    for impl in impls:
        row = {**base, "impl": impl}
        try:
            error = error_of(case.checked(impl), reference)
            case.fresh()
            if not error <= TOLERANCE[dtype]:
                rows.append({**row, "ms": None, "failed_with": f"wrong result, relative error {error:.3g}"})
                continue
            timed = _timed(timer, partial(case.run, impl), case, floor)
        except (BenchError, ValueError, ImportError) as why:
            rows.append({**row, "ms": None, "skipped": str(why)})
        except Exception as why:  # a kernel that fails must not lose the others
            rows.append({**row, "ms": None, "failed_with": f"{type(why).__name__}: {why}"[:300]})
        else:
            rows.append({**row, "error": float(f"{error:.3g}"), **timed})
    for name, fn in case.library.items():
        rows.append({**base, "impl": f"library: {name}", **_timed(timer, fn, case, floor)})
    return rows


def _timed(timer: Timer, fn: Callable[[], object], case: Case, floor: float) -> dict[str, Any]:
    timing = timer(fn)
    return {
        **timing.row(), "times_floor": round(timing.ms / floor, 2),
        "tflop_s": round(case.operations / timing.ms / 1e9, 3), "tb_s": round(case.moved / timing.ms / 1e9, 4),
    }  # fmt: skip
