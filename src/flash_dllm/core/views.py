"""Rows of the views of verification: drafts, masks, branches and readers, and what they see.

Ranks and intervals are those of docs/verify.md. Every such row writes its key to a scratch place of its slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_dllm.kernels.row_attention import Group

from .constants import constant, upto
from .forward import Context
from .method import Search
from .rows import lane_rows, predictor, rectangle
from .select import reached
from .state import State
from .types import TRASH, Candidates, Lanes, Plan, Rows, View
from .visibility import full_like, set_interval, set_scratch


@dataclass
class Columns:
    """Rows of one kind for every slot, [S, R] each, before they are laid out: int64, int32 (``rank``), bool."""

    pos: Tensor
    valid: Tensor
    token: Tensor
    place: Tensor
    rank: Tensor


class ViewBuilder:
    """Rows of a verify pass, and the view they see. The valid drafts of a slot's ``search`` come before the others."""

    def __init__(
        self, state: State, lanes: Lanes, ctx: Context, search: Search, view: View, n_keys: int
    ) -> None:
        self.state, self.lanes, self.ctx, self.search = state, lanes, ctx, search
        self.view, self.n_keys = view, n_keys
        mask_id = ctx.model.config.mask_id
        assert mask_id is not None
        self.mask_id = mask_id

    def place(self, pos: Tensor) -> Tensor:
        return pos + self.ctx.kv.base

    def mask_like(self, pos: Tensor) -> Tensor:
        return constant(self.mask_id, pos).expand(pos.shape)

    def trash_like(self, pos: Tensor) -> Tensor:
        return constant(TRASH, pos).expand(pos.shape)

    def flags(self, pos: Tensor, valid: Tensor) -> Tensor:
        """[S, L] bool, True at the valid positions."""
        state = self.state
        out = torch.zeros((state.slots, state.positions + 1), dtype=torch.bool, device=state.device)
        return out.scatter_(1, torch.where(valid, pos, state.positions), True)[:, : state.positions]

    def rows(
        self,
        pos: Tensor,
        valid: Tensor,
        *,
        token: Tensor | None = None,
        place: Tensor | None = None,
        rank: Tensor | int = 0,
    ) -> Rows:
        # A slot that tests nothing takes no part in the pass.
        valid = valid & self.search.valid[:, :1]
        slots = tuple(self.lanes.live)
        return rectangle(
            self.state, self.ctx.kv.base, slots, self.n_keys, pos, valid, token=token, place=place, rank=rank
        )

    def columns(
        self,
        pos: Tensor,
        valid: Tensor,
        *,
        token: Tensor | None = None,
        place: Tensor | None = None,
        rank: Tensor | int = 0,
    ) -> Columns:
        """Rows at ``pos`` [S, R]; by default with the canvas's tokens, at their own places, of rank 0."""
        token = self.state.ids.gather(1, pos) if token is None else token
        place = self.place(pos) if place is None else place
        return Columns(pos, valid, token, place, full_like(pos, rank))

    def packed(
        self, parts: list[Columns], ranks: Tensor, drafts_seen: Tensor, room: int | None = None
    ) -> Plan:
        """One rectangle of all rows, so that attention reads a slot's keys once; the rest as in :meth:`finish`.

        Args:
            room: the most valid rows that a slot can have, readers aside; the others are left out. None keeps them.
        """
        search = self.search
        if self.ctx.model.config.shift:
            at = predictor(search.pos, True)
            token, trash = self.seen(at, drafts_seen), self.trash_like(at)
            parts = [*parts, self.columns(at, search.valid, token=token, place=trash, rank=ranks)]
            room = None if room is None else room + at.shape[1]
        names = ("pos", "valid", "token", "place", "rank")
        every = {name: torch.cat([getattr(part, name) for part in parts], 1) for name in names}
        valid, width = every["valid"], every["valid"].shape[1]
        index = upto(width, valid).expand(valid.shape)
        if room is not None and room < width:
            count = valid.cumsum(1)
            index = (count - 1).clamp_min(0)
            column, there = reached(count, room)
            every = {name: every[name].gather(1, column) for name in names} | {"valid": there}
        rows = self.rows(
            every["pos"], every["valid"], token=every["token"], place=every["place"], rank=every["rank"]
        )
        last = parts[-1].valid.shape[1]
        return Plan(rows, self.view, self.reads(0, rows.groups[0].width)[:, :1] + index[:, width - last :])

    def finish(self, parts: list[Rows], ranks: Tensor, drafts_seen: Tensor) -> Plan:
        """Join the rows; the last part's rows judge the drafts, or readers where the model is shifted.

        Args:
            ranks: [K], rank of each draft's judge.
            drafts_seen: [K], how many drafts that rank sees.
        """
        search = self.search
        if self.ctx.model.config.shift:
            at = predictor(search.pos, True)
            token = self.seen(at, drafts_seen)
            parts = [
                *parts,
                self.rows(at, search.valid, token=token, place=self.trash_like(at), rank=ranks),
            ]
        rows = Rows.concat(parts)
        return Plan(rows, self.view, self.reads(len(rows) - len(parts[-1]), search.pos.shape[1]))

    def reads(self, start: int, width: int) -> Tensor:
        """Row index of [S, width] rows that begin at ``start``; rows of absent slots point anywhere."""
        return lane_rows(self.state, Group(tuple(self.lanes.live), start, width, self.n_keys), width)

    def seen(self, pos: Tensor, drafts_seen: Tensor) -> Tensor:
        """Token at ``pos`` [S, K] as seen by a rank that sees the first ``drafts_seen`` [K] drafts."""
        search = self.search
        hit = (pos[..., None] == search.pos[:, None]) & search.valid[:, None]
        order = upto(search.pos.shape[1], pos)
        filled = hit & (order < drafts_seen[..., None])
        token = (filled * search.token[:, None]).sum(-1)
        here = torch.where(filled.any(-1), token, self.state.ids.gather(1, pos))
        return torch.where(hit.any(-1) & ~filled.any(-1), self.mask_id, here)


def branch_rows(
    b: ViewBuilder, cand: Candidates, first: int, count: int
) -> tuple[Rows, Tensor, Tensor, Tensor]:
    """Copies of the window with the first ``first``, ``first + 1``, ... drafts filled, each its own rank.

    Sets the intervals: branch of rank r has keys [r, r + 1); the window's originals are seen by rank 0 only.

    Returns:
        ``(rows, token, rank, filled)``: the rows, their tokens [S, count, C], the rank of each branch
        [count] and how many drafts it holds [count].
    """
    state, search = b.state, b.search
    shape = (state.slots, count, cand.pos.shape[1])
    order = upto(first + count, search.pos)
    filled, rank = order[first:], upto(count + 1, search.pos, torch.int32)[1:]
    pos = cand.pos[:, None].expand(shape)
    hit = (pos[..., None] == search.pos[:, None, None]) & search.valid[:, None, None]
    hit &= upto(search.pos.shape[1], search.pos) < filled[:, None, None]
    token = (hit * search.token[:, None, None]).sum(-1)
    token = torch.where(hit.any(-1), token, state.ids.gather(1, cand.pos)[:, None])
    # The branch with no draft judges the first one; a branch that ends in a draft needs that draft.
    there = (search.valid[:, :count, None] & cand.valid[:, None]).flatten(1)
    ranks = rank[:, None].expand(shape[1:]).flatten()
    set_interval(b.view, b.place(cand.pos), 0, 1, cand.valid & search.valid[:, :1])
    places = set_scratch(b.view, 1, ranks, ranks + 1, there)
    rows = b.rows(pos.flatten(1), there, token=token.flatten(1), place=places, rank=ranks)
    return rows, token, rank, filled
