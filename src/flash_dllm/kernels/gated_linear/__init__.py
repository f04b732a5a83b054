"""The first half of a SwiGLU feed-forward: gate and up in one product, then the gated activation."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_dllm.kernels.choice import TRITON, choose
from flash_dllm.kernels.devices import full_waves, streams_tiles
from flash_dllm.kernels.linear import Matrix, linear
from flash_dllm.kernels.silu_mul import silu_mul

__all__ = ["MANY", "fits", "gated_linear", "in_one"]

MANY = 512
"""Rows from which one kernel of our own may beat the library's product and a second kernel, on an H200."""


def gated_linear(h: Tensor, weight: Matrix, *, gate: str | None = None, product: str | None = None) -> Tensor:
    """``silu(h @ W_gate.T) * (h @ W_up.T)`` of rows ``h`` [N, d]; ``weight`` [2F, d], gate first; result [N, F].

    The definition is :func:`silu_mul` of :func:`linear`. Gate, up and ``silu(gate)`` are rounded to the dtype of
    ``h`` in each form, as the models' own code does.

    Args:
        gate: implementation of the activation: ``ref``, ``triton``, or None by device and dtype.
        product: implementation of the product, see :func:`linear`; None takes one kernel for both where it
            :func:`fits` and many rows fill the GPU, else the library.

    Raises:
        ValueError: an implementation is not known or cannot run on this device.
    """
    if product is None and h.ndim == 2 and len(h) >= MANY and choose(gate, h) == TRITON and fits(h, weight):
        from . import triton

        assert isinstance(weight, Tensor)
        if full_waves(triton.count_tiles(len(h), len(weight) // 2), h.device):
            return in_one(h, weight)
    return silu_mul(linear(h, weight, impl=product), impl=gate)


def in_one(h: Tensor, weight: Matrix) -> Tensor:
    """By one kernel, whatever the number of rows; see :func:`fits`."""
    from . import triton

    assert isinstance(weight, Tensor)
    return triton.gated_linear(h, weight)


def fits(h: Tensor, weight: Matrix) -> bool:
    """Whether one kernel can do it: 16-bit numbers, a plain matrix, a GPU of compute capability 9."""
    known = h.dtype in (torch.bfloat16, torch.float16)
    # The result's rows start at multiples of 16 bytes, too.
    return known and isinstance(weight, Tensor) and len(weight) % 16 == 0 and streams_tiles(h, weight)
