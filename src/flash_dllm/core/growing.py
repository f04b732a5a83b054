"""The growing loop over layers: a few rows flow at first, and within a pass a slot may take all its rows.

The inputs and queries of every position and layer are kept for that. Eager: the rows are laid out anew
whenever a slot grows, so the loop reads a few numbers back to the host in each layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_dllm.kernels.linear import linear

from .forward import Context, attend, feed_forward, normed, project
from .method import PassOut
from .rows import fed_rows, predictor, row_map, sweep_rows
from .state import State
from .types import Candidates, Lanes, Rows
from .visibility import canvas_view


@dataclass
class LayerStore:
    """What every position had when it was last recomputed, a tensor a layer.

    ``inputs`` [S, L + 1, d], the residual before the layer; ``queries`` [S, L + 1, H, D], rotated. The spare
    column takes the writes of padding rows.
    """

    inputs: list[Tensor]
    queries: list[Tensor]

    @classmethod
    def allocate(cls, ctx: Context, state: State) -> LayerStore:
        """Room for every slot of ``state``, dtype of the model."""
        config, like = ctx.model.config, ctx.model.embed
        shape = (state.slots, state.positions + 1)
        inputs = [like.new_zeros((*shape, config.d_model)) for _ in ctx.model.layers]
        heads = (config.n_heads, config.head_dim)
        return cls(inputs, [like.new_zeros((*shape, *heads)) for _ in ctx.model.layers])

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.inputs, *self.queries))


class Growing:
    """One pass. A subclass watches the layers and says which slots grow.

    Attributes:
        few, full: slots that recompute their fed rows, or every row.
        layers: rows recomputed so far, [S, L] bool a layer.
    """

    def __init__(self, ctx: Context, state: State, lanes: Lanes, fed: Tensor, store: LayerStore) -> None:
        self.ctx, self.state, self.lanes, self.fed, self.store = ctx, state, lanes, fed, store
        self.few, self.full = list(lanes.run), list(lanes.sweep)
        self.view = canvas_view(state, ctx.kv.base, ctx.kv.places)
        self.layers: list[Tensor] = []
        self._lay_out()

    def before(self, index: int, queries: Tensor, keys: Tensor) -> None:
        """A layer is about to be recomputed: ``queries`` [S, L + 1, H, D], ``keys`` [S, P, Hkv, D]."""

    def after(self, index: int, queries: Tensor, keys: Tensor) -> list[int]:
        """A layer's rows are written; returns the slots that take all their rows from the next layer on."""
        raise NotImplementedError

    def run(self, cand: Candidates) -> PassOut:
        """Run the layers; rows recomputed are counted as the mean over layers, rounded up."""
        ctx, model = self.ctx, self.ctx.model
        x = F.embedding(self.rows.token, model.embed)
        delta: Tensor | None = None
        new: list[int] = []
        for index, layer in enumerate(model.layers):
            h, x = normed(ctx, x, layer.attn_norm, delta)
            self.store.inputs[index][self.column] = x
            if new:
                self.few, self.full = [s for s in self.few if s not in new], self.full + new
                self._lay_out()
                h, x = normed(ctx, self.store.inputs[index][self.column], layer.attn_norm)
            mixed, new = self._attention(index, h)
            h, x = normed(ctx, x, layer.ffn_norm, linear(mixed, layer.wo, impl=self.ctx.kernels.linear))
            delta = feed_forward(ctx, layer, h)
        reads = row_map(self.state, self.rows).gather(1, predictor(cand.pos, model.config.shift))
        at = reads.clamp_min(0).flatten()
        assert delta is not None
        hidden, _ = normed(ctx, x[at], model.norm, delta[at])
        count = torch.stack([mask.sum(1) for mask in self.layers]).sum(0)
        recomputed = (count + len(self.layers) - 1) // len(self.layers)
        return PassOut(
            hidden.view(*cand.pos.shape, -1), recomputed, marks=self.layers[-1], layers=tuple(self.layers)
        )

    def _lay_out(self) -> None:
        state, base = self.state, self.ctx.kv.base
        lanes = Lanes(self.few, self.full, self.lanes.first, self.lanes.total, self.lanes.width)
        parts = sweep_rows(state, base, self.full, lanes) if self.full else []
        if self.few:
            parts.append(fed_rows(state, base, lanes, self.fed))
        self.rows = Rows.concat(parts)
        self.column = (self.rows.slot, torch.where(self.rows.valid, self.rows.pos, state.positions))
        self.angles = self.ctx.angles(self.rows.pos)

    def _attention(self, index: int, h: Tensor) -> tuple[Tensor, list[int]]:
        """Attention of the rows, [N, H * D], and the slots that grow after it."""
        rows, kv, queries = self.rows, self.ctx.kv.layer(index), self.store.queries[index]
        layer = self.ctx.model.layers[index]
        self.before(index, queries, kv[0])
        target = (rows.slot, rows.place)
        q = project(self.ctx, layer, h, self.angles, target, kv)
        queries[self.column] = q
        marks = torch.zeros(queries.shape[:2], dtype=torch.bool, device=q.device)
        marks[self.column] = rows.valid
        self.layers.append(marks[:, : self.state.positions])
        return attend(self.ctx, q, kv, rows, self.view), self.after(index, queries, kv[0])
