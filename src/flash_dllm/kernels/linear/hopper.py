"""FP8 products on GPUs that have them, through torch's scaled matmul."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_dllm.kernels.choice import TRITON, choose

from .ref import quantize_fp8


def scaled_linear(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """:func:`flash_dllm.kernels.linear.ref.fp8_linear` on the tensor cores.

    Args:
        x: [N, in] bfloat16, the only dtype that row scales give; ``in`` and ``out`` are multiples of 16.
        data: [out, in] float8_e4m3fn; ``scale`` [out] float32.
        bias: [out] bfloat16 or None; added after the product is rounded.
    """
    rows, row_scale = _rows(x)
    out = torch._scaled_mm(
        rows, data.t(), scale_a=row_scale[:, None], scale_b=scale[None], out_dtype=torch.bfloat16
    )
    return out if bias is None else out + bias


def _rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` in e4m3 with a scale a row: one launch where there is Triton, else the several of the definition."""
    if choose(None, x) != TRITON:
        return quantize_fp8(x)
    from . import triton8

    return triton8.quantize_fp8(x) if x.shape[1] <= triton8.WIDEST else quantize_fp8(x)
