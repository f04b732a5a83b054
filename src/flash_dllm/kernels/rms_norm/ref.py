"""RMSNorm with an optional residual add."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Add ``delta`` to the residual ``x``, then normalise it.

    Args:
        x: residual stream, [N, d], activation dtype.
        weight: [d], same dtype.
        eps: added to the mean square.
        delta: [N, d] or None; added to ``x`` first.

    Returns:
        ``(normed, residual)``, both [N, d] in the dtype of ``x``. The mean square is taken in float32 and the
        result rounded before the weight is applied, as LLaDA and Dream do.
    """
    residual = x if delta is None else x + delta
    wide = residual.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight, residual
