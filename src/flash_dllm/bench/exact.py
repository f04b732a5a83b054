"""One exact pass over a canvas, with what a cache should have held: keys, values and who attends to whom."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_dllm.kernels.linear import linear
from flash_dllm.kernels.qkv_rope_write import qkv_rope_write
from flash_dllm.kernels.rms_norm import rms_norm
from flash_dllm.kernels.row_attention import row_attention
from flash_dllm.kernels.silu_mul import silu_mul
from flash_dllm.models.layers import Model, rope_tables


@dataclass
class Exact:
    """What a pass over every position gives.

    Attributes:
        keys, values: [layers, L, Hkv, D], keys rotated.
        attention: [layers, L] float32, the attention that the read rows pay to each position, averaged over rows and
            heads; it sums to 1.
        hidden: final normed hidden states of the read rows, [R, d].
    """

    keys: Tensor
    values: Tensor
    attention: Tensor
    hidden: Tensor


@torch.inference_mode()
def exact_pass(model: Model, ids: Tensor, reads: Tensor) -> Exact:
    """Recompute a whole canvas.

    Args:
        model: weights.
        ids: [L] int64, the canvas.
        reads: [R] int64, positions of the rows that are read; at least one.
    """
    config, length = model.config, len(ids)
    shape = (config.n_layers, 1, length, config.n_kv_heads, config.head_dim)
    keys, values = (torch.empty(shape, dtype=model.dtype, device=model.device) for _ in range(2))
    where = torch.arange(length, device=model.device)
    angles = rope_tables(config, length, model.device)
    paid = torch.empty(config.n_layers, length, device=model.device)
    x, delta = F.embedding(ids, model.embed), None
    for index, layer in enumerate(model.layers):
        h, x = rms_norm(x, layer.attn_norm, config.rms_eps, delta)
        kv, target = (keys[index], values[index]), (torch.zeros_like(where), where)
        q = qkv_rope_write(h, layer.wqkv, layer.bqkv, angles, target, kv, config.rope_fp32)
        paid[index] = mean_attention(q[reads], keys[index, 0])
        delta = linear(row_attention(q[None], *kv)[0].flatten(1), layer.wo)
        h, x = rms_norm(x, layer.ffn_norm, config.rms_eps, delta)
        delta = linear(silu_mul(linear(h, layer.w_gate_up)), layer.w_down)
    assert delta is not None
    hidden, _ = rms_norm(x[reads], model.norm, config.rms_eps, delta[reads])
    return Exact(keys[:, 0], values[:, 0], paid, hidden)


def mean_attention(q: Tensor, keys: Tensor) -> Tensor:
    """Softmax attention of queries [R, H, D] over keys [L, Hkv, D], averaged over rows and heads, [L] float32."""
    n_heads, dim = q.shape[1:]
    wide = keys.float().repeat_interleave(n_heads // keys.shape[1], 1)
    logits: Tensor = torch.einsum("rhd,lhd->rhl", q.float(), wide) * dim**-0.5
    return logits.softmax(-1).mean((0, 1))
