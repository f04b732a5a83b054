"""Choosing positions on the device: no host read, every tie broken towards the lower position."""

from __future__ import annotations

import torch
from torch import Tensor

from .constants import upto, where

_LAST = float("nan")
"""What sorting upwards puts behind every number, infinity too."""


def leftmost(flags: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The ``n`` leftmost True positions of each row.

    Args:
        flags: [S, L] bool.
        n: how many (at most L).

    Returns:
        ``(pos, valid)``, [S, n]: ascending positions; ``pos`` is 0 where ``valid`` is False.
    """
    # Counting is a fraction of what sorting takes on a GPU.
    return reached(flags.cumsum(1), n)


def reached(count: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Where the running counts [S, L] reach 1 .. n: ``(pos, valid)`` [S, n], as :func:`leftmost` gives them."""
    nth = upto(n + 1, count)[1:].expand(count.shape[0], n).contiguous()
    pos = torch.searchsorted(count, nth)
    valid = pos < count.shape[1]
    return pos * valid, valid


def most(flags: Tensor) -> int:
    """The most True entries of a row of ``flags`` [S, L], at least 1; reads the device.

    Where the host reads a step late, every slot of a step may be done already. One column in which nothing is valid
    then keeps all shapes whole.
    """
    return max(1, int(flags.sum(1).max()))


def best_first(key: Tensor, flags: Tensor) -> Tensor:
    """Indices by descending ``key``, ties to the lower index, flagged entries before all others.

    Args:
        key: [S, C] floats, NaN-free where flagged.
        flags: [S, C] bool.

    Returns:
        A permutation of each row, [S, C] int64.
    """
    # One stable sort upwards, of the keys taken from 0 so that -0.0 and 0.0 are one.
    return where(flags, 0.0 - key, _LAST).sort(dim=1, stable=True).indices


def highest(key: Tensor, flags: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The ``n`` flagged positions of highest ``key``, as :func:`best_first` orders them.

    Args:
        key, flags: [S, L].

    Returns:
        ``(pos, valid)``, [S, n], best first; ``pos`` is 0 where ``valid`` is False.
    """
    pos = best_first(key, flags)[:, :n]
    valid = flags.gather(1, pos)
    return pos * valid, valid


def rank_of(key: Tensor, flags: Tensor) -> Tensor:
    """Rank of each entry in the order of :func:`best_first` (0 is the best), [S, C] int64."""
    order = best_first(key, flags)
    places = upto(key.shape[1], key).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)
