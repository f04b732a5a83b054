"""RMSNorm with an optional residual add."""

from __future__ import annotations

from torch import Tensor

from flash_dllm.kernels.choice import TRITON, choose

from . import ref

__all__ = ["rms_norm"]


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None, *, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """Add ``delta`` to the residual ``x``, then normalise it; see :func:`.ref.rms_norm`.

    Args:
        x: residual stream, [..., d], activation dtype.
        weight: [d], same dtype.
        eps: added to the mean square.
        delta: like ``x``, or None; added to ``x`` first.
        impl: ``ref`` or ``triton``; None chooses by device and dtype. Both round at the same places: the
            residual is bit-identical, the normed rows differ where the sum of squares rounds differently.

    Returns:
        ``(normed, residual)``, both like ``x``; without ``delta`` the residual is ``x`` itself.

    Raises:
        ValueError: ``impl`` is not known or cannot run on this device.
    """
    if choose(impl, x) == TRITON:
        from . import triton

        return triton.rms_norm(x, weight, eps, delta)
    return ref.rms_norm(x, weight, eps, delta)
