"""Random numbers that do not depend on the batch.

:class:`CounterNoise` computes each number from (seed, step, position, index), so a request draws the same
numbers alone, in any batch and on any device. :class:`TorchCPUNoise` draws from torch's CPU generator in the
order of the published loops; it exists for the golden traces and holds for one request at a time.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

_MIX = (0x2545F491, 0x9E3779B1, 0x85EBCA77)
_LOW = 0xFFFFFFFF


class Noise(Protocol):
    """A source of uniform numbers for one step. ``seed``, ``step`` are [S]; ``pos`` is [S, C]."""

    def begin(self, seed: Tensor, step: Tensor, length: int) -> None:
        """Start a step of canvases of ``length`` positions."""

    def per_position(self, pos: Tensor, valid: Tensor) -> Tensor:
        """One number a candidate, [S, C] float32, for random remasking."""

    def per_masked(self, pos: Tensor, valid: Tensor) -> Tensor:
        """One number a candidate, [S, C] float32, for Dream's ``origin``."""

    def per_choice(self, pos: Tensor, valid: Tensor) -> Tensor:
        """One number a candidate, [S, C] float32, for Dream's ``alg_temp``."""

    def per_token(self, pos: Tensor, vocab: int, start: int = 0) -> Tensor:
        """A number for each candidate and token ``start`` .. ``vocab - 1``, float64 in (0, 1), for Gumbel noise."""


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash (two rounds of xor-shift and multiply) on int64 tensors."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _LOW
    x = (x ^ (x >> 15)) * 0x846CA68B & _LOW
    return x ^ (x >> 16)


def counter_uniform(*words: Tensor) -> Tensor:
    """Uniform float64 in (0, 1) from broadcastable int64 counters; the same on every device.

    Two chains of 32-bit hashes, so that counters that collide in one do not in the other.
    """
    first, second = counter_hashes(*words)
    return (((first << 20) + (second >> 12)).double() + 0.5) / 2.0**52


def counter_hashes(*words: Tensor) -> tuple[Tensor, Tensor]:
    """The two hashes, int64 below 2**32, of broadcastable int64 counters; a kernel may continue them."""
    first = torch.full((), _MIX[0], dtype=torch.int64, device=words[0].device)
    second = torch.full((), _MIX[1], dtype=torch.int64, device=words[0].device)
    for word in words:
        for part in (word & _LOW, (word >> 32) & _LOW):
            first = _mix(first ^ part)
            second = _mix((second + part * _MIX[2]) & _LOW)
    return first, second


class CounterNoise:
    """Counter-based noise (the default)."""

    def begin(self, seed: Tensor, step: Tensor, length: int) -> None:
        self._seed, self._step = seed[:, None], step[:, None].long()

    def per_position(self, pos: Tensor, valid: Tensor) -> Tensor:
        return counter_uniform(self._seed, self._step, pos, torch.zeros_like(pos)).float()

    per_masked = per_position

    def per_choice(self, pos: Tensor, valid: Tensor) -> Tensor:
        return counter_uniform(self._seed, self._step, pos, torch.full_like(pos, -1)).float()

    def per_token(self, pos: Tensor, vocab: int, start: int = 0) -> Tensor:
        index = torch.arange(start + 1, vocab + 1, device=pos.device)
        words = (self._seed[..., None], self._step[..., None], pos[..., None], index)
        return counter_uniform(*words).flatten(0, 1).clamp(2.0**-53, 1 - 2.0**-53)

    def token_hashes(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """What :meth:`per_token` hashes before the token's index, each [S * C] int64, for kernels that go on."""
        first, second = counter_hashes(self._seed, self._step, pos)
        return first.flatten(), second.flatten()


class TorchCPUNoise:
    """Numbers in the order in which the published single-request loops draw them.

    Args:
        seed: of the CPU generator.
        vocab: rows of the LM head: Gumbel noise is drawn for the whole vocabulary of the whole canvas.
    """

    def __init__(self, seed: int, vocab: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._vocab = vocab

    def begin(self, seed: Tensor, step: Tensor, length: int) -> None:
        self._length = length

    def per_position(self, pos: Tensor, valid: Tensor) -> Tensor:
        drawn = torch.rand((1, self._length), generator=self._generator)
        return drawn[0].to(pos.device)[pos]

    def per_masked(self, pos: Tensor, valid: Tensor) -> Tensor:
        out = torch.ones(valid.shape)
        flags = valid.cpu()
        out[flags] = torch.rand(int(flags.sum()), generator=self._generator)
        return out.to(valid.device)

    def per_choice(self, pos: Tensor, valid: Tensor) -> Tensor:
        raise NotImplementedError("no published trace uses alg_temp")

    def per_token(self, pos: Tensor, vocab: int, start: int = 0) -> Tensor:
        shape = (self._length, self._vocab)
        drawn = torch.rand((1, *shape), generator=self._generator, dtype=torch.float64)[0]
        return drawn.to(pos.device)[pos.flatten(), start:vocab]

    def choose(self, probs: Tensor, valid: Tensor) -> Tensor:
        """Draw an index from each valid row of ``probs`` [S * C, V], as ``torch.multinomial`` does."""
        flags = valid.flatten().cpu()
        out = torch.zeros(probs.shape[0], dtype=torch.int64)
        out[flags] = torch.multinomial(probs.cpu()[flags], 1, generator=self._generator)[:, 0]
        return out.to(probs.device)

    def top(self, key: Tensor, pos: Tensor, valid: Tensor, count: Tensor) -> Tensor:
        """The ``count`` valid candidates of highest ``key`` with ties as ``torch.topk`` breaks them, [S, C] bool.

        Nucleus sampling makes many confidences exactly equal, so the published choice hangs on that order.
        """
        full = torch.full((1, self._length), float("-inf"))
        flags = valid[0].cpu()
        full[0, pos[0].cpu()[flags]] = key[0].cpu()[flags]
        chosen = torch.zeros(self._length, dtype=torch.bool)
        chosen[torch.topk(full, int(count[0])).indices[0]] = True
        return chosen.to(pos.device)[pos] & valid
