"""The compact loop over layers: only the rows of a plan flow, everything else is read from the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_dllm.kernels.qkv_rope_write import qkv_rope_write
from flash_dllm.kernels.rms_norm import rms_norm
from flash_dllm.kernels.row_attention import key_score, row_attention
from flash_dllm.kernels.silu_mul import silu_mul
from flash_dllm.models.layers import LayerWeights, Model, rope_tables

from .cache import KVCache
from .types import Feedback, Group, Plan, Rows, View


@dataclass
class Context:
    """What a pass runs on: the weights, the cache and the rotary tables of every position."""

    model: Model
    kv: KVCache
    tables: tuple[Tensor, Tensor]

    @classmethod
    def build(cls, model: Model, kv: KVCache, positions: int) -> Context:
        cos, sin = rope_tables(model.config, positions, model.device)
        return cls(model, kv, (cos, sin))

    def angles(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary angles of positions [N]: ``(cos, sin)``, [N, D // 2] float32."""
        return self.tables[0][pos], self.tables[1][pos]


def lane_keys(kv: Tensor, group: Group) -> Tensor:
    """The keys (or values) that a group looks at, [B, n_keys, Hkv, D]; a view where the slots are adjacent."""
    first, last = group.slots[0], group.slots[-1]
    if last - first + 1 == len(group.slots):
        return kv[first : last + 1, : group.n_keys]
    return kv[torch.tensor(group.slots, device=kv.device), : group.n_keys]


def attend(q: Tensor, kv: tuple[Tensor, Tensor], rows: Rows, view: View, base: int) -> Tensor:
    """Attention of all rows, group by group: q [N, H, D] -> [N, H * D]."""
    out = torch.empty_like(q)
    for group in rows.groups:
        shape = (len(group.slots), group.width)
        mine = q[group.flat].unflatten(0, shape)
        keys, values = (lane_keys(t, group) for t in kv)
        if group.dense:
            part = row_attention(mine, keys[:, base:], values[:, base:])
        else:
            lo, hi = (lane_keys(t, group) for t in (view.lo, view.hi))
            rank = rows.rank[group.flat].view(shape)
            part = row_attention(mine, keys, values, rank, (lo, hi))
        out[group.flat] = part.flatten(0, 1)
    return out.flatten(1)


def mean_query(q: Tensor, plan: Plan) -> Tensor:
    """Mean query of each slot's scoring rows, [S, H, D] float32."""
    assert plan.score_rows is not None
    picked = q[plan.reads.flatten()].unflatten(0, plan.reads.shape).float()
    # A candidate that does not exist reads any row, perhaps that of a slot whose numbers are not finite.
    picked = picked.masked_fill(~plan.score_rows[..., None, None], 0.0)
    weight = plan.score_rows.float()
    weight = weight / weight.sum(1, keepdim=True).clamp_min(1)
    return torch.einsum("schd,sc->shd", picked, weight)


def feed_forward(layer: LayerWeights, h: Tensor) -> Tensor:
    """The gated feed-forward of normed rows [N, d] -> [N, d]."""
    return F.linear(silu_mul(F.linear(h, layer.w_gate_up)), layer.w_down)


def compact(ctx: Context, plan: Plan, score_from: int | None = None) -> Feedback:
    """Run the rows of ``plan`` through every layer; their keys and values replace those in the cache.

    Args:
        ctx: weights and cache.
        plan: rows, visibility and reads.
        score_from: first layer (0-based) whose attention score counts; None for no score.

    Returns:
        Final normed hidden states of the read rows, [S, C, d], and the score of every position, [S, L] float32.
    """
    config, rows, base = ctx.model.config, plan.rows, ctx.kv.base
    x = F.embedding(rows.token, ctx.model.embed)
    angles, target = ctx.angles(rows.pos), (rows.slot, rows.place)
    delta: Tensor | None = None
    score: Tensor | None = None
    for index, layer in enumerate(ctx.model.layers):
        kv = ctx.kv.layer(index)
        h, x = rms_norm(x, layer.attn_norm, config.rms_eps, delta)
        q = qkv_rope_write(h, layer.wqkv, layer.bqkv, angles, target, kv, config.rope_fp32)
        if score_from is not None and index >= score_from:
            part = key_score(mean_query(q, plan), kv[0][:, base:])
            score = part if score is None else score + part
        delta = F.linear(attend(q, kv, rows, plan.view, base), layer.wo)
        h, x = rms_norm(x, layer.ffn_norm, config.rms_eps, delta)
        delta = feed_forward(layer, h)
    reads = plan.reads.flatten()
    assert delta is not None
    hidden, _ = rms_norm(x[reads], ctx.model.norm, config.rms_eps, delta[reads])
    return Feedback(hidden.unflatten(0, plan.reads.shape), score)
