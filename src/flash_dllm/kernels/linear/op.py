"""The one function that multiplies rows by a weight, and what a weight other than a tensor has to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_dllm.kernels.choice import INVARIANT, LIBRARY, REF, TRITON, choose
from flash_dllm.kernels.tuned import current

FEW = 256
"""Rows up to which a product streams the weights, so that a kernel of our own may beat the library's."""


@runtime_checkable
class Weight(Protocol):
    """A matrix [out, in] that is no plain tensor: quantised, or one rank's part of a product."""

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x`` [N, in] -> [N, out], dtype of ``x``."""

    def write(self, start: int, rows: Tensor, name: str) -> None:
        """Fill rows ``start``, ``start + 1``, ... from ``rows`` [n, in] of any floating dtype.

        Raises:
            ValueError: they hold numbers that this form cannot; ``name`` is the tensor's.
        """

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Weight:
        """A copy elsewhere; ``dtype`` is that of activations, which a quantised matrix is not kept in."""

    def numel(self) -> int:
        """Parameters."""

    def storages(self) -> Iterator[Tensor]:
        """The tensors that hold it."""

    def __getitem__(self, rows: slice) -> Weight | Tensor:
        """Some of its rows, sharing memory."""


Matrix = Tensor | Weight
"""A weight matrix of a layer."""


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None, impl: str | None = None) -> Tensor:
    """``x @ weight.T + bias``, [N, out] in the dtype of ``x`` [N, in]; ``weight`` [out, in], ``bias`` [out] or None.

    ``impl``: ``library`` (a weight of another form multiplies as it does), ``triton``, or ``invariant`` (Triton with
    one tile: a row gives the same bits whatever rows come with it). None takes the library, and for few rows on a
    GPU the tiles that were measured to be faster there, if any were.
    """
    if impl is None and isinstance(weight, Tensor) and x.is_cuda and x.ndim == 2 and len(x) <= FEW:
        entry = current().find("linear", len(x), depth=weight.shape[1], width=weight.shape[0])
        if entry is not None and entry.impl == TRITON:
            from . import triton

            return triton.matmul(x, weight, bias, False, triton.Tiles(**entry.tiles))
    chosen = LIBRARY if impl is None else choose(impl, x, (LIBRARY, REF, TRITON, INVARIANT))
    if chosen in (LIBRARY, REF):
        return F.linear(x, weight, bias) if isinstance(weight, Tensor) else weight.linear(x, bias)
    if not isinstance(weight, Tensor):
        raise ValueError(f"kernel implementation {impl!r} multiplies by plain matrices only")
    from . import triton

    return triton.matmul(x, weight, bias, chosen == INVARIANT)


def storages(weight: Matrix) -> Iterator[Tensor]:
    """The tensors that hold a matrix."""
    if isinstance(weight, Tensor):
        yield weight
    else:
        yield from weight.storages()


def nbytes(weight: Matrix) -> int:
    """Bytes that a matrix takes."""
    return sum(t.numel() * t.element_size() for t in storages(weight))
