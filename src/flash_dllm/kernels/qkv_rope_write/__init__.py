"""QKV projection, rotary embedding and cache write."""

from __future__ import annotations

from torch import Tensor

from flash_dllm.kernels.choice import INVARIANT, REF, TRITON, choose
from flash_dllm.kernels.linear import Matrix

from . import ref
from .ref import rotate

__all__ = ["FUSED", "qkv_rope_write", "rotate"]

FUSED = "fused"
"""One kernel for projection, rotation and write; ``triton`` is a library's product and one kernel for the rest."""


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
        impl: ``ref``, ``triton`` (the projection by the library unless ``fused`` was measured to be faster on this
            device), ``fused`` (Flash-dLLM, section 3.2) or ``invariant`` (a row's bits do not
            depend on the other rows).

    Returns:
        Rotated queries, [N, H, D].
    """
    chosen = choose(impl, h, (REF, TRITON, FUSED, INVARIANT))
    if chosen == REF:
        return ref.qkv_rope_write(h, weight, bias, angles, target, kv, in_float32)
    from . import triton

    if isinstance(weight, Tensor):
        stored = triton.stored_tiles(h.shape[0], weight.shape) if chosen == TRITON else None
        if chosen == FUSED or stored is not None:
            return triton.fused(h, weight, bias, angles, target, kv, in_float32, stored)
    product = INVARIANT if chosen == INVARIANT else None
    return triton.scattered(h, weight, bias, angles, target, kv, in_float32, product=product)
