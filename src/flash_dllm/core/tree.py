"""Branches side by side in one pass: copies of what a slot recomputes, each of its own rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .forward import Context
from .method import Search
from .rows import predictor, rectangle
from .select import leftmost, most
from .state import State
from .types import TRASH, Lanes, Rows


def recomputed(state: State, rows: Rows, base: int) -> Tensor:
    """Positions whose keys ``rows`` renew, [S, L] bool."""
    flags = torch.zeros(state.slots, state.positions + 1, dtype=torch.bool, device=state.device)
    flags[rows.slot, torch.where(rows.valid & (rows.place >= base), rows.pos, state.positions)] = True
    return flags[:, : state.positions]


@dataclass
class Tree:
    """K copies of each slot's fed positions side by side, each [S, K * R]: what they hold and where it goes.

    ``fed`` [S, L] bool; ``first`` [S, K] bool, branches that predict the first of them; ``rank`` [K * R].
    """

    state: State
    base: int
    fed: Tensor
    pos: Tensor
    token: Tensor
    place: Tensor
    rank: Tensor
    valid: Tensor
    first: Tensor

    @classmethod
    def grow(
        cls, state: State, ctx: Context, search: Search, filled: Tensor, exists: Tensor, fed: Tensor
    ) -> Tree:
        """Lay the copies out; the cache gets the scratch places that they need.

        Args:
            search: the drafts, [S, C]; ``filled`` [S, K, C] bool, those that each branch holds.
            exists: [S, K] bool, the branches.
            fed: [S, L] bool, the positions that are copied; reads their largest number back.
        """
        count, width = filled.shape[1], most(fed)
        ctx.kv.reserve(count * width)
        pos, there = leftmost(fed, width)
        spare = torch.where(filled, search.pos[:, None], state.positions)
        canvas = torch.nn.functional.pad(state.ids, (0, 1))[:, None].repeat(1, count, 1)
        canvas.scatter_(2, spare, search.token[:, None].expand_as(spare))
        wide = pos[:, None].expand(-1, count, -1)
        index = torch.arange(count * width, device=state.device)
        return cls(
            state, ctx.kv.base, fed, wide.flatten(1), canvas.gather(2, wide).flatten(1),
            (1 + index).expand(state.slots, -1), 1 + index // width,
            (there[:, None] & exists[..., None]).flatten(1), exists & search.valid[:, :1],
        )  # fmt: skip

    def rows(self, lanes: Lanes, shift: bool) -> list[Rows]:
        """The copies and, for a shifted model, a reader before the first position of each."""
        slots, n_keys = tuple(lanes.run), self.base + max(lanes.total[s] for s in lanes.run)
        parts = [
            rectangle(
                self.state, self.base, slots, n_keys, self.pos, self.valid,
                token=self.token, place=self.place, rank=self.rank,
            )
        ]  # fmt: skip
        if shift:
            first = self.pos[:, :1]
            at = predictor(first, True).expand_as(self.first)
            rank = torch.arange(1, self.first.shape[1] + 1, device=at.device)
            valid, trash = self.first & (first > 0), torch.full_like(at, TRASH)
            parts.append(rectangle(self.state, self.base, slots, n_keys, at, valid, place=trash, rank=rank))
        return parts

    def reads(self, lanes: Lanes, at: Tensor, start: int, shift: bool) -> Tensor:
        """Rows of each branch at ``at`` [S, C], [S, K, C], -1 where there is none.

        Args:
            start: index of the first row of the copies.
            shift: whether they have readers.
        """
        count = self.first.shape[1]
        width = self.pos.shape[1] // count
        lane = torch.zeros(self.state.slots, dtype=torch.int64, device=at.device)
        lane[lanes.run] = torch.arange(len(lanes.run), device=at.device)
        branch = torch.arange(count, device=at.device)[None, :, None]
        column = (self.fed.cumsum(1) - 1).gather(1, at)[:, None]
        own = start + lane[:, None, None] * count * width + branch * width + column
        reader = start + len(lanes.run) * count * width + lane[:, None, None] * count + branch
        reader = torch.where(self.first[..., None] & shift, reader, -1)
        return torch.where(self.fed.gather(1, at)[:, None], own, reader)
