"""QKV projection, rotary embedding and the write of K and V to their cache rows (Flash-dLLM, section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_dllm.kernels.linear import Matrix, linear, to_fp8


def rotate(x: Tensor, cos: Tensor, sin: Tensor, in_float32: bool) -> Tensor:
    """Half-rotation RoPE.

    Args:
        x: [N, heads, D].
        cos: [N, D // 2] float32, the angles of each row's position; ``sin`` likewise.
        in_float32: rotate in float32 and round once (LLaDA), else in the dtype of ``x`` (Dream).

    Returns:
        The rotated rows, [N, heads, D], dtype of ``x``.
    """
    wide = x.float() if in_float32 else x
    c, s = cos.to(wide.dtype)[:, None], sin.to(wide.dtype)[:, None]
    first, second = wide.chunk(2, dim=-1)
    out = wide.new_empty(wide.shape)
    half = first.shape[-1]
    out[..., :half] = first * c - second * s
    out[..., half:] = second * c + first * s
    return out.to(x.dtype)


def qkv_rope_write(
    h: Tensor,
    weight: Matrix,
    bias: Tensor | None,
    angles: tuple[Tensor, Tensor],
    target: tuple[Tensor, Tensor],
    kv: tuple[Tensor, Tensor],
    in_float32: bool,
) -> Tensor:
    """The definition; arguments as in the package's ``qkv_rope_write``."""
    keys, values = kv
    n_kv, dim = keys.shape[2], keys.shape[3]
    packed = linear(h, weight, bias).unflatten(-1, (-1, dim))
    n_heads = packed.shape[1] - 2 * n_kv
    turned = rotate(packed[:, : n_heads + n_kv], *angles, in_float32)
    new = (turned[:, n_heads:], packed[:, n_heads + n_kv :])
    keys[target], values[target] = (to_fp8(t) for t in new) if keys.dtype == torch.float8_e4m3fn else new
    return turned[:, :n_heads]
