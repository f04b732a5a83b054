"""Tiles of the attention kernels, by rows and by what the GPU offers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flash_dllm.kernels import tuned
from flash_dllm.kernels.devices import H200, Limits


@dataclass(frozen=True)
class Tiles:
    """Sizes of a launch: rows x query heads of a KV head (``m``), keys (``n``), and over how many key ranges.

    ``descriptor``: keys and values come through TMA (compute capability 9 and up).
    """

    m: int
    n: int
    splits: int = 1
    warps: int = 4
    stages: int = 2
    descriptor: bool = False


HOPPER = {
    16: Tiles(16, 128, 1, 4, 2, True),
    32: Tiles(32, 128, 1, 4, 2, True),
    64: Tiles(64, 64, 1, 4, 3, True),
    128: Tiles(128, 32, 1, 4, 3, True),
}
"""By lines of a block, on an H200 (benchmarks/kernels.md)."""
HOPPER_ALONE = {
    16: Tiles(16, 128, 1, 4, 3, True),
    32: Tiles(32, 128, 1, 4, 3, True),
    64: Tiles(64, 64, 1, 4, 4, True),
    128: Tiles(128, 64, 1, 8, 3, True),
}
"""Likewise where there are so few blocks that each is cut into ranges of keys, and no other launch runs beside."""


def few(blocks: int, chip: Limits) -> bool:
    """Whether ``blocks`` programs leave so much of the GPU idle that each is cut into ranges of keys."""
    return 2 * blocks <= chip.processors


def tiles_for(
    rows: int, blocks: int, group: int, dtype: torch.dtype, chip: Limits, beside: bool = False
) -> Tiles:
    """Tiles for ``rows`` rows a slot, ``blocks`` programs before any split.

    ``beside``: another launch runs at the same time, so two programs have to fit on a multiprocessor.
    """
    if dtype == torch.float32:
        return Tiles(16 if rows * group <= 16 else 32, 32, warps=8)
    m = 16
    while m < min(rows * group, 128):
        m *= 2
    splits = 1
    while splits < 4 and few(blocks * splits, chip):
        splits *= 2
    if chip.shared >= H200.shared:
        many = rows * group > 256
        table = HOPPER if splits == 1 or beside else HOPPER_ALONE
        return replace(table[64 if many else m], splits=splits)
    m = min(m, 64) if chip.shared < 100 * 1024 else m
    stages = 3 if chip.shared > 128 * 1024 else 2
    # By pointer, 64 rows of 4 warps keep more than the registers hold.
    return Tiles(m, 64 if m >= 64 else 128, splits, 8 if m >= 64 else 4, stages)


def stored_tiles(rows: int, width: int, group: int, dim: int, score: bool) -> Tiles | None:
    """What was measured on this device for the nearest number of rows, ``width`` of them a slot, if anything was."""
    entry = tuned.current().find("row_attention", rows, group=group, dim=dim, width=width, score=int(score))
    return None if entry is None else Tiles(**entry.tiles)


def invariant_tiles(dtype: torch.dtype, chip: Limits) -> Tiles:
    """Tiles that do not depend on the number of rows or slots."""
    if dtype == torch.float32:
        return Tiles(32, 32, warps=8)
    return Tiles(64, 64, warps=4 if chip.shared >= H200.shared else 8)
