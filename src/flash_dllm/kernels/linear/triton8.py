"""Triton kernels for matrices in 8 bits: an int8 product that converts inside, and rows to e4m3 in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_dllm.kernels.devices import limits, precision

from .ref import E4M3_MAX
from .triton import Tiles, tiles_for

WIDEST = 32768
"""Numbers of a row that one program quantises."""


@triton.jit(do_not_specialize=["rows"])
def _int8_product(
    x, data, scale, bias, out, rows, width, depth,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: M rows, N outputs. Neighbours share a tile of the weights."""
    blocks_m = tl.cdiv(rows, M)
    m = tl.program_id(0) % blocks_m * M + tl.arange(0, M)
    n = tl.program_id(0) // blocks_m * N + tl.arange(0, N)
    k = tl.arange(0, K)
    x_at = x + m.to(tl.int64)[:, None] * depth + k[None, :]
    w_at = data + n.to(tl.int64)[:, None] * depth + k[None, :]
    acc = tl.zeros((M, N), tl.float32)
    for at in tl.range(0, depth, K):
        deep = (k < depth - at)[None, :]
        a = tl.load(x_at, mask=(m < rows)[:, None] & deep, other=0.0)
        b = tl.load(w_at, mask=(n < width)[:, None] & deep, other=0)
        # By way of float32, exactly: the interpreter has no cast from int8 to bfloat16.
        acc = tl.dot(a, tl.trans(b.to(tl.float32).to(a.dtype)), acc, input_precision=PRECISION)
        x_at += K
        w_at += K
    acc *= tl.load(scale + n, mask=n < width, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
    target = out + m.to(tl.int64)[:, None] * width + n[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < width)[None, :])


def int8_linear(
    x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, tiles: Tiles | None = None
) -> Tensor:
    """:func:`flash_dllm.kernels.linear.ref.int8_linear` with the weights read once, as int8; rounded once."""
    (rows, depth), width = x.shape, data.shape[0]
    t = tiles or tiles_for(rows, width, x.dtype, limits(x.device))
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    _int8_product[(triton.cdiv(rows, t.m) * triton.cdiv(width, t.n),)](
        x.contiguous(), data, scale, out if bias is None else bias, out, rows, width, depth,
        M=t.m, N=t.n, K=t.k, BIAS=bias is not None, PRECISION=precision(x.dtype),
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out


@triton.jit
def _to_fp8(x, data, scale, width, stride, LARGEST: tl.constexpr, WIDTH: tl.constexpr):
    """One program: one row."""
    row, column = tl.program_id(0), tl.arange(0, WIDTH)
    inside = column < width
    value = tl.load(x + row.to(tl.int64) * stride + column, mask=inside, other=0.0).to(tl.float32)
    top = tl.max(tl.abs(value), 0)
    step = tl.where(top == 0, 1.0, tl.math.div_rn(top, LARGEST))
    value = tl.math.div_rn(value, tl.broadcast_to(step, (WIDTH,)))
    # NaN must stay NaN: it tells that the row's request failed.
    value = tl.clamp(value, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(data + row.to(tl.int64) * width + column, value.to(tl.float8e4nv), mask=inside)
    tl.store(scale + row, step)


def quantize_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`flash_dllm.kernels.linear.ref.quantize_fp8` in one launch, for rows of up to :data:`WIDEST` numbers."""
    count, width = rows.shape
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    data = torch.empty((count, width), dtype=torch.float8_e4m3fn, device=rows.device)
    scale = torch.empty(count, dtype=torch.float32, device=rows.device)
    if count:
        block = triton.next_power_of_2(width)
        _to_fp8[(count,)](
            rows, data, scale, width, rows.stride(0), LARGEST=E4M3_MAX, WIDTH=block,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return data, scale
