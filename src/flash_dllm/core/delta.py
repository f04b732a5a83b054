"""The delta loop over layers: every position's residual flows, and each layer recomputes only some rows.

A row that a layer leaves out adds the attention and feed-forward outputs that it had when it was last
recomputed there, so its residual still follows its token and the layers below. Layer 0 recomputes every row:
that is where a committed token enters. Above it a :class:`Turn` says which rows are recomputed whatever they
hold, and which are probed: compared with what they held before, the furthest moved are recomputed as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_dllm.kernels.linear import linear
from flash_dllm.kernels.ranks import Ranks
from flash_dllm.models.config import ModelConfig
from flash_dllm.models.inspection import row_bytes
from flash_dllm.models.layers import LayerWeights

from .forward import Context, attend, feed_forward, normed, project
from .method import CachePolicy, PassOut
from .rows import SWEEP_PAD, predictor, rectangle, row_map
from .select import leftmost, rank_of
from .state import State
from .types import Candidates, Lanes, Plan, Rows, View
from .visibility import canvas_view

UNMOVED = 1e-11
"""A 1 - cosine below this is rounding."""


@dataclass
class Store:
    """Outputs of every position before they join the residual, [S, L + 1, d] a layer, dtype of the model.

    ``attn`` is taken after the output projection. ``inputs`` holds normed layer inputs where rows are
    compared by them, and is empty otherwise. The spare column takes the writes of padding rows.
    """

    attn: list[Tensor]
    ffn: list[Tensor]
    inputs: list[Tensor] = field(default_factory=list)

    @classmethod
    def allocate(cls, config: ModelConfig, slots: int, positions: int, like: Tensor, inputs: bool) -> Store:
        """Room for ``slots`` canvases of ``positions``, dtype and device of ``like``."""
        shape = (slots, positions + 1, config.d_model)

        def tensors() -> list[Tensor]:
            return [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(config.n_layers)]

        return cls(tensors(), tensors(), tensors() if inputs else [])

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.attn, *self.ffn, *self.inputs))


@dataclass
class Turn:
    """What one pass does above layer 0. Lists have one host number a slot, 0 for slots that sit out.

    The host's numbers are the device's where lanes are exact, else bounds of them.

    Attributes:
        fixed: [S, L] bool, rows recomputed in every layer; ``n_fixed`` of them in each slot.
        probed: [S, L] bool, rows that are compared with what the cache holds; ``n_probed`` likewise.
        extra: a list a layer: how many probed rows outside ``fixed`` are recomputed, furthest moved first.
        amount: the same on the device, [layers, S] int64; None where there are none.
    """

    fixed: Tensor
    probed: Tensor
    n_fixed: list[int]
    n_probed: list[int]
    extra: list[list[int]] = field(default_factory=list)
    amount: Tensor | None = None

    def pick(self, layer: int, moved: Tensor | None) -> tuple[Tensor, list[int]]:
        """The rows that ``layer`` recomputes, [S, L] bool, and their numbers.

        Args:
            moved: [S, L] float32, how far each probed row has moved; None where nothing is probed.
        """
        extra = self.extra[layer]
        if moved is None or self.amount is None or not any(extra):
            return self.fixed, self.n_fixed
        flags = self.probed & ~self.fixed
        voted = (rank_of(moved, flags) < self.amount[layer][:, None]) & flags
        return self.fixed | voted, [a + b for a, b in zip(self.n_fixed, extra, strict=True)]


@dataclass
class DeltaOut:
    """What a delta pass gave.

    Attributes:
        hidden: final normed hidden states of the read rows, [S, C, d].
        layers: rows recomputed, [S, L] bool a layer.
        moved: mean of 1 - cosine over each slot's probed rows, [layers, S] float32; 0 where there are none.
    """

    hidden: Tensor
    layers: tuple[Tensor, ...]
    moved: Tensor


def picked_rows(state: State, base: int, mask: Tensor, counts: list[int], lanes: Lanes) -> Rows | None:
    """The rows flagged in ``mask`` [S, L], or None where there are none.

    Args:
        counts: how many are flagged in each slot, or bounds of it; slots with nearly equal counts share a rectangle.
    """
    total = lanes.total
    todo = sorted((s for s, n in enumerate(counts) if n), key=lambda s: (counts[s], s))
    if not todo:
        return None
    pos, valid = leftmost(mask, counts[todo[-1]])
    parts: list[Rows] = []
    while todo:
        width = counts[todo[-1]]
        slots = tuple(sorted(s for s in todo if counts[s] > width - SWEEP_PAD))
        todo = todo[: len(todo) - len(slots)]
        lengths = {total[s] for s in slots}
        dense = lanes.exact and len(lengths) == 1 and all(counts[s] == width for s in slots)
        n_keys, mine = base + max(lengths), (pos[:, :width], valid[:, :width])
        parts.append(rectangle(state, base, slots, n_keys, *mine, dense=dense, whole=True))
    return parts[0] if len(parts) == 1 else Rows.concat(parts)


class _Pass:
    """One delta pass: what all its layers share."""

    def __init__(self, ctx: Context, state: State, lanes: Lanes, store: Store, turn: Turn) -> None:
        self.ctx, self.state, self.lanes, self.store, self.turn = ctx, state, lanes, store, turn
        base = ctx.kv.base
        live = set(lanes.live)
        counts = [n if s in live else 0 for s, n in enumerate(lanes.total)]
        every = picked_rows(state, base, state.inside, counts, lanes)
        assert every is not None
        self.every, self.all_rows = every, self.column(every)
        self.inside = state.inside & state.running[:, None]
        self.where = row_map(state, every)
        self.view: View = canvas_view(state, base, ctx.kv.places)
        self.probes = picked_rows(state, base, turn.probed, turn.n_probed, lanes)

    def column(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Where in a [S, L + 1] grid the rows belong; padding goes to the spare column."""
        return rows.slot, torch.where(rows.valid, rows.pos, self.state.positions)

    def spread(self, rows: Rows, x: Tensor) -> Tensor:
        """``x`` [N] of ``rows`` on a [S, L] grid, 0 elsewhere."""
        grid = x.new_zeros(self.state.slots, self.state.positions + 1)
        grid[self.column(rows)] = x
        return grid[:, : self.state.positions]

    def probe(self, index: int, layer: LayerWeights, h: Tensor) -> Tensor | None:
        """How far the probed rows have moved, [S, L] float32: 1 - cosine with what the cache holds.

        Compares values, which replace the cached ones, or normed inputs where the store keeps them.
        """
        rows, store = self.probes, self.store
        if rows is None:
            return None
        mine, ranks = h[self.where[rows.slot, rows.pos]], None
        if store.inputs:
            new, old = mine, store.inputs[index][self.column(rows)]
        else:
            values, ranks = self.ctx.kv.values[index], self.ctx.model.ranks
            width = values.shape[2] * values.shape[3]
            bias = None if layer.bqkv is None else layer.bqkv[-width:]
            new = linear(mine, layer.wqkv[-width:], bias)
            old = values[rows.slot, rows.place].flatten(1)
            values[rows.slot, rows.place] = new.view(-1, *values.shape[2:])
        # Half the squared distance of unit vectors is 1 - cosine without cancellation: most rows hardly move.
        moved = _squares(_unit(new, ranks) - _unit(old, ranks), ranks) / 2
        # Rows that did not move differ by rounding, which varies with the batch: they tie.
        return self.spread(rows, torch.where(moved < UNMOVED, 0.0, moved))

    def attention(self, index: int, layer: LayerWeights, h: Tensor, rows: Rows) -> None:
        """Recompute the attention of ``rows`` from their normed inputs ``h`` [N, d] and store it."""
        kv = self.ctx.kv.layer(index)
        target, angles = (rows.slot, rows.place), self.ctx.angles(rows.pos)
        q = project(self.ctx, layer, h, angles, target, kv)
        mixed = attend(self.ctx, q, kv, rows, self.view)
        self.store.attn[index][self.column(rows)] = linear(mixed, layer.wo, impl=self.ctx.kernels.linear)

    def layer(
        self, index: int, x: Tensor, delta: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """One layer over the residuals ``x`` [N, d] of all rows; ``delta`` [N, d] joins them first.

        Returns:
            The residuals and what joins them next, the rows recomputed [S, L] bool, and how far rows moved.
        """
        layer, store, every = self.ctx.model.layers[index], self.store, self.every
        ctx, all_rows = self.ctx, self.all_rows
        h, x = normed(ctx, x, layer.attn_norm, delta)
        moved: Tensor | None = None
        rows: Rows | None = every
        mask = self.inside
        if index:
            moved = self.probe(index, layer, h)
            mask, counts = self.turn.pick(index, moved)
            rows = picked_rows(self.state, self.ctx.kv.base, mask, counts, self.lanes)
        if store.inputs:
            store.inputs[index][all_rows] = h
        at = None if rows is None else self.where[rows.slot, rows.pos]
        if rows is not None:
            self.attention(index, layer, h[at], rows)
        x = x + store.attn[index][all_rows]
        if rows is not None:
            h, _ = normed(ctx, x[at], layer.ffn_norm)
            store.ffn[index][self.column(rows)] = feed_forward(ctx, layer, h)
        return x, store.ffn[index][all_rows], mask, moved


def _squares(x: Tensor, ranks: Ranks | None) -> Tensor:
    """Sum of squares of each row [N, d], over what all ranks hold of it, [N]."""
    mine = x.square().sum(1)
    return mine if ranks is None else ranks.sum(mine)


def _unit(x: Tensor, ranks: Ranks | None) -> Tensor:
    """Rows [N, d] divided by their lengths, float32. Heads that two ranks hold count twice here and in the sum."""
    wide = x.float()
    return wide / _squares(wide, ranks).sqrt().clamp_min(1e-12)[:, None]


def delta(ctx: Context, state: State, lanes: Lanes, cand: Candidates, store: Store, turn: Turn) -> DeltaOut:
    """Run every position of the live slots through all layers, recomputing what ``turn`` asks for.

    A slot's first pass must fix all its rows: nothing else fills its part of the store and of the cache.
    Keys of recomputed rows are replaced; values of recomputed and of probed rows.
    """
    config = ctx.model.config
    run = _Pass(ctx, state, lanes, store, turn)
    x = F.embedding(run.every.token, ctx.model.embed)
    out: Tensor | None = None
    masks: list[Tensor] = []
    moved = torch.zeros(config.n_layers, state.slots, device=state.device)
    share = turn.probed / turn.probed.sum(1, keepdim=True).clamp_min(1)
    for index in range(config.n_layers):
        x, out, mask, drift = run.layer(index, x, out)
        masks.append(mask & run.inside)
        if drift is not None:
            moved[index] = (drift * share).sum(1)
    assert out is not None
    reads = run.where.gather(1, predictor(cand.pos, config.shift)).clamp_min(0).flatten()
    hidden, _ = normed(ctx, x[reads], ctx.model.norm, out[reads])
    return DeltaOut(hidden.view(*cand.pos.shape, -1), tuple(masks), moved)


class DeltaPolicy(CachePolicy):
    """A cache policy of the delta loop: a subclass names the rows of each pass in :meth:`turn`.

    Rows differ from layer to layer, so a pass has no plan that other rows could join: no verifiers. The
    number of rows recomputed that it reports is the mean over the layers, rounded up. A pass that is not
    :meth:`odd` reads nothing back.
    """

    loop = "delta"
    graphable = False
    sync = True
    steady = varies = whole = asks = True
    supports_cfg = False
    compare_inputs = False

    store: Store | None = None

    def bytes_per_position(self, config: ModelConfig, size: int) -> int:
        """The store, and the activations: all rows of all slots pass at once."""
        stored = (3 if self.compare_inputs else 2) * config.d_model * config.n_layers
        return stored * size + row_bytes(config, size)

    def slot_tensors(self) -> tuple[Tensor, ...] | None:
        if self.store is None:
            return ()
        return (*self.store.attn, *self.store.ffn, *self.store.inputs)

    def due(self, state: State) -> Tensor | None:
        return None

    def turn(self, state: State, lanes: Lanes, config: ModelConfig) -> Turn:
        """What the pass recomputes above layer 0."""
        raise NotImplementedError

    def learn(self, state: State, lanes: Lanes, out: DeltaOut) -> None:
        """See how far rows moved."""

    def run(self, ctx: Context, state: State, lanes: Lanes, cand: Candidates, plan: Plan | None) -> PassOut:
        config = ctx.model.config
        if self.store is None or self.store.attn[0].shape[:2] != (state.slots, state.positions + 1):
            self.store = Store.allocate(
                config, state.slots, state.positions, ctx.model.embed, self.compare_inputs
            )
        out = delta(ctx, state, lanes, cand, self.store, self.turn(state, lanes, config))
        self.learn(state, lanes, out)
        rows = torch.stack([mask.sum(1) for mask in out.layers]).sum(0)
        recomputed = (rows + config.n_layers - 1) // config.n_layers
        return PassOut(out.hidden, recomputed, marks=out.layers[-1], layers=out.layers)
