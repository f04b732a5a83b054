"""Triton kernels: the fused projection of the paper, and rotation with scatter behind a matrix product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_dllm.kernels import tuned
from flash_dllm.kernels.devices import Limits, limits, precision
from flash_dllm.kernels.linear import Matrix, linear

CHUNK = 1024
"""Rows projected at once before they are scattered: their product stays in the L2 cache."""


@dataclass(frozen=True)
class Tiles:
    """Rows ``m``, heads and paired dimensions of a head a tile (``heads`` > 1 only with whole heads), depth ``k``."""

    m: int
    heads: int
    pairs: int
    k: int
    warps: int = 4
    stages: int = 3
    group: int = 8


@triton.jit
def _turn(first, second, c, s, FP32: tl.constexpr, dtype: tl.constexpr):
    """Half-rotation; in float32 and rounded once by the store, or rounding each product as Dream's code does."""
    if FP32:
        return first * c - second * s, second * c + first * s
    first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    c, s = c.to(dtype).to(tl.float32), s.to(dtype).to(tl.float32)
    a, b = (first * c).to(dtype).to(tl.float32), (second * s).to(dtype).to(tl.float32)
    e, f = (second * c).to(dtype).to(tl.float32), (first * s).to(dtype).to(tl.float32)
    return a - b, e + f


@triton.jit
def _stored(x, dtype: tl.constexpr):
    """``x`` as keys and values are kept; in 8 bits what is too large becomes the largest number, and NaN stays."""
    if dtype == tl.float8e4nv:
        x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    return x.to(dtype)


@triton.jit
def _scatter(
    packed, cos, sin, slot, place, keys, values, queries, places, n_heads, n_kv,
    DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, FP32: tl.constexpr,
):  # fmt: skip
    """One program: one row, ``HEADS`` heads. Rotates q and k, writes q out and k, v to their places."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    j = tl.arange(0, HALF)
    pairs = j < DIM // 2
    total = n_heads + 2 * n_kv
    own = (head < total)[:, None] & pairs[None, :]
    cell = (row * total + head)[:, None] * DIM + j[None, :]
    first = tl.load(packed + cell, mask=own, other=0.0).to(tl.float32)
    second = tl.load(packed + cell + DIM // 2, mask=own, other=0.0).to(tl.float32)
    c = tl.load(cos + row * (DIM // 2) + j, mask=pairs, other=0.0)[None, :]
    s = tl.load(sin + row * (DIM // 2) + j, mask=pairs, other=0.0)[None, :]
    one, two = _turn(first, second, c, s, FP32, packed.dtype.element_ty)
    is_v = (head >= n_heads + n_kv)[:, None]
    one, two = tl.where(is_v, first, one), tl.where(is_v, second, two)
    is_q = (head < n_heads)[:, None] & own
    out = queries + (row * n_heads + head)[:, None] * DIM + j[None, :]
    tl.store(out, one.to(queries.dtype.element_ty), mask=is_q)
    tl.store(out + DIM // 2, two.to(queries.dtype.element_ty), mask=is_q)
    line = (tl.load(slot + row) * places + tl.load(place + row)) * n_kv
    kv_head = (head - n_heads) % n_kv
    target = (line + kv_head)[:, None] * DIM + j[None, :]
    is_k = (head >= n_heads)[:, None] & own & ~is_v
    tl.store(keys + target, _stored(one, keys.dtype.element_ty), mask=is_k)
    tl.store(keys + target + DIM // 2, _stored(two, keys.dtype.element_ty), mask=is_k)
    tl.store(values + target, _stored(one, values.dtype.element_ty), mask=is_v & own)
    tl.store(values + target + DIM // 2, _stored(two, values.dtype.element_ty), mask=is_v & own)


@triton.jit(do_not_specialize=["n_rows"])
def _project(
    x, weight, bias, cos, sin, slot, place, keys, values, queries, n_rows, depth, places, n_heads, n_kv,
    DIM: tl.constexpr, M: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, PARTS: tl.constexpr,
    K: tl.constexpr, GROUP: tl.constexpr, FP32: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: M rows of ``HEADS`` heads' ``PAIRS`` paired dimensions, projected, rotated and written."""
    half: tl.constexpr = DIM // 2
    width: tl.constexpr = HEADS * PAIRS
    total = n_heads + 2 * n_kv
    blocks_m, blocks_n = tl.cdiv(n_rows, M), tl.cdiv(total, HEADS) * PARTS
    # Blocks in groups of rows, so that a weight tile read for one of them serves the others from the L2 cache.
    pid = tl.program_id(0)
    lane = pid // (GROUP * blocks_n)
    rows_here = tl.minimum(blocks_m - lane * GROUP, GROUP)
    block_m = lane * GROUP + pid % (GROUP * blocks_n) % rows_here
    block_n = pid % (GROUP * blocks_n) // rows_here

    row = block_m * M + tl.arange(0, M)
    n = tl.arange(0, 2 * width)
    head_n = block_n // PARTS * HEADS + n % width // PAIRS
    j_n = block_n % PARTS * PAIRS + n % PAIRS
    column = head_n * DIM + n // width * half + j_n
    there = (head_n < total) & (j_n < half)
    k = tl.arange(0, K)
    x_at = x + row.to(tl.int64)[:, None] * depth + k[None, :]
    w_at = weight + column.to(tl.int64)[:, None] * depth + k[None, :]
    acc = tl.zeros((M, 2 * width), tl.float32)
    for at in tl.range(0, depth, K):
        deep = k < depth - at
        a = tl.load(x_at, mask=(row < n_rows)[:, None] & deep[None, :], other=0.0)
        b = tl.load(w_at, mask=there[:, None] & deep[None, :], other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
        x_at += K
        w_at += K
    if BIAS:
        acc += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[None, :]
    first, second = tl.split(tl.permute(tl.reshape(acc, (M, 2, width)), (0, 2, 1)))

    i = tl.arange(0, width)
    head = block_n // PARTS * HEADS + i // PAIRS
    j = block_n % PARTS * PAIRS + i % PAIRS
    own = (row < n_rows)[:, None] & ((head < total) & (j < half))[None, :]
    angle = row[:, None] * half + j[None, :]
    c = tl.load(cos + angle, mask=own, other=0.0)
    s = tl.load(sin + angle, mask=own, other=0.0)
    one, two = _turn(first, second, c, s, FP32, x.dtype.element_ty)
    is_v = (head >= n_heads + n_kv)[None, :]
    one, two = tl.where(is_v, first, one), tl.where(is_v, second, two)
    is_q = (head < n_heads)[None, :] & own
    out = queries + (row.to(tl.int64) * n_heads)[:, None] * DIM + (head * DIM + j)[None, :]
    tl.store(out, one.to(queries.dtype.element_ty), mask=is_q)
    tl.store(out + half, two.to(queries.dtype.element_ty), mask=is_q)
    inside = row < n_rows
    line = tl.load(slot + row, mask=inside, other=0) * places + tl.load(place + row, mask=inside, other=0)
    target = (line * n_kv * DIM)[:, None] + ((head - n_heads) % n_kv * DIM + j)[None, :]
    is_k = (head >= n_heads)[None, :] & own & ~is_v
    tl.store(keys + target, _stored(one, keys.dtype.element_ty), mask=is_k)
    tl.store(keys + target + half, _stored(two, keys.dtype.element_ty), mask=is_k)
    tl.store(values + target, _stored(one, values.dtype.element_ty), mask=is_v & own)
    tl.store(values + target + half, _stored(two, values.dtype.element_ty), mask=is_v & own)


def _plain(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Without strides, which the kernels do not read."""
    return first.contiguous(), second.contiguous()


def scattered(
    h: Tensor,
    weight: Matrix,
    bias: Tensor | None,
    angles: tuple[Tensor, Tensor],
    target: tuple[Tensor, Tensor],
    kv: tuple[Tensor, Tensor],
    in_float32: bool,
    chunk: int = CHUNK,
    product: str | None = None,
) -> Tensor:
    """A matrix product (the library's, or ``product``), then one kernel that rotates and scatters; ``chunk`` rows at
    a time."""
    (keys, values), (cos, sin), (slot, place) = kv, *(_plain(*pair) for pair in (angles, target))
    n, (_, places, n_kv, dim) = h.shape[0], keys.shape
    queries: Tensor | None = None
    for begin in range(0, max(n, 1), chunk):
        part = slice(begin, min(n, begin + chunk))
        packed = linear(h[part], weight, bias, product)
        n_heads = packed.shape[1] // dim - 2 * n_kv
        if queries is None:
            queries = torch.empty((n, n_heads, dim), dtype=h.dtype, device=h.device)
        heads = 16
        _scatter[(packed.shape[0], triton.cdiv(n_heads + 2 * n_kv, heads))](
            packed, cos[part], sin[part], slot[part], place[part], keys, values, queries[part],
            places, n_heads, n_kv,
            DIM=dim, HALF=triton.next_power_of_2(dim // 2), HEADS=heads, FP32=in_float32,
        )  # fmt: skip
    assert queries is not None
    return queries


def tiles_for(rows: int, dim: int, dtype: torch.dtype, chip: Limits) -> Tiles:
    """Tiles by the number of rows: few rows stream the weights, many keep the tensor cores busy."""
    pairs = max(16, triton.next_power_of_2(dim // 2))
    if dtype == torch.float32:
        return Tiles(16 if rows <= 16 else 64, 1, min(pairs, 32), 32, 4, 2)
    big = chip.shared > 128 * 1024
    if rows <= 16:
        return Tiles(16, 1, min(pairs, 32), 128, 4, 4 if big else 3)
    if rows <= 64:
        return Tiles(64, 1, min(pairs, 32), 128, 4, 4 if big else 2)
    if rows <= 256:
        return Tiles(128, 1, min(pairs, 32), 64, 4, 4 if big else 3)
    if big:
        return Tiles(128, max(1, 128 // pairs), pairs, 64, 8, 3)
    return Tiles(128, 1, pairs, 32, 8, 3)


def stored_tiles(rows: int, shape: torch.Size) -> Tiles | None:
    """Tiles of the fused kernel where it was measured to be the faster one on this device."""
    entry = tuned.current().find("qkv_rope_write", rows, depth=shape[1], width=shape[0])
    return Tiles(**entry.tiles) if entry is not None and entry.impl == "fused" else None


def fused(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    angles: tuple[Tensor, Tensor],
    target: tuple[Tensor, Tensor],
    kv: tuple[Tensor, Tensor],
    in_float32: bool,
    tiles: Tiles | None = None,
) -> Tensor:
    """The paper's fusion: projection, rotation on the float32 accumulators, K and V straight to their places."""
    (keys, values), (cos, sin), (slot, place) = kv, *(_plain(*pair) for pair in (angles, target))
    (n, depth), (_, places, n_kv, dim) = h.shape, keys.shape
    n_heads = weight.shape[0] // dim - 2 * n_kv
    t = tiles or tiles_for(n, dim, h.dtype, limits(h.device))
    parts = triton.cdiv(dim // 2, t.pairs)
    queries = torch.empty((n, n_heads, dim), dtype=h.dtype, device=h.device)
    grid = triton.cdiv(n, t.m) * triton.cdiv(n_heads + 2 * n_kv, t.heads) * parts
    _project[(grid,)](
        h.contiguous(), weight, weight if bias is None else bias, cos, sin, slot, place, keys, values, queries,
        n, depth, places, n_heads, n_kv,
        DIM=dim, M=t.m, HEADS=t.heads, PAIRS=t.pairs, PARTS=parts, K=t.k, GROUP=t.group, FP32=in_float32,
        BIAS=bias is not None, PRECISION=precision(h.dtype), num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return queries
