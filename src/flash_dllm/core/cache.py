"""The flat K/V cache: one tensor for keys and one for values a layer, allocated once for all slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_dllm.models.config import ModelConfig


@dataclass
class KVCache:
    """Keys and values of every slot.

    Place 0 of a slot is the trash place, places 1 .. ``base - 1`` are scratch, place ``base + pos`` belongs
    to position ``pos``. Keys are stored rotated. Only scratch places are ever added later (:meth:`reserve`).

    Attributes:
        keys, values: a tensor a layer, [S, P, Hkv, D].
        base: number of places before position 0.
    """

    keys: list[Tensor]
    values: list[Tensor]
    base: int

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        slots: int,
        positions: int,
        scratch: int,
        like: Tensor,
        dtype: torch.dtype | None = None,
    ) -> KVCache:
        """Allocate ``slots`` canvases of ``positions`` with ``scratch`` extra places, device of ``like``.

        ``dtype`` is that of ``like`` or float8_e4m3fn, to which what is written is rounded with scale 1 (beyond
        +-448 it becomes +-448); attention reads it back in the dtype of its queries.
        """
        shape = (slots, 1 + scratch + positions, config.n_kv_heads, config.head_dim)
        dtype = dtype or like.dtype

        def tensors() -> list[Tensor]:
            return [torch.zeros(shape, dtype=dtype, device=like.device) for _ in range(config.n_layers)]

        return cls(tensors(), tensors(), 1 + scratch)

    def reserve(self, scratch: int) -> None:
        """Make room for ``scratch`` scratch places; what is cached moves along."""
        extra = 1 + scratch - self.base
        if extra <= 0:
            return
        for tensors in (self.keys, self.values):
            for index, old in enumerate(tensors):
                # One layer at a time, so that only one is there twice.
                room = old.new_zeros(old.shape[0], extra, *old.shape[2:])
                tensors[index] = torch.cat([room, old], 1)
        self.base += extra

    @property
    def places(self) -> int:
        return int(self.keys[0].shape[1])

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.keys[index], self.values[index]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))
