"""Which tile the LM head kernel uses, by rows, dtype and shared memory of the device."""

from __future__ import annotations

from dataclasses import dataclass

from flash_dllm.kernels.devices import A100, H200, Limits


@dataclass(frozen=True)
class Tile:
    """One launch: a program multiplies ``vocab`` rows of the head with ``rows`` rows, ``depth`` columns at a time.

    Attributes:
        swap: the vocabulary lies on the M side of the matrix instruction. Hopper's takes 64 or more there, so this
            is what few rows need: they fill N, which may be 16.
        descriptor: operands come through TMA (compute capability 9 and up).
        persistent: programs a multiprocessor, each of which walks through many tiles; 0 launches one program a
            tile.
        flat: the two loops of a persistent program are one to the compiler, which can then load the next tile
            while it reduces the last.
        parts: 1, 2 or 4 slices of the tile are reduced one after the other, which takes fewer registers.
    """

    rows: int
    vocab: int
    depth: int
    warps: int
    stages: int
    swap: bool = False
    descriptor: bool = False
    persistent: int = 0
    flat: bool = False
    parts: int = 1

    def shared(self, itemsize: int) -> int:
        """Bytes of shared memory that the operands take."""
        return (self.rows + self.vocab) * self.depth * itemsize * self.stages


Table = tuple[tuple[int | None, Tile], ...]

HOPPER: Table = (
    (16, Tile(16, 64, 128, 4, 4, swap=True, descriptor=True, persistent=2)),
    (32, Tile(32, 128, 128, 4, 4, swap=True, descriptor=True)),
    (64, Tile(64, 128, 64, 4, 6, descriptor=True, parts=2)),
    (256, Tile(128, 256, 64, 8, 4, descriptor=True, parts=4)),
    (None, Tile(128, 256, 64, 8, 3, descriptor=True, persistent=1, flat=True, parts=4)),
)
AMPERE: Table = (
    (16, Tile(16, 128, 128, 4, 4, swap=True)),
    (32, Tile(32, 128, 128, 4, 3, swap=True)),
    (64, Tile(64, 128, 64, 8, 4, parts=4)),
    (None, Tile(128, 128, 64, 8, 3, parts=4)),
)
SMALL: Table = (
    (16, Tile(16, 64, 128, 4, 4, swap=True)),
    (32, Tile(32, 64, 128, 4, 3, swap=True)),
    (64, Tile(64, 128, 64, 8, 3, parts=4)),
    (None, Tile(128, 128, 32, 8, 4, parts=4)),
)
NOISY: Table = (
    (16, Tile(16, 64, 64, 4, 4, swap=True)),
    (32, Tile(32, 64, 64, 4, 4, swap=True)),
    (None, Tile(64, 128, 64, 8, 4, parts=4)),
)
"""With Gumbel noise, whose float64 takes four registers where a logit takes one; they fit every device."""
WIDE: Table = ((16, Tile(16, 64, 32, 4, 2)), (None, Tile(32, 64, 32, 4, 2)))
"""float32 without TF32: no matrix instruction, so the tile is what registers hold."""
INVARIANT = Tile(64, 128, 64, 8, 4, parts=4)
"""For any number of rows and any request, with one program a tile: a row is computed alike in every batch."""

VARIANTS: dict[int, tuple[Tile, ...]] = {
    16: (
        HOPPER[0][1],
        Tile(16, 64, 128, 4, 4, swap=True, descriptor=True),
        Tile(16, 64, 256, 4, 3, swap=True, descriptor=True),
        Tile(16, 128, 64, 4, 8, swap=True, descriptor=True),
        Tile(16, 256, 64, 8, 5, swap=True, descriptor=True),
        Tile(16, 64, 128, 4, 4, swap=True, descriptor=True, persistent=2),
        Tile(16, 128, 128, 4, 5, swap=True, descriptor=True, persistent=1, flat=True),
        Tile(16, 128, 128, 4, 5, swap=True),
        Tile(16, 64, 128, 4, 4, swap=True),
    ),
    128: (
        HOPPER[3][1],
        Tile(128, 128, 64, 4, 5, descriptor=True, parts=4),
        Tile(128, 128, 64, 4, 3, descriptor=True, parts=4),
        Tile(128, 256, 64, 8, 3, descriptor=True, parts=4),
        Tile(128, 256, 64, 8, 4, descriptor=True, parts=4),
        Tile(64, 256, 64, 4, 4, descriptor=True, parts=4),
        Tile(128, 128, 64, 8, 5, parts=4),
    ),
    512: (
        HOPPER[4][1],
        Tile(128, 256, 64, 8, 4, descriptor=True, parts=4),
        Tile(128, 256, 64, 8, 3, descriptor=True, parts=2),
        Tile(256, 128, 64, 8, 3, descriptor=True, parts=4),
        Tile(128, 256, 64, 8, 3, descriptor=True, persistent=1, parts=4),
        Tile(128, 256, 64, 8, 3, descriptor=True, persistent=1, flat=True, parts=4),
        Tile(128, 128, 64, 4, 3, descriptor=True, parts=4),
        Tile(128, 256, 64, 8, 3, parts=4),
    ),
}
"""What is worth measuring on an H200, by rows."""


def tile_for(rows: int, itemsize: int, noisy: bool, chip: Limits, invariant: bool = False) -> Tile:
    """The tile for ``rows`` rows of ``itemsize`` bytes a number; ``noisy`` with Gumbel noise."""
    if itemsize == 4:
        return WIDE[-1][1] if invariant else _find(WIDE, rows)
    if invariant:
        return INVARIANT
    if noisy:
        return _find(NOISY, rows)
    return _find(
        HOPPER if chip.shared >= H200.shared else AMPERE if chip.shared >= A100.shared else SMALL, rows
    )


def _find(table: Table, rows: int) -> Tile:
    return next(tile for limit, tile in table if limit is None or rows <= limit)
