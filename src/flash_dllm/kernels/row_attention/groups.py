"""Rectangles of rows, and the block table that a kernel launch reads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

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
    and 1 for the first block of a slot, the one that computes the slot's attention score. The last ``keep`` shapes
    are kept, and all that were used inside :meth:`held` for as long as somebody keeps what that gave.
    """

    def __init__(self, keep: int = 256) -> None:
        self._keep = keep
        self._tables: OrderedDict[tuple[tuple[Group, ...], int, torch.device], Tensor] = OrderedDict()
        self._held: WeakValueDictionary[tuple[tuple[Group, ...], int, torch.device], Tensor] = (
            WeakValueDictionary()
        )
        # Of each thread: engines of other methods run beside.
        self._local = threading.local()

    def get(self, groups: tuple[Group, ...], rows: int, device: torch.device) -> Tensor:
        """The table of ``groups`` with blocks of ``rows`` rows."""
        key = (groups, rows, device)
        table = self._held.get(key)
        if table is None:
            table = self._tables.pop(key, None)
        if table is None:
            table = _made(*key)
        used: list[Tensor] | None = getattr(self._local, "used", None)
        if used is not None:
            self._held[key] = table
            used.append(table)
            return table
        self._tables[key] = table
        if len(self._tables) > self._keep:
            self._tables.popitem(last=False)
        return table

    @contextmanager
    def held(self) -> Iterator[list[Tensor]]:
        """Gives the tables that are used meanwhile: a recorded launch reads them for as long as it lives.

        A table has to be there before a step is recorded, since a copy from the host cannot be recorded; so the
        same step runs once before, inside this too, and what that gave is kept.
        """
        used: list[Tensor] = []
        self._local.used = used
        try:
            yield used
        finally:
            self._local.used = None


def _made(groups: tuple[Group, ...], rows: int, device: torch.device) -> Tensor:
    table = torch.tensor(_lines(groups, rows), dtype=torch.int32).view(-1, 5)
    # From pageable memory the copy would wait for everything that is queued on the stream.
    pinned = table.pin_memory() if device.type == "cuda" else table
    return pinned.to(device, non_blocking=True)


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
