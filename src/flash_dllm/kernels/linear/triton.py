"""A Triton product of rows and a weight matrix: batch-invariant with one tile, or with tiles for few rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_dllm.kernels.devices import Limits, limits, precision


@dataclass(frozen=True)
class Tiles:
    """Rows ``m``, outputs ``n``, depth ``k``; ``group`` blocks of rows share a weight tile in the L2 cache."""

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 3
    group: int = 8


def invariant_tiles(dtype: torch.dtype, chip: Limits) -> Tiles:
    """One tile for every number of rows: a row is the same sum in the same order in any batch."""
    if dtype == torch.float32:
        return Tiles(64, 64, 32, 4, 2)
    return Tiles(128, 128, 64, 8, 4) if chip.shared > 128 * 1024 else Tiles(64, 64, 64, 4, 3)


@triton.jit(do_not_specialize=["rows"])
def _matmul(
    x, weight, bias, out, rows, width, depth,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: M rows, N outputs."""
    blocks_m, blocks_n = tl.cdiv(rows, M), tl.cdiv(width, N)
    pid = tl.program_id(0)
    lane = pid // (GROUP * blocks_n)
    rows_here = tl.minimum(blocks_m - lane * GROUP, GROUP)
    m = (lane * GROUP + pid % (GROUP * blocks_n) % rows_here) * M + tl.arange(0, M)
    n = pid % (GROUP * blocks_n) // rows_here * N + tl.arange(0, N)
    k = tl.arange(0, K)
    x_at = x + m.to(tl.int64)[:, None] * depth + k[None, :]
    w_at = weight + n.to(tl.int64)[:, None] * depth + k[None, :]
    acc = tl.zeros((M, N), tl.float32)
    for at in tl.range(0, depth, K):
        deep = (k < depth - at)[None, :]
        a = tl.load(x_at, mask=(m < rows)[:, None] & deep, other=0.0)
        b = tl.load(w_at, mask=(n < width)[:, None] & deep, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
        x_at += K
        w_at += K
    if BIAS:
        acc += tl.load(bias + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
    target = out + m.to(tl.int64)[:, None] * width + n[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < width)[None, :])


def tiles_for(rows: int, width: int, dtype: torch.dtype, chip: Limits) -> Tiles:
    """Tiles for ``rows`` rows and ``width`` outputs; few rows want many programs that stream the weights."""
    if dtype == torch.float32:
        return invariant_tiles(dtype, chip)
    big = chip.shared > 128 * 1024
    if rows > 128:
        return Tiles(128, 256, 64, 8, 3) if big else Tiles(128, 128, 32, 8, 3)
    m = 16 if rows <= 16 else 64 if rows <= 64 else 128
    n = 32 if width < 64 * chip.processors else 64
    return Tiles(m, n, 128, 4, 4 if big else 2, group=1)


def matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool, tiles: Tiles | None = None
) -> Tensor:
    """``x`` [N, in] times ``weight`` [out, in] transposed, plus ``bias``; accumulated in float32, rounded once."""
    (rows, depth), width = x.shape, weight.shape[0]
    chip = limits(x.device)
    t = tiles or (invariant_tiles(x.dtype, chip) if invariant else tiles_for(rows, width, x.dtype, chip))
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    _matmul[(triton.cdiv(rows, t.m) * triton.cdiv(width, t.n),)](
        x.contiguous(), weight, out if bias is None else bias, out, rows, width, depth,
        M=t.m, N=t.n, K=t.k, GROUP=t.group, BIAS=bias is not None, PRECISION=precision(x.dtype),
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out
