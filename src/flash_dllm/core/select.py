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


def highest(key: Tensor, flags: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The ``n`` flagged positions of highest ``key``; ties go to the lower position.

    Args:
        key: [S, L], NaN-free where flagged.
        flags: [S, L] bool.

    Returns:
        ``(pos, valid)``, [S, n], best first; ``pos`` is 0 where ``valid`` is False.
    """
    n = min(n, key.shape[1])
    masked = torch.where(flags, key, torch.finfo(key.dtype).min)
    # Two stable sorts: flagged before unflagged whatever the key, then by key.
    by_key = masked.sort(dim=1, descending=True, stable=True).indices
    flagged = flags.gather(1, by_key).to(torch.int8)
    order = flagged.sort(dim=1, descending=True, stable=True).indices
    pos = by_key.gather(1, order)[:, :n]
    valid = flags.gather(1, pos)
    return torch.where(valid, pos, 0), valid


def rank_of(key: Tensor, flags: Tensor) -> Tensor:
    """Rank of each flagged entry by descending ``key`` (0 is the best), ties to the lower index.

    Unflagged entries rank behind all flagged ones. [S, C] -> [S, C] int64.
    """
    masked = torch.where(flags, key, torch.finfo(key.dtype).min)
    by_key = masked.sort(dim=1, descending=True, stable=True).indices
    flagged = flags.gather(1, by_key).to(torch.int8)
    order = by_key.gather(1, flagged.sort(dim=1, descending=True, stable=True).indices)
    places = torch.arange(key.shape[1], device=key.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)
