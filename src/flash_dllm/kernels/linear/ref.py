"""Matrices in 8 bits: the definition of both forms, in plain PyTorch.

A matrix [out, in] is stored as 8-bit numbers with one float32 scale a row: ``w[o, i] = data[o, i] * scale[o]``.
Rounding to int8 loses at most half a scale a number; to e4m3 at most 1/16 of the number, or ``scale / 1024``
near zero (three bits of mantissa, smallest step 2**-9).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3_MAX = 448.0
"""The largest finite float8_e4m3fn; there is no infinity behind it."""
INT8_MAX = 127.0


def to_fp8(x: Tensor) -> Tensor:
    """``x`` as float8_e4m3fn; what is too large becomes +-448, not NaN. NaN stays."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def from_fp8(x: Tensor, like: Tensor) -> Tensor:
    """``x`` in the dtype of ``like`` if it is stored in 8 bits, else ``x`` itself."""
    return x.to(like.dtype) if x.dtype == torch.float8_e4m3fn else x


def _scale(rows: Tensor, largest: float) -> Tensor:
    """Scale of each row, [N, 1] float32; 1 for a row of zeros."""
    top = rows.float().abs().amax(-1, keepdim=True)
    return torch.where(top == 0, 1.0, top / largest)


def quantize_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """``rows`` [N, d] as int8 [N, d] and float32 scales [N]; a row's largest number becomes +-127."""
    scale = _scale(rows, INT8_MAX)
    return (rows.float() / scale).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale[:, 0]


def quantize_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """``rows`` [N, d] as float8_e4m3fn [N, d] and float32 scales [N]; a row's largest number becomes +-448.

    A row that holds NaN or infinity gives NaN throughout, and touches no other row.
    """
    scale = _scale(rows, E4M3_MAX)
    return to_fp8(rows.float() / scale), scale[:, 0]


def int8_linear(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Weights in int8, activations as they are.

    Args:
        x: [N, in], any floating dtype.
        data: [out, in] int8; ``scale`` [out] float32.
        bias: [out], dtype of ``x``, or None.

    Returns:
        [N, out], dtype of ``x``. int8 is exact in each of those dtypes, so only the scaling rounds.
    """
    if x.dtype == torch.float16:
        # A sum of numbers of up to 127 would pass the largest half-precision number before it is scaled.
        return F.linear(x, (data.float() * scale[:, None]).to(x.dtype), bias)
    out = F.linear(x, data.to(x.dtype)).float() * scale
    return _with_bias(out.to(x.dtype), bias)


def fp8_linear(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Weights and activations in e4m3, a scale a row of each, sums in float32. Arguments as :func:`int8_linear`.

    The scales of ``x`` are measured in each call: a row's result depends on no other row.
    """
    rows, row_scale = quantize_fp8(x)
    out = F.linear(rows.float(), data.float()) * row_scale[:, None] * scale
    return _with_bias(out.to(x.dtype), bias)


def _with_bias(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out + bias
