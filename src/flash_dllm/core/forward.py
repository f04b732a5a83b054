"""The compact loop over layers: only the rows of a plan flow, everything else is read from the cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_dllm.kernels.choice import TRITON, Kernels, choose
from flash_dllm.kernels.gated_linear import fits, gated_linear, in_one
from flash_dllm.kernels.linear import linear
from flash_dllm.kernels.qkv_rope_write import STREAMED, may_stream, qkv_rope_write
from flash_dllm.kernels.rms_norm import rms_norm
from flash_dllm.kernels.row_attention import ScoreSum, attend_rows
from flash_dllm.models.inspection import SLAB
from flash_dllm.models.layers import LayerWeights, Model, rope_tables

from .cache import KVCache
from .slabs import slabs
from .types import TRASH, Feedback, Plan, Rows, View


@dataclass
class Context:
    """What a pass runs on: weights, cache, the rotary tables of every position, and how each op is done.

    ``tables`` [2, L, D // 2] float32 are the cosines and the sines.
    """

    model: Model
    kv: KVCache
    tables: Tensor
    kernels: Kernels = field(default_factory=Kernels)
    slab: int = SLAB

    @classmethod
    def build(cls, model: Model, kv: KVCache, positions: int, kernels: Kernels | None = None) -> Context:
        tables = torch.stack(rope_tables(model.config, positions, model.device))
        return cls(model, kv, tables, kernels or Kernels())

    def angles(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary angles of positions [N]: ``(cos, sin)``, [N, D // 2] float32."""
        cos, sin = self.tables.index_select(1, pos)
        return cos, sin


def attend(
    ctx: Context, q: Tensor, kv: tuple[Tensor, Tensor], rows: Rows, view: View, score: ScoreSum | None = None
) -> Tensor:
    """Attention of all rows: q [N, H, D] -> [N, H * D]; adds the layer's attention score to ``score``."""
    interval, impl = (view.lo, view.hi), ctx.kernels.row_attention
    return attend_rows(q, kv, rows.groups, rows.rank, interval, view.ends, ctx.kv.base, score, impl).flatten(
        1
    )


def normed(ctx: Context, x: Tensor, weight: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """RMSNorm of the residual ``x`` [N, d] plus ``delta``; ``(normed, residual)``."""
    return rms_norm(x, weight, ctx.model.config.rms_eps, delta, impl=ctx.kernels.rms_norm)


def project(
    ctx: Context,
    layer: LayerWeights,
    h: Tensor,
    angles: tuple[Tensor, Tensor],
    target: tuple[Tensor, Tensor],
    kv: tuple[Tensor, Tensor],
) -> Tensor:
    """Rotated queries [N, H, D] of normed rows ``h`` [N, d]; their keys and values go to ``target``."""
    rotation, impl = ctx.model.config.rope_fp32, ctx.kernels.qkv_rope_write
    return qkv_rope_write(h, layer.wqkv, layer.bqkv, angles, target, kv, rotation, impl)


def feed_forward(ctx: Context, layer: LayerWeights, h: Tensor) -> Tensor:
    """The gated feed-forward of normed rows [N, d] -> [N, d]."""
    kernels = ctx.kernels
    active = gated_linear(h, layer.w_gate_up, gate=kernels.silu_mul, product=kernels.linear)
    return linear(active, layer.w_down, impl=kernels.linear)


@torch.inference_mode()
def warm(ctx: Context) -> None:
    """Compile the kernels that passes of many rows take: one row, whose key goes to the trash place of slot 0."""
    layer, kernels, kv = ctx.model.layers[0], ctx.kernels, ctx.kv.layer(0)
    h = ctx.model.embed[:1].contiguous()

    def chosen(impl: str | None) -> bool:
        return impl in (None, TRITON) and choose(impl, h) == TRITON

    if chosen(kernels.qkv_rope_write) and may_stream(h, layer.wqkv, kv[0]):
        zero = torch.zeros(1, dtype=torch.int64, device=h.device)
        target, turned = (zero, zero + TRASH), ctx.model.config.rope_fp32
        qkv_rope_write(h, layer.wqkv, layer.bqkv, ctx.angles(zero), target, kv, turned, STREAMED)
    if kernels.linear is None and chosen(kernels.silu_mul) and fits(h, layer.w_gate_up):
        in_one(h, layer.w_gate_up)


def compact(ctx: Context, plan: Plan, score_from: int | None = None) -> Feedback:
    """Run the rows of ``plan`` through every layer; their keys and values replace those in the cache.

    A pass of more rows than ``ctx.slab`` goes through in parts, some slots after others.

    Args:
        ctx: weights and cache.
        plan: rows, visibility and reads.
        score_from: first layer (0-based) whose attention score counts; None for no score.

    Returns:
        Final normed hidden states of the read rows, [S, C, d], and the score of every position, [S, L] float32.
    """
    parts = slabs(plan, ctx.slab)
    outs = [_layers(ctx, part.plan, score_from) for part in parts]
    hidden, total = outs[0]
    for part, (more, score) in zip(parts[1:], outs[1:], strict=True):
        hidden[part.first : part.stop] = more[part.first : part.stop]
        if total is not None and score is not None:
            total[part.first : part.stop] = score[part.first : part.stop]
    if total is not None and ctx.model.ranks is not None:
        # Each rank has the mean over its own heads.
        total = ctx.model.ranks.sum(total) / ctx.model.ranks.size
    return Feedback(hidden, total)


def _layers(ctx: Context, plan: Plan, score_from: int | None) -> tuple[Tensor, Tensor | None]:
    """All layers over the rows of a plan: hidden states of the reads [S, C, d], and this rank's score [S, L].

    Behind the last layer's keys and values only the rows that are read go on, and of slots behind the last one that
    has rows none.
    """
    rows = plan.rows
    slots, width = plan.reads.shape
    leading = 1 + max(slot for group in rows.groups for slot in group.slots)
    reads = plan.reads[:leading].flatten()
    x = F.embedding(rows.token, ctx.model.embed)
    angles, target = ctx.angles(rows.pos), (rows.slot, rows.place)
    score: ScoreSum | None = None
    if score_from is not None and plan.score_rows is not None:
        # A shifted model's candidates may be read at rows beside the canvas.
        own_rows = not ctx.model.config.shift
        score = ScoreSum(plan.reads, plan.score_rows, ctx.kv.base, own_rows)
    delta: Tensor | None = None
    for index, layer in enumerate(ctx.model.layers):
        kv = ctx.kv.layer(index)
        h, x = normed(ctx, x, layer.attn_norm, delta)
        q = project(ctx, layer, h, angles, target, kv)
        counts = score_from is not None and index >= score_from
        mixed = attend(ctx, q, kv, rows, plan.view, score if counts else None)
        if index == len(ctx.model.layers) - 1:
            mixed, x = mixed[reads], x[reads]
        delta = linear(mixed, layer.wo, impl=ctx.kernels.linear)
        h, x = normed(ctx, x, layer.ffn_norm, delta)
        delta = feed_forward(ctx, layer, h)
    assert delta is not None
    hidden, _ = normed(ctx, x, ctx.model.norm, delta)
    hidden = hidden.unflatten(0, (leading, width))
    if leading < slots:
        hidden = F.pad(hidden, (0, 0, 0, 0, 0, slots - leading))
    return hidden, score.total if score else None
