"""QKV projection, rotary embedding and the write of K and V to their cache rows (Flash-dLLM, section 3.2)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


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
    weight: Tensor,
    bias: Tensor | None,
    angles: tuple[Tensor, Tensor],
    target: tuple[Tensor, Tensor],
    kv: tuple[Tensor, Tensor],
    in_float32: bool,
) -> Tensor:
    """Project normed rows to q, k, v; rotate q and k; write k and v to the rows they belong to.

    Args:
        h: normed rows, [N, d].
        weight: packed projection [(H + 2 Hkv) * D, d], rows in order q, k, v; ``bias`` [(H + 2 Hkv) * D] or None.
        angles: ``(cos, sin)`` of each row's position, [N, D // 2] float32.
        target: ``(slot, place)`` of each row, [N] int64.
        kv: the layer's ``(keys, values)``, [S, P, Hkv, D]; written in place.
        in_float32: see :func:`rotate`.

    Returns:
        Rotated queries, [N, H, D].
    """
    keys, values = kv
    n_kv, dim = keys.shape[2], keys.shape[3]
    packed = F.linear(h, weight, bias).unflatten(-1, (-1, dim))
    n_heads = packed.shape[1] - 2 * n_kv
    turned = rotate(packed[:, : n_heads + n_kv], *angles, in_float32)
    keys[target] = turned[:, n_heads:]
    values[target] = packed[:, n_heads + n_kv :]
    return turned[:, :n_heads]
