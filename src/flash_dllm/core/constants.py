"""Numbers that no step changes, made once a device, so that a step launches nothing for them.

A step has hundreds of small operations on a few numbers a slot, and on a GPU each of them is a launch, that of an
``arange`` or of a Python number among the operands of ``torch.where`` too. Nobody may write to what these functions
return. It lives as long as the process: recorded steps read it. A step runs once before it is recorded, so nothing is
made while one is.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def constant(value: float, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A number as a tensor without dimensions, of the device of ``like`` and its dtype, if no other is asked for."""
    # Fake tensors are not tensors of the device that they name, so each of them gets a number of its own.
    made = _number if type(like) is Tensor else _number.__wrapped__
    return made(value, dtype or like.dtype, like.device)


def where(take: Tensor, x: Tensor, value: float) -> Tensor:
    """``x`` where ``take``, elsewhere a number of its dtype."""
    return torch.where(take, x, constant(value, x))


def upto(n: int, like: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """0 .. n - 1, [n], on the device of ``like``."""
    made = _counted if type(like) is Tensor else _counted.__wrapped__
    # Few sizes, so that little is kept of the many that are asked for.
    return made(max(4096, 1 << (n - 1).bit_length()), dtype, like.device)[:n]


@cache
def _number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


@cache
def _counted(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(n, dtype=dtype, device=device)
