"""Triton kernel: the gated activation, reading gate and up once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """Columns of one program and its warps."""

    width: int
    warps: int


TILE = Tile(1024, 4)
VARIANTS = (Tile(512, 4), Tile(1024, 4), Tile(2048, 4), Tile(2048, 8), Tile(4096, 8))
"""What is worth measuring."""


@triton.jit
def _gate(packed, out, width, stride, blocks, WIDTH: tl.constexpr):
    """One program: ``WIDTH`` columns of one row."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * WIDTH + tl.arange(0, WIDTH)
    inside = column < width
    gate = tl.load(packed + row * stride + column, mask=inside, other=0.0)
    up = tl.load(packed + row * stride + width + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    # Rounded before the product, as the models' own code does.
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * width + column, (active * up.to(tl.float32)).to(gate.dtype), mask=inside)


def silu_mul(gate_up: Tensor, tile: Tile = TILE) -> Tensor:
    """See :func:`flash_dllm.kernels.silu_mul.silu_mul`; ``tile`` is for measuring."""
    flat = gate_up.reshape(-1, gate_up.shape[-1])
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    rows, width = flat.shape[0], flat.shape[1] // 2
    out = torch.empty((rows, width), dtype=flat.dtype, device=flat.device)
    blocks = triton.cdiv(width, tile.width)
    if out.numel():
        _gate[(rows * blocks,)](
            flat, out, width, flat.stride(0), blocks, WIDTH=tile.width, num_warps=tile.warps
        )
    return out.view(*gate_up.shape[:-1], width)
