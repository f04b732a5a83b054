"""A plain forward pass over whole sequences, for tests and analysis: the independent check of everything faster."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from flash_dllm.kernels.linear import linear
from flash_dllm.models.config import ModelConfig
from flash_dllm.models.layers import LayerWeights, Model, rope_tables


def forward(
    model: Model,
    ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    *,
    rows: torch.Tensor | None = None,
    watch: Callable[[int, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Raw logits [B, L, V] in the model's dtype for token ids [B, L].

    ``attention_mask`` [B, L]: where it is 0 a token is hidden from all others (rows at such places are
    meaningless but finite). ``positions`` [B, L] int64 drive RoPE, by default 0..L-1. A shifted model gives
    raw logits: see ``shift_logits``. ``rows`` [B, R] int64 picks the rows whose logits are wanted, [B, R, V].
    ``watch`` is called with each layer's number and attention weights [B, H, L, L].
    """
    config = model.config
    length = ids.shape[1]
    if positions is None:
        positions = torch.arange(length, device=ids.device).expand_as(ids)
    cos, sin = (t[positions] for t in rope_tables(config, int(positions.max()) + 1, ids.device))
    visible = torch.ones(length, length, dtype=torch.bool, device=ids.device)
    if config.causal:
        visible = visible.tril()
    visible = visible.expand(ids.shape[0], -1, -1)
    if attention_mask is not None:
        # A row always sees itself, so that a padding row has something to attend to and stays finite.
        itself = torch.eye(length, dtype=torch.bool, device=ids.device)
        visible = (visible & attention_mask.bool()[:, None, :]) | itself
    x = F.embedding(ids, model.embed)
    for index, layer in enumerate(model.layers):
        mixed, weights = _attention(config, layer, x, cos, sin, visible)
        x = x + mixed
        if watch is not None:
            watch(index, weights)
        gate, up = linear(_rms_norm(x, layer.ffn_norm, config.rms_eps), layer.w_gate_up).chunk(2, -1)
        x = x + linear(F.silu(gate) * up, layer.w_down)
    if rows is not None:
        x = x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))
    return linear(_rms_norm(x, model.norm, config.rms_eps), model.head)


def shift_logits(logits: torch.Tensor) -> torch.Tensor:
    """Logits [..., L, V] that predict their own position, from raw ones that predict the next."""
    return torch.cat([logits[..., :1, :], logits[..., :-1, :]], dim=-2)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float() if x.dtype != torch.float64 else x
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, in_fp32: bool) -> torch.Tensor:
    """Rotate [B, L, heads, D] by tables [B, L, D / 2]."""
    wide = x.float() if in_fp32 and x.dtype != torch.float64 else x
    cos, sin = cos.to(wide.dtype).unsqueeze(2), sin.to(wide.dtype).unsqueeze(2)
    low, high = wide.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


def _attention(
    config: ModelConfig,
    layer: LayerWeights,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    visible: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What attention adds to the residual [B, L, d], and its weights [B, H, L, L]."""
    batch, length, _ = x.shape
    heads, kv_heads = config.n_heads, config.n_kv_heads
    qkv = linear(_rms_norm(x, layer.attn_norm, config.rms_eps), layer.wqkv, layer.bqkv)
    qkv = qkv.view(batch, length, heads + 2 * kv_heads, config.head_dim)
    q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], 2)
    q, k = _rotate(q, cos, sin, config.rope_fp32), _rotate(k, cos, sin, config.rope_fp32)
    k, v = (t.repeat_interleave(heads // kv_heads, 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * config.head_dim**-0.5
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    weights = scores.softmax(-1)
    mixed = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    return linear(mixed.reshape(batch, length, heads * config.head_dim), layer.wo), weights
