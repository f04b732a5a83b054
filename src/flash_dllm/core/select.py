"""Choosing positions on the device: no host read, every tie broken towards the lower position."""

from __future__ import annotations

import torch
from torch import Tensor


def leftmost(flags: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The ``n`` leftmost True positions of each row.

    Args:
        flags: [S, L] bool.
        n: how many (at most L).

    Returns:
        ``(pos, valid)``, [S, n]: ascending positions; ``pos`` is 0 where ``valid`` is False.
    """
    length = flags.shape[1]
    order = torch.arange(length, device=flags.device)
    key = torch.where(flags, order, length)
    found = key.sort(dim=1).values[:, :n]
    if n > length:
        found = torch.nn.functional.pad(found, (0, n - length), value=length)
    valid = found < length
    return torch.where(valid, found, 0), valid


def best_first(key: Tensor, flags: Tensor) -> Tensor:
    """Indices by descending ``key``, ties to the lower index, flagged entries before all others.

    Args:
        key: [S, C], NaN-free where flagged.
        flags: [S, C] bool.

    Returns:
        A permutation of each row, [S, C] int64.
    """
    masked = torch.where(flags, key, torch.finfo(key.dtype).min)
    # Two stable sorts: by key, then flagged before unflagged whatever the key.
    by_key = masked.sort(dim=1, descending=True, stable=True).indices
    flagged = flags.gather(1, by_key).to(torch.int8)
    return by_key.gather(1, flagged.sort(dim=1, descending=True, stable=True).indices)


def highest(key: Tensor, flags: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The ``n`` flagged positions of highest ``key``, as :func:`best_first` orders them.

    Args:
        key, flags: [S, L].

    Returns:
        ``(pos, valid)``, [S, n], best first; ``pos`` is 0 where ``valid`` is False.
    """
    pos = best_first(key, flags)[:, :n]
    valid = flags.gather(1, pos)
    return torch.where(valid, pos, 0), valid


def rank_of(key: Tensor, flags: Tensor) -> Tensor:
    """Rank of each entry in the order of :func:`best_first` (0 is the best), [S, C] int64."""
    order = best_first(key, flags)
    places = torch.arange(key.shape[1], device=key.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)
