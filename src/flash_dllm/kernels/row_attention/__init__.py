"""Attention of rows over their slot's cache, and the attention score of Flash-Cache."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flash_dllm.kernels.choice import INVARIANT, REF, TRITON, choose
from flash_dllm.kernels.devices import limits

from . import ref
from .groups import TABLES, Group
from .ref import key_score, lane_keys, row_attention
from .tiles import invariant_tiles

if TYPE_CHECKING:
    from . import triton

__all__ = ["Group", "ScoreSum", "attend_rows", "held_tables", "key_score", "lane_keys", "row_attention"]

held_tables = TABLES.held


class ScoreSum:
    """The attention score of every position, summed over the layers of a pass (Flash-dLLM, Eq. 2).

    Args:
        reads: [S, C] int64, rows whose queries count, and maybe others behind them; ``flags`` [S, C] bool, which of
            them exist.
        base: key places before position 0.
        own_rows: every scoring row is one of the canvas rows of its slot, and none a row beside them.
    """

    def __init__(self, reads: Tensor, flags: Tensor, base: int, own_rows: bool = False) -> None:
        self.reads = reads[:, : flags.shape[1]].contiguous()
        self.flags, self.base, self.own_rows = flags, base, own_rows
        self.sum: Tensor | None = None
        self._shares: Tensor | None = None

    def mean_query(self, q: Tensor) -> Tensor:
        """Mean query of each slot's scoring rows, [S, H, D] float32."""
        picked = q[self.reads.flatten()].unflatten(0, self.reads.shape).float()
        # A candidate that does not exist reads any row, perhaps that of a slot whose numbers are not finite.
        picked = picked.masked_fill(~self.flags[..., None, None], 0.0)
        mean: Tensor = picked.sum(1) / self.flags.sum(1).clamp_min(1)[:, None, None]
        return mean

    def add(self, q: Tensor, keys: Tensor) -> None:
        """Add one layer: queries [N, H, D], keys [S, P, Hkv, D]."""
        part = key_score(self.mean_query(q), keys[:, self.base :])
        self.sum = part if self.sum is None else self.sum + part

    def into(self, q: Tensor, keys: Tensor, quick: bool = True) -> triton.Score:
        """What a kernel needs to add one layer to the sum, which it keeps in parts, each added up in one order.

        ``quick``: it may add in the order that is fastest for this pass, and not always in the same.
        """
        from . import triton

        slots, places, n_kv, _ = keys.shape
        if self.sum is None:
            self.sum = torch.zeros((slots, n_kv * triton.LANES, places - self.base), device=q.device)
        shares = partial(self.shares, len(q), q.shape[1]) if self.own_rows and quick else None
        return triton.Score(self.sum, partial(triton.mean_query, q, self.reads, self.flags, n_kv), shares)

    def shares(self, rows: int, heads: int) -> Tensor:
        """Share of each row in its slot's score, [rows] float32: 1 / (scoring rows of the slot x heads), or 0."""
        if self._shares is None:
            each = self.flags / (self.flags.sum(1, keepdim=True).clamp_min(1) * heads)
            # Reads that do not exist name rows that may count, and add nothing to them.
            grid = torch.zeros(rows, device=self.flags.device)
            self._shares = grid.scatter_add_(0, self.reads.flatten(), each.flatten())
        return self._shares

    @property
    def total(self) -> Tensor | None:
        """Score of every position, [S, L] float32; None before the first layer."""
        return self.sum.sum(1) if self.sum is not None and self.sum.ndim == 3 else self.sum


def attend_rows(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    groups: list[Group],
    rank: Tensor,
    interval: tuple[Tensor, Tensor],
    ends: Tensor,
    base: int,
    score: ScoreSum | None = None,
    impl: str | None = None,
) -> Tensor:
    """Attention of all rows of a pass over the keys of their slots.

    Args:
        q: rotated queries [N, H, D] in the groups' order.
        kv: the layer's keys and values [S, P, Hkv, D].
        groups: rectangles of rows.
        rank: [N] int32.
        interval: ``(lo, hi)`` [S, P] int32: a place is visible to a row of its slot iff ``lo <= rank < hi``.
        ends: [S] int32, the key places of each slot's canvas end there.
        base: key places before position 0.
        score: add this layer's attention score to it.
        impl: ``ref``, ``triton``, or ``invariant`` (one tile and one range of keys whatever else is in the batch).

    Returns:
        [N, H, D], dtype of ``q``. A row that sees nothing gives zeros; a place that no rank can see may hold
        anything, NaN included.
    """
    if (chosen := choose(impl, q, (REF, TRITON, INVARIANT))) != REF:
        from . import triton

        into = score.into(q, kv[0], chosen != INVARIANT) if score else None
        tiles = invariant_tiles(q.dtype, limits(q.device)) if chosen == INVARIANT else None
        return triton.attend_rows(q, kv, groups, rank, interval, ends, base, into, tiles)
    if score is not None:
        score.add(q, kv[0])
    return ref.attend_rows(q, kv, groups, rank, interval, base)
