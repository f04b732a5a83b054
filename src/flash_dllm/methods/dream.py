"""Dream's decoding (arXiv 2508.15487, ``diffusion_generate``): one pool of masks on a linear time schedule.

Time runs from 1 to ``t_end`` in ``steps`` steps; going from t to s commits int(m (1 - s / t)) of the m
masks, the last step all of them. With steps = length the first step commits nothing, as published.
``origin`` takes each mask with probability 1 - s / t; the others rank by top-1 probability
(``maskgit_plus``), by negative entropy (``entropy``, the default of the paper) or by margin
(``topk_margin``), with noise where ``alg_temp`` > 0. Over blocks (Fast-dLLM's code for Dream) each block
has a time schedule of steps / blocks steps of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flash_dllm.core.method import Rule
from flash_dllm.core.noise import Noise, TorchCPUNoise
from flash_dllm.core.select import rank_of
from flash_dllm.core.state import State
from flash_dllm.core.types import Candidates, Draft

OPTIONS = frozenset({"steps", "block_length", "temperature", "top_p", "top_k", "t_end", "eos"})


def transfer_fraction(state: State) -> tuple[Tensor, Tensor]:
    """``(1 - s / t, last)`` of each slot's step: [S] float32 and [S] bool.

    Float32 throughout: the published products sit next to integers. The time points are torch's own
    ``linspace``, which fills its second half backwards from the end.
    """
    steps, end = (state.num["steps"] // state.blocks).clamp_min(1), state.num["t_end"]

    def time(index: Tensor) -> Tensor:
        step = (end - 1.0) / steps.float()
        half = (steps + 1) // 2
        return torch.where(index < half, 1.0 + step * index, end - step * (steps - index))

    i = torch.minimum(state.block_step, steps - 1)
    return 1 - time(i + 1) / time(i), state.block_step >= steps - 1


def transfer_count(state: State, masks: Tensor) -> Tensor:
    """Tokens to commit in this step, [S] int64; 0 is possible."""
    fraction, last = transfer_fraction(state)
    return torch.where(last, masks, (masks.float() * fraction).long())


class Ranked(Rule):
    """The scheduled number of candidates, best ``measure`` first; noisy where ``alg_temp`` > 0."""

    categorical = True
    options = OPTIONS | {"alg_temp"}

    def __init__(self, name: str, measure: str) -> None:
        self.name, self.measure = name, measure
        self.noisy = False

    def prepare(self, numbers: Sequence[Mapping[str, float]]) -> None:
        self.noisy = any(n.get("alg_temp", 0) > 0 for n in numbers)

    def modes(self) -> tuple[bool, ...]:
        return (self.noisy,)

    def commit(self, state: State, cand: Candidates, draft: Draft, noise: Noise) -> Tensor:
        key, temp = draft.confidence, state.num["alg_temp"][:, None]
        if self.noisy:
            # A Gumbel top-k draws without replacement from softmax(confidence / alg_temp).
            uniform = noise.per_choice(cand.pos, cand.valid).clamp(1e-9, 1 - 1e-7)
            noisy = key / torch.where(temp > 0, temp, 1.0) - torch.log(-torch.log(uniform))
            key = torch.where(temp > 0, noisy, key)
        count = transfer_count(state, cand.valid.sum(1))
        if isinstance(noise, TorchCPUNoise):
            return noise.top(key, cand.pos, cand.valid, count)
        return (rank_of(key, cand.valid) < count[:, None]) & cand.valid


class Origin(Rule):
    """Each mask on its own with probability 1 - s / t."""

    name = "origin"
    random_order = True
    categorical = True
    options = OPTIONS

    def commit(self, state: State, cand: Candidates, draft: Draft, noise: Noise) -> Tensor:
        fraction, last = transfer_fraction(state)
        uniform = noise.per_masked(cand.pos, cand.valid)
        return cand.valid & ((uniform < fraction[:, None]) | last[:, None])
