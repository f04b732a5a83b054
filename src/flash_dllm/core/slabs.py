"""A large pass in pieces: slots do not see each other, so some of them may go through all layers before others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_dllm.models.inspection import SLAB

from .types import Plan, Rows


@dataclass
class Slab:
    """The part of a plan that concerns the slots ``first`` .. ``stop - 1``."""

    plan: Plan
    first: int
    stop: int


def slabs(plan: Plan, limit: int = SLAB) -> list[Slab]:
    """Split a plan between slots, in slot order, so that no part has more than ``limit`` rows."""
    slots = plan.reads.shape[0]
    count = [0] * slots
    for group in plan.rows.groups:
        for slot in group.slots:
            count[slot] += group.width
    if sum(count) <= limit:
        return [Slab(plan, 0, slots)]
    starts, held = [0], 0
    for slot, rows in enumerate(count):
        if held and rows and held + rows > limit:
            starts.append(slot)
            held = 0
        held += rows
    return [_part(plan, first, stop) for first, stop in zip(starts, [*starts[1:], slots], strict=True)]


def _part(plan: Plan, first: int, stop: int) -> Slab:
    pieces: list[slice] = []
    groups = []
    reads = torch.zeros_like(plan.reads)
    total = 0
    for group in plan.rows.groups:
        lanes = [lane for lane, slot in enumerate(group.slots) if first <= slot < stop]
        if not lanes:
            continue
        # Slots are in order, so the lanes of a slab are neighbours.
        piece = slice(group.start + lanes[0] * group.width, group.start + (lanes[-1] + 1) * group.width)
        groups.append(group.part(lanes[0], lanes[-1] + 1, total))
        inside = (plan.reads >= piece.start) & (plan.reads < piece.stop)
        reads = torch.where(inside, plan.reads - piece.start + total, reads)
        total += piece.stop - piece.start
        pieces.append(piece)

    def picked(column: Tensor) -> Tensor:
        return torch.cat([column[piece] for piece in pieces])

    flags = plan.score_rows
    if flags is not None:
        kept = torch.zeros_like(flags)
        kept[first:stop] = flags[first:stop]
        flags = kept
    rows = plan.rows
    mine = Rows(
        picked(rows.token), picked(rows.pos), picked(rows.slot), picked(rows.place), picked(rows.rank),
        picked(rows.valid), groups,
    )  # fmt: skip
    return Slab(Plan(mine, plan.view, reads, flags), first, stop)
