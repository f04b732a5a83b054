"""Who sees which key: one interval of ranks for each key place of a slot.

A place is visible to a row of the same slot iff ``lo <= rank < hi``. Full attention, padding, causal order,
branches and the views of a verify pass are all such intervals.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .constants import constant, upto
from .state import State
from .types import NEVER, View


def canvas_view(state: State, base: int, places: int, top: int = NEVER) -> View:
    """Every position of each slot's canvas is visible to ranks 0 .. top-1; scratch to nobody.

    Args:
        base: places before position 0.
        places: key places of a slot.
    """
    lo, hi = (torch.zeros((state.slots, places), dtype=torch.int32, device=state.device) for _ in range(2))
    inside = state.order < state.total[:, None]
    torch.mul(inside, top, out=hi[:, base : base + state.positions])
    ends = torch.empty(state.slots, dtype=torch.int32, device=state.device)
    return View(lo, hi, torch.add(state.total, base, out=ends))


def full_like(place: Tensor, value: Tensor | int) -> Tensor:
    """``value`` as int32 of the shape of ``place``; nothing is copied."""
    if not isinstance(value, Tensor):
        value = constant(value, place, torch.int32)
    return value.to(torch.int32).expand(place.shape)


def set_interval(view: View, place: Tensor, lo: Tensor | int, hi: Tensor | int, take: Tensor) -> None:
    """Give the places [S, K] the interval [lo, hi) where ``take`` [S, K]; lo and hi broadcast to [S, K]."""
    # Entries that are not taken write the trash place, whose interval stays empty.
    spots = place * take
    view.lo.scatter_(1, spots, full_like(spots, lo))
    view.hi.scatter_(1, spots, full_like(spots, hi) * take)


def set_scratch(view: View, first: int, lo: Tensor | int, hi: Tensor | int, take: Tensor) -> Tensor:
    """The same for the scratch places ``first``, ``first + 1``, ... of a new view; returns them, [S, K]."""
    stop = first + take.shape[1]
    torch.mul(take, full_like(take, hi), out=view.hi[:, first:stop])
    if isinstance(lo, Tensor) or lo:
        view.lo[:, first:stop] = lo
    return upto(stop, take)[first:].expand(take.shape)
