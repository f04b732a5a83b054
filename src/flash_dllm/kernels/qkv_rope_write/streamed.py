"""Triton kernel: the paper's fusion for many rows on Hopper: whole tiles through TMA, persistent programs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_dllm.kernels.devices import limits

from .triton import _plain, _stored, _turn


@dataclass(frozen=True)
class Tile:
    """``rows`` rows and two whole heads a tile, depth ``k``; ``group`` as in `gated_linear`."""

    rows: int
    k: int
    warps: int = 8
    stages: int = 3
    group: int = 8


TILE = Tile(128, 64)
VARIANTS = (TILE, Tile(128, 64, stages=4))
"""What is worth measuring on an H200."""


@triton.jit
def _head(
    acc, head, row, inside, line, bias, cos, sin, keys, values, queries, n_heads, n_kv,
    DIM: tl.constexpr, M: tl.constexpr, FP32: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Rotate one head ``acc`` [M, DIM] and write it where it belongs. Branches would keep the loops from merging."""
    half: tl.constexpr = DIM // 2
    dtype: tl.constexpr = queries.dtype.element_ty
    which = tl.zeros((1, 1), tl.int32) + head
    turns, there = which < n_heads + n_kv, which < n_heads + 2 * n_kv
    if BIAS:
        column = head * DIM + tl.arange(0, DIM)
        acc += tl.load(bias + column, mask=column < (n_heads + 2 * n_kv) * DIM, other=0.0).to(tl.float32)[
            None, :
        ]
    first, second = tl.split(tl.permute(tl.reshape(acc, (M, 2, half)), (0, 2, 1)))
    j = tl.arange(0, half)[None, :]
    own = inside[:, None]
    angle = row[:, None] * half + j
    c = tl.load(cos + angle, mask=own & turns, other=1.0)
    s = tl.load(sin + angle, mask=own & turns, other=0.0)
    one, two = _turn(first, second, c, s, FP32, dtype)
    # Values do not turn, by no angle either: of a number beside one that is not finite 0 * inf would remain.
    one, two = tl.where(turns, one, first), tl.where(turns, two, second)
    at = queries + ((row.to(tl.int64) * n_heads + head) * DIM)[:, None] + j
    tl.store(at, one.to(dtype), mask=own & (which < n_heads))
    tl.store(at + half, two.to(dtype), mask=own & (which < n_heads))
    to = ((line * n_kv + (head - n_heads) % n_kv) * DIM)[:, None] + j
    one, two = _stored(one, keys.dtype.element_ty), _stored(two, keys.dtype.element_ty)
    is_k, is_v = own & (which >= n_heads) & turns, own & ~turns & there
    tl.store(keys + to, one, mask=is_k)
    tl.store(keys + to + half, two, mask=is_k)
    tl.store(values + to, one, mask=is_v)
    tl.store(values + to + half, two, mask=is_v)


@triton.jit(do_not_specialize=["n_rows"])
def _streamed(
    x, weight, bias, cos, sin, slot, place, keys, values, queries, n_rows, depth, places, n_heads, n_kv,
    DIM: tl.constexpr, M: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, FP32: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """A persistent program: every so many-th tile of M rows and two heads."""
    across, down = tl.cdiv(n_heads + 2 * n_kv, 2), tl.cdiv(n_rows, M)
    for tile in tl.range(tl.program_id(0), across * down, tl.num_programs(0), flatten=True):
        lane = tile // (GROUP * across)
        here = tl.minimum(down - lane * GROUP, GROUP)
        m = (lane * GROUP + tile % (GROUP * across) % here) * M
        head = tile % (GROUP * across) // here * 2
        acc = tl.zeros((M, 2 * DIM), tl.float32)
        for at in tl.range(0, depth, K):
            acc = tl.dot(x.load([m, at]), tl.trans(weight.load([head * DIM, at])), acc)
        left, right = tl.split(tl.permute(tl.reshape(acc, (M, 2, DIM)), (0, 2, 1)))
        row = m + tl.arange(0, M)
        inside = row < n_rows
        line = tl.load(slot + row, mask=inside, other=0) * places + tl.load(place + row, mask=inside, other=0)
        _head(
            left, head, row, inside, line, bias, cos, sin, keys, values, queries, n_heads, n_kv,
            DIM, M, FP32, BIAS,
        )  # fmt: skip
        _head(
            right, head + 1, row, inside, line, bias, cos, sin, keys, values, queries, n_heads, n_kv,
            DIM, M, FP32, BIAS,
        )  # fmt: skip


def count_tiles(rows: int, heads: int, tile: Tile = TILE) -> int:
    """Tiles of a launch with ``heads`` heads in all."""
    return int(triton.cdiv(rows, tile.rows) * triton.cdiv(heads, 2))


def streamed(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    angles: tuple[Tensor, Tensor],
    target: tuple[Tensor, Tensor],
    kv: tuple[Tensor, Tensor],
    in_float32: bool,
    tile: Tile = TILE,
) -> Tensor:
    """See :func:`flash_dllm.kernels.qkv_rope_write.qkv_rope_write`; the caller has checked that the operands fit.

    The width of a head is a power of two. ``tile`` is for measuring.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    (keys, values), (cos, sin), (slot, place) = kv, *(_plain(*pair) for pair in (angles, target))
    (rows, depth), (_, places, n_kv, dim) = h.shape, keys.shape
    n_heads = weight.shape[0] // dim - 2 * n_kv
    queries = torch.empty((rows, n_heads, dim), dtype=h.dtype, device=h.device)
    if not rows:
        return queries
    _streamed[(min(count_tiles(rows, n_heads + 2 * n_kv, tile), limits(h.device).processors),)](
        TensorDescriptor.from_tensor(h, [tile.rows, tile.k]),
        TensorDescriptor.from_tensor(weight, [2 * dim, tile.k]),
        weight if bias is None else bias, cos, sin, slot, place, keys, values, queries,
        rows, depth, places, n_heads, n_kv,
        DIM=dim, M=tile.rows, K=tile.k, GROUP=tile.group, FP32=in_float32, BIAS=bias is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return queries
