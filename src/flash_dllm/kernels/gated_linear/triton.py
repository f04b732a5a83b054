"""Triton kernel: gate and up as one product whose tiles hold the same columns of both, and the activation behind it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_dllm.kernels.devices import limits


@dataclass(frozen=True)
class Tile:
    """``rows`` rows and ``width`` columns of the result, which take 2 * ``width`` rows of the weights; depth ``k``.

    ``group``: tiles of rows that go through the weights together, so that they read them from the L2 cache.
    """

    rows: int
    width: int
    k: int
    warps: int = 8
    stages: int = 3
    group: int = 8


TILE = Tile(128, 128, 64)
VARIANTS = (TILE, Tile(128, 128, 64, stages=4), Tile(256, 64, 64, stages=4))
"""What is worth measuring on an H200."""


@triton.jit(do_not_specialize=["rows"])
def _gated(
    x, weight, out, rows, width, depth,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A persistent program: every so many-th tile. The next one's operands load while this one's results leave."""
    across, down = tl.cdiv(width, N), tl.cdiv(rows, M)
    for tile in tl.range(tl.program_id(0), across * down, tl.num_programs(0), flatten=True):
        lane = tile // (GROUP * across)
        here = tl.minimum(down - lane * GROUP, GROUP)
        m = (lane * GROUP + tile % (GROUP * across) % here) * M
        n = tile % (GROUP * across) // here * N
        acc = tl.zeros((M, 2 * N), tl.float32)
        for at in tl.range(0, depth, K):
            both = tl.reshape(weight.load([0, n, at]), (2 * N, K))
            acc = tl.dot(x.load([m, at]), tl.trans(both), acc)
        gate, up = tl.split(tl.permute(tl.reshape(acc, (M, 2, N)), (0, 2, 1)))
        # Rounded where the models' own code rounds.
        gate, up = gate.to(out.dtype).to(tl.float32), up.to(out.dtype).to(tl.float32)
        active = (gate / (1.0 + tl.exp(-gate))).to(out.dtype).to(tl.float32)
        out.store([m, n], (active * up).to(out.dtype))


def count_tiles(rows: int, width: int, tile: Tile = TILE) -> int:
    """Tiles of a launch with ``width`` columns in its result."""
    return int(triton.cdiv(rows, tile.rows) * triton.cdiv(width, tile.width))


def gated_linear(h: Tensor, weight: Tensor, tile: Tile = TILE) -> Tensor:
    """See :func:`flash_dllm.kernels.gated_linear.gated_linear`; the caller has checked that the operands fit.

    ``tile`` is for measuring.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    (rows, depth), width = h.shape, weight.shape[0] // 2
    out = torch.empty((rows, width), dtype=h.dtype, device=h.device)
    if not rows:
        return out
    _gated[(min(count_tiles(rows, width, tile), limits(h.device).processors),)](
        TensorDescriptor.from_tensor(h, [tile.rows, tile.k]),
        TensorDescriptor.from_tensor(weight.view(2, width, depth), [2, tile.width, tile.k]),
        TensorDescriptor.from_tensor(out, [tile.rows, tile.width]),
        rows, width, depth, M=tile.rows, N=tile.width, K=tile.k, GROUP=tile.group,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
