"""Building the rows of a pass and finding the row that predicts a position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_dllm.kernels.row_attention import Group

from .constants import constant, upto
from .select import leftmost, most
from .state import State
from .types import TRASH, Candidates, Lanes, Rows
from .visibility import full_like

SWEEP_PAD = 32
"""Lanes of a sweep share a rectangle when their lengths differ by less than this many rows."""


def slot_index(slots: Sequence[int], device: torch.device) -> Tensor:
    """Slots as an index. From pageable memory a GPU's copy would wait for all work that is queued."""
    index = torch.tensor(slots, dtype=torch.int64)
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index.to(device)


def rectangle(
    state: State,
    base: int,
    slots: tuple[int, ...],
    n_keys: int,
    pos: Tensor,
    valid: Tensor,
    *,
    token: Tensor | None = None,
    place: Tensor | None = None,
    rank: Tensor | int = 0,
    dense: bool = False,
    whole: bool = False,
) -> Rows:
    """Rows at ``pos`` for each slot of ``slots``. What an invalid row holds, but for its place, is anything.

    Args:
        base: key places before position 0.
        n_keys: key places that the rows look at.
        pos: [S, R] int64 positions for *all* slots, of the canvas where not valid too; ``valid`` [S, R] bool.
        token: [S, R] token ids, by default what the canvas holds.
        place: [S, R] key places, by default each position's own.
        rank: [S, R] or one number.
        dense, whole: see :class:`Group`.
    """
    width = pos.shape[1]
    valid = valid & state.running[:, None]
    if token is None:
        token = state.ids.gather(1, pos)
    if place is None:
        place = pos + base
    index = None if slots == tuple(range(len(slots))) else slot_index(slots, state.device)

    def flat(column: Tensor) -> Tensor:
        # One slot's part of an expanded column is a view without strides; kernels count on plain rows.
        picked = column[: len(slots)] if index is None else column[index]
        return picked.reshape(-1).contiguous()

    return Rows(
        token=flat(token),
        pos=flat(pos),
        slot=flat(state.slot_order[:, None].expand(pos.shape)),
        # The trash place is 0.
        place=flat(place * valid),
        rank=flat(full_like(pos, rank)),
        valid=flat(valid),
        groups=[Group(slots, 0, width, n_keys, dense, whole)],
    )


def sweep_rows(state: State, base: int, slots: list[int], lanes: Lanes) -> list[Rows]:
    """Every position of the canvases in ``slots``; lanes of nearly equal length share a rectangle."""
    parts: list[Rows] = []
    todo = sorted(slots, key=lambda s: (lanes.total[s], s))
    while todo:
        longest = lanes.total[todo[-1]]
        group = [s for s in todo if lanes.total[s] > longest - SWEEP_PAD]
        todo = todo[: len(todo) - len(group)]
        equal = all(lanes.total[s] == longest for s in group)
        pos = state.order[:longest].expand(state.slots, longest)
        valid = pos < state.total[:, None]
        slots_here = tuple(sorted(group))
        parts.append(rectangle(state, base, slots_here, base + longest, pos, valid, dense=equal, whole=True))
    return parts


def run_rows(
    state: State, base: int, lanes: Lanes, pos: Tensor, valid: Tensor, place: Tensor | None = None
) -> Rows:
    """Rows of rank 0 at ``pos`` [S, R] of the slots in ``lanes.run``, which see their whole canvas.

    On the CPU canvases of equal length share a rectangle that needs no mask; elsewhere all share one, since there a
    launch costs more than a mask.
    """
    by_total: dict[int, list[int]] = {}
    for slot in lanes.run:
        by_total.setdefault(lanes.total[slot], []).append(slot)
    if not lanes.exact or (state.device.type != "cpu" and len(by_total) > 1):
        run = tuple(lanes.run)
        return rectangle(state, base, run, base + max(by_total), pos, valid, place=place, whole=True)
    return Rows.concat([
        rectangle(state, base, tuple(slots), base + total, pos, valid, place=place, dense=True)
        for total, slots in by_total.items()
    ])  # fmt: skip


def fed_rows(state: State, base: int, lanes: Lanes, flags: Tensor) -> Rows:
    """Rows at the flagged positions [S, L] of the slots in ``lanes.run``; reads their largest number back.

    Where it was asked before (``lanes.fed``) nothing is read.
    """
    return run_rows(state, base, lanes, *leftmost(flags, lanes.fed or most(flags[lanes.run])))


def row_map(state: State, rows: Rows) -> Tensor:
    """Index of the row of rank 0 at each position, [S, L] int64, -1 where there is none."""
    table = torch.full((state.slots * (state.positions + 1),), -1, dtype=torch.int64, device=state.device)
    column = state.spots(rows.pos, rows.valid & (rows.rank == 0))
    spots = torch.add(column, rows.slot, alpha=state.positions + 1)
    table.scatter_(0, spots, upto(len(rows), table))
    return table.view(state.slots, -1)[:, : state.positions]


def predictor(pos: Tensor, shift: bool) -> Tensor:
    """Position of the row that predicts ``pos``: itself, or the one before it in a shifted model (Dream)."""
    return (pos - 1).clamp_min(0) if shift else pos


def lane_starts(state: State, groups: Sequence[Group]) -> Tensor:
    """Index of each slot's first row, [S] int64; that of some row for a slot without one."""
    if len(groups) == 1:
        return lane_rows(state, groups[0], 1)[:, 0]
    starts = [0] * state.slots
    for group in groups:
        for lane, slot in enumerate(group.slots):
            starts[slot] = group.start + lane * group.width
    return slot_index(starts, state.device)


def lane_rows(state: State, group: Group, count: int) -> Tensor:
    """Indices of each slot's first ``count`` rows of a group, [S, count] int64; those of some rows for other slots."""
    lanes = len(group.slots)
    if group.slots != tuple(range(lanes)):
        order = [group.slots.index(s) if s in group.slots else 0 for s in range(state.slots)]
        lane = slot_index(order, state.device)
        return group.start + lane[:, None] * group.width + upto(count, lane)
    # A recorded step must not copy numbers from the host.
    every = upto(group.start + state.slots * group.width, state.slot_order)[group.start :]
    rows = every.view(state.slots, group.width)[:, :count]
    return rows if lanes == state.slots else rows.clamp_max(group.start + group.size - 1)


def with_readers(
    state: State, base: int, rows: Rows, cand: Candidates, lanes: Lanes, shift: bool
) -> tuple[Rows, Tensor]:
    """Map candidates to the rows that predict them, adding reader rows where a shifted model lacks them.

    A reader row sits at position j-1, sees what rank 0 sees and leaves no key.

    Returns:
        The rows and ``reads`` [S, C] int64.
    """
    at = predictor(cand.pos, shift)
    reads = row_map(state, rows).gather(1, at)
    if shift and lanes.run:
        missing = (reads < 0) & cand.valid
        readers = run_rows(state, base, lanes, at, missing, constant(TRASH, at).expand(at.shape))
        first = len(rows) + lane_starts(state, readers.groups)
        rows = Rows.concat([rows, readers])
        reads = torch.where(missing, first[:, None] + upto(at.shape[1], at), reads)
    return rows, reads.clamp_min(0)


def count_rows(state: State, rows: Rows) -> Tensor:
    """Valid rows of each slot, [S] int64."""
    out = torch.zeros(state.slots, dtype=torch.int64, device=state.device)
    return out.scatter_add_(0, rows.slot, rows.valid.long())
