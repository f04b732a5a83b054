"""Who sees which key: one interval of ranks for each key place of a slot.

A place is visible to a row of the same slot iff ``lo <= rank < hi``. Full attention, padding, causal order,
branches and the views of a verify pass are all such intervals.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .state import State
from .types import NEVER, View


def canvas_view(state: State, base: int, places: int, top: int = NEVER) -> View:
    """Every position of each slot's canvas is visible to ranks 0 .. top-1; scratch to nobody.

    Args:
        base: places before position 0.
        places: key places of a slot.
    """
    shape = (state.slots, places)
    lo = torch.zeros(shape, dtype=torch.int32, device=state.device)
    hi = torch.zeros(shape, dtype=torch.int32, device=state.device)
    inside = state.order < state.total[:, None]
    hi[:, base : base + state.positions] = torch.where(inside, top, 0).to(torch.int32)
    return View(lo, hi, (base + state.total).to(torch.int32))


def full_like(place: Tensor, value: Tensor | int) -> Tensor:
    """``value`` as int32 of the shape of ``place``; a number is not copied from the host."""
    if isinstance(value, Tensor):
        return value.to(torch.int32).expand(place.shape)
    return torch.full(place.shape, value, dtype=torch.int32, device=place.device)


def set_interval(view: View, place: Tensor, lo: Tensor | int, hi: Tensor | int, take: Tensor) -> None:
    """Give the places [S, K] the interval [lo, hi) where ``take`` [S, K]; lo and hi broadcast to [S, K]."""
    for grid, value in ((view.lo, lo), (view.hi, hi)):
        wide = full_like(place, value)
        # Entries that are not taken write the trash place, whose interval stays empty.
        where = torch.where(take, place, 0)
        grid.scatter_(1, where, torch.where(take, wide, 0))
