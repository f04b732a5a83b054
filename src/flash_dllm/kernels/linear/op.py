"""The one function that multiplies rows by a weight, and what a weight other than a tensor has to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor


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


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, [N, out] in the dtype of ``x`` [N, in]; ``weight`` [out, in], ``bias`` [out] or None."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    return weight.linear(x, bias)


def storages(weight: Matrix) -> Iterator[Tensor]:
    """The tensors that hold a matrix."""
    if isinstance(weight, Tensor):
        yield weight
    else:
        yield from weight.storages()


def nbytes(weight: Matrix) -> int:
    """Bytes that a matrix takes."""
    return sum(t.numel() * t.element_size() for t in storages(weight))
