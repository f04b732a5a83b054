"""QKV projection, rotary embedding and cache write."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_dllm.kernels.choice import INVARIANT, REF, TRITON, choose
from flash_dllm.kernels.devices import full_waves, streams_tiles
from flash_dllm.kernels.linear import Matrix

from . import ref
from .ref import rotate

__all__ = ["FUSED", "SCATTERED", "STREAMED", "may_stream", "qkv_rope_write", "rotate"]

FUSED, STREAMED, SCATTERED = "fused", "streamed", "scattered"
"""One kernel for projection, rotation and write, with tiles by the number of rows; the same for many rows on Hopper;
a library's product and one kernel for the rest. ``triton`` chooses."""
MANY = 1024
"""Rows from which :data:`STREAMED` may beat :data:`SCATTERED` on an H200."""


def qkv_rope_write(
    h: Tensor,
    weight: Matrix,
    bias: Tensor | None,
    angles: tuple[Tensor, Tensor],
    target: tuple[Tensor, Tensor],
    kv: tuple[Tensor, Tensor],
    in_float32: bool,
    impl: str | None = None,
) -> Tensor:
    """Project normed rows to q, k, v; rotate q and k; write k and v to the rows they belong to.

    Args:
        h: normed rows, [N, d].
        weight: packed projection [(H + 2 Hkv) * D, d], rows in order q, k, v; ``bias`` [(H + 2 Hkv) * D] or None.
        angles: ``(cos, sin)`` of each row's position, [N, D // 2] float32.
        target: ``(slot, place)`` of each row, [N] int64.
        kv: the layer's ``(keys, values)``, [S, P, Hkv, D]; written in place.
        in_float32: rotate in float32 and round once (LLaDA), or in the dtype of ``h`` (Dream).
        impl: ``ref``; ``triton``, which chooses among ``scattered``, ``streamed`` (many rows on Hopper) and what was
            measured to be faster on this device; ``fused`` (Flash-dLLM, section 3.2); ``streamed``; ``scattered``;
            ``invariant`` (a row's bits do not depend on the other rows).

    Returns:
        Rotated queries, [N, H, D].

    Raises:
        ValueError: ``impl`` is not known, cannot run on this device, or is ``streamed`` and the operands do not fit it.
    """
    chosen = choose(impl, h, (REF, TRITON, FUSED, STREAMED, SCATTERED, INVARIANT))
    if chosen == REF:
        return ref.qkv_rope_write(h, weight, bias, angles, target, kv, in_float32)
    from . import triton

    if isinstance(weight, Tensor):
        stored = triton.stored_tiles(h.shape[0], weight.shape) if chosen == TRITON else None
        if chosen == FUSED or stored is not None:
            return triton.fused(h, weight, bias, angles, target, kv, in_float32, stored)
        if chosen == STREAMED and not _fits(h, kv[0]):
            raise ValueError(
                f"impl={STREAMED!r} takes 16-bit numbers and heads of 16, 32, 64 or 128, not {h.dtype} and "
                f"{kv[0].shape[3]}"
            )
        if chosen == STREAMED or (chosen == TRITON and h.shape[0] >= MANY and may_stream(h, weight, kv[0])):
            from . import streamed

            tiles = streamed.count_tiles(h.shape[0], weight.shape[0] // kv[0].shape[3])
            if chosen == STREAMED or full_waves(tiles, h.device):
                return streamed.streamed(h, weight, bias, angles, target, kv, in_float32)
    product = INVARIANT if chosen == INVARIANT else None
    return triton.scattered(h, weight, bias, angles, target, kv, in_float32, product=product)


def may_stream(h: Tensor, weight: Matrix, keys: Tensor) -> bool:
    """Whether many rows may take :data:`STREAMED`: a plain matrix on Hopper, a dtype and width of heads it knows."""
    return isinstance(weight, Tensor) and _fits(h, keys) and streams_tiles(h, weight)


def _fits(h: Tensor, keys: Tensor) -> bool:
    """Whether :data:`STREAMED` knows this dtype and width of a head."""
    return h.dtype in (torch.bfloat16, torch.float16) and keys.shape[3] in (16, 32, 64, 128)
