"""Triton kernel: residual add and RMSNorm in one pass over the rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """Rows of one program and its warps."""

    rows: int
    warps: int


TILES = ((512, Tile(8, 4)), (1024, Tile(4, 4)), (2048, Tile(1, 4)), (4096, Tile(1, 8)), (8192, Tile(1, 16)))
"""The tile up to each width. It does not depend on the number of rows, so a row's result does not either."""

VARIANTS = tuple(Tile(rows, warps) for rows in (1, 2, 4) for warps in (4, 8, 16))
"""What is worth measuring."""


def tile_for(width: int) -> Tile:
    """The tile for rows of ``width`` elements."""
    return next((tile for limit, tile in TILES if width <= limit), TILES[-1][1])


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x, delta, weight, normed, residual, rows, width, eps, stride, delta_stride,
    ADD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: ``ROWS`` whole rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None]
    value = tl.load(x + at * stride + column[None, :], mask=inside, other=0.0)
    kind = value.dtype
    wide = value.to(tl.float32)
    if ADD:
        wide += tl.load(delta + at * delta_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        value = wide.to(kind)
        tl.store(residual + at * width + column[None, :], value, mask=inside)
        wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / width + eps)
    # Rounded before the weight is applied, as LLaDA and Dream do.
    out = (wide * scale[:, None]).to(kind).to(tl.float32)
    out *= tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(normed + at * width + column[None, :], out.to(kind), mask=inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """See :func:`flash_dllm.kernels.rms_norm.rms_norm`; ``tile`` is for measuring."""
    width = x.shape[-1]
    flat = _rows(x)
    added = flat if delta is None else _rows(delta)
    normed = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    residual = normed if delta is None else torch.empty_like(normed)
    rows = flat.shape[0]
    tile = tile or tile_for(width)
    if rows:
        _norm[(triton.cdiv(rows, tile.rows),)](
            flat, added, weight, normed, residual, rows, width, eps, flat.stride(0), added.stride(0),
            ADD=delta is not None, ROWS=tile.rows, WIDTH=triton.next_power_of_2(width), num_warps=tile.warps,
        )  # fmt: skip
    return normed.view(x.shape), x if delta is None else residual.view(x.shape)


def _rows(x: Tensor) -> Tensor:
    """``x`` as rows [N, d] whose elements are adjacent."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()
