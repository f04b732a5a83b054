"""Choosing positions on the device: no host read, every tie broken towards the lower position."""

from __future__ import annotations

import torch
from torch import Tensor

_INDICES = 2**24
"""Positions that one number can tell apart beside 32 bits of key."""


def leftmost(flags: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The ``n`` leftmost True positions of each row.

    Args:
        flags: [S, L] bool.
        n: how many (at most L).

    Returns:
        ``(pos, valid)``, [S, n]: ascending positions; ``pos`` is 0 where ``valid`` is False.
    """
    # Counting is a fraction of what sorting takes on a GPU.
    count = flags.cumsum(1)
    order = torch.arange(flags.shape[1], device=flags.device).expand_as(count)
    spot = torch.where(flags & (count <= n), count - 1, n)
    pos = torch.zeros((flags.shape[0], n + 1), dtype=torch.int64, device=flags.device)
    pos = pos.scatter_(1, spot, order)[:, :n]
    valid = torch.arange(n, device=flags.device) < count[:, -1:]
    return torch.where(valid, pos, 0), valid


def most(flags: Tensor) -> int:
    """The most True entries of a row of ``flags`` [S, L], at least 1; reads the device.

    Where the host reads a step late, every slot of a step may be done already. One column in which nothing is valid
    then keeps all shapes whole.
    """
    return max(1, int(flags.sum(1).max()))


def best_first(key: Tensor, flags: Tensor) -> Tensor:
    """Indices by descending ``key``, ties to the lower index, flagged entries before all others.

    Args:
        key: [S, C], NaN-free where flagged.
        flags: [S, C] bool.

    Returns:
        A permutation of each row, [S, C] int64.
    """
    if key.dtype == torch.float32 and key.shape[1] <= _INDICES:
        return _whole_keys(key, flags).sort(dim=1, descending=True).indices
    masked = torch.where(flags, key, torch.finfo(key.dtype).min)
    # Two stable sorts: by key, then flagged before unflagged whatever the key.
    by_key = masked.sort(dim=1, descending=True, stable=True).indices
    flagged = flags.gather(1, by_key).to(torch.int8)
    return by_key.gather(1, flagged.sort(dim=1, descending=True, stable=True).indices)


def _whole_keys(key: Tensor, flags: Tensor) -> Tensor:
    """int64 numbers, no two of a row equal, in the order of :func:`best_first`: one sort instead of two."""
    # The bits of a float order like an integer, those of a negative one backwards; adding 0 makes -0.0 a 0.0.
    bits = (key + 0.0).view(torch.int32)
    ordered = torch.where(flags, (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long(), -(2**31) - 1)
    return ordered * _INDICES - torch.arange(key.shape[1], device=key.device)


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
