"""How many slots fit on a GPU beside the weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flash_dllm.models import ModelConfig, ModelError
from flash_dllm.models.inspection import activation_bytes

MOST_SLOTS = 32
"""Slots where nobody asks for a number: more of them hardly raise what a large GPU decodes a second, since from here on
arithmetic is what a step costs."""
STATE_BYTES = 80
"""Bytes of state a position, keys and values apart."""
GIB = 2**30


@dataclass(frozen=True)
class Room:
    """Bytes of a device: all of it, what is free, and the share of all of it that may be used."""

    total: int
    free: int
    share: float

    @classmethod
    def of(cls, device: torch.device, share: float) -> Room | None:
        """That of a GPU; None for a device whose memory is not divided up beforehand."""
        if device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(device)
        # What torch has taken and does not use is free for us.
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return cls(total, free + spare, share)

    @property
    def left(self) -> int:
        """What may still be allocated."""
        return max(0, int(self.total * self.share) - (self.total - self.free))


@dataclass(frozen=True)
class Need:
    """What an engine allocates: for each slot, and once.

    Attributes:
        position: bytes of keys, values, state and what the method keeps of one position.
        positions: key places of a slot, scratch included.
        once: bytes of activations.
    """

    position: int
    positions: int
    once: int

    @classmethod
    def of(
        cls, config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype, places: int, kept: int = 0
    ) -> Need:
        """For slots of ``places`` key places, for each of which the method keeps ``kept`` bytes more.

        Activations count twice: a sweep's, and those that graphs keep.
        """
        position = config.kv_bytes_per_position(kv_dtype.itemsize) + STATE_BYTES + kept
        return cls(position, places, 2 * activation_bytes(config, dtype, places))

    @property
    def slot(self) -> int:
        """Bytes of one slot."""
        return self.position * self.positions

    def fits(self, room: Room) -> int:
        """Slots that fit."""
        return max(0, (room.left - self.once) // self.slot)


def choose_slots(wanted: int | None, need: Need, room: Room | None, default: int, length: int) -> int:
    """The number of slots: ``wanted`` if it fits, else as many as fit, up to :data:`MOST_SLOTS`.

    Args:
        default: on a device without a plan for its memory.
        length: ``max_model_len``, for messages.

    Raises:
        ModelError: not even one slot, or not as many as wanted; the message says what would fit.
    """
    if room is None:
        return wanted or default
    fits = need.fits(room)
    if fits >= (wanted or 1):
        return wanted or min(fits, MOST_SLOTS)
    asked = wanted or 1
    budget = room.left - need.once
    shorter = budget // (asked * need.position) - (need.positions - length)
    hint = f"{fits} slots fit" if fits else "no slot fits"
    if shorter >= 32:
        hint += f", or max_num_seqs={asked} with max_model_len={shorter // 32 * 32}"
    raise ModelError(
        f"max_num_seqs={asked} with max_model_len={length} needs {asked * need.slot / GIB:.1f} GiB for keys, values "
        f"and what the method keeps, and {need.once / GIB:.1f} GiB for activations; {room.left / GIB:.1f} GiB are left "
        f"of gpu_memory_utilization={room.share:.3g}: {hint}"
    )
