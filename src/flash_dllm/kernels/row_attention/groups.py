"""Rectangles of rows, and the block table that a kernel launch reads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """A rectangle of rows: ``width`` rows for each of ``slots``, flat from ``start``.

    ``n_keys`` is the number of key places that the group's attention looks at. Every row of a ``whole`` group sees
    the whole canvas of its slot and nothing else, so no interval has to be read. A ``dense`` group is whole and its
    canvases all end at ``n_keys``.
    """

    slots: tuple[int, ...]
    start: int
    width: int
    n_keys: int
    dense: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        if self.dense and not self.whole:
            object.__setattr__(self, "whole", True)

    @property
    def size(self) -> int:
        return len(self.slots) * self.width

    @property
    def flat(self) -> slice:
        return slice(self.start, self.start + self.size)

    def moved(self, by: int) -> Group:
        """The same rectangle, ``by`` rows further on."""
        return Group(self.slots, self.start + by, self.width, self.n_keys, self.dense, self.whole)

    def part(self, first: int, stop: int, start: int) -> Group:
        """The lanes ``first`` .. ``stop - 1`` of it, flat from ``start``."""
        return Group(self.slots[first:stop], start, self.width, self.n_keys, self.dense, self.whole)


class BlockTables:
    """Block tables by shape, kept on the device: a steady step looks its table up and copies nothing.

    A table is [T, 5] int32, one line a block of at most ``rows`` rows: slot, first row, number of rows, key places,
    and 1 for the first block of a slot, the one that computes the slot's attention score.
    """

    def __init__(self, keep: int = 256) -> None:
        self._keep = keep
        self._tables: OrderedDict[tuple[tuple[Group, ...], int, torch.device], Tensor] = OrderedDict()
        self._held: list[Tensor] | None = None

    def get(self, groups: tuple[Group, ...], rows: int, device: torch.device) -> Tensor:
        """The table of ``groups`` with blocks of ``rows`` rows."""
        table = self._find((groups, rows, device))
        if self._held is not None:
            self._held.append(table)
        return table

    @contextmanager
    def held(self) -> Iterator[list[Tensor]]:
        """Collects the tables that are used meanwhile: a recorded launch needs them for as long as it lives."""
        self._held = []
        try:
            yield self._held
        finally:
            self._held = None

    def _find(self, key: tuple[tuple[Group, ...], int, torch.device]) -> Tensor:
        groups, rows, device = key
        if key in self._tables:
            self._tables.move_to_end(key)
            return self._tables[key]
        table = torch.tensor(_lines(groups, rows), dtype=torch.int32).view(-1, 5)
        # From pageable memory the copy would wait for everything that is queued on the stream.
        pinned = table.pin_memory() if device.type == "cuda" else table
        table = self._tables[key] = pinned.to(device, non_blocking=True)
        if len(self._tables) > self._keep:
            self._tables.popitem(last=False)
        return table


def _lines(groups: tuple[Group, ...], rows: int) -> list[tuple[int, int, int, int, int]]:
    lines, seen = [], set()
    for group in groups:
        for lane, slot in enumerate(group.slots):
            first = group.start + lane * group.width
            for offset in range(0, group.width, rows):
                count = min(rows, group.width - offset)
                lines.append((slot, first + offset, count, group.n_keys, int(slot not in seen)))
                seen.add(slot)
    return lines


TABLES = BlockTables()
