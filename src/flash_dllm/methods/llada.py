"""LLaDA's own decoding (arXiv 2502.09992, Algorithm 4/5): a fixed number of tokens a step.

A block of B masks gets S = steps / blocks steps; step i commits floor(B / S) tokens, one more in the first B mod S
steps. ``greedy`` takes the most confident candidates (low-confidence remasking), ``random`` a random choice.
Defaults: LLaDA block 32, steps = length. Cost: whatever the cache policy recomputes, S passes a block.
"""

from __future__ import annotations

from torch import Tensor

from flash_dllm.core.method import Rule
from flash_dllm.core.noise import Noise
from flash_dllm.core.select import rank_of
from flash_dllm.core.state import State
from flash_dllm.core.types import Candidates, Draft


def scheduled_count(state: State) -> Tensor:
    """Tokens to commit in this step of each slot's block, [S] int64, at least 1."""
    steps = (state.num["steps"] // state.blocks).clamp_min(1)
    base, extra = state.block_masks // steps, state.block_masks % steps
    return (base + (state.block_step < extra)).clamp_min(1)


class LowConfidence(Rule):
    """The scheduled number of candidates, most confident first."""

    name = "greedy"
    certifies = True
    options = frozenset({"steps", "block_length", "temperature", "top_p", "top_k", "eos", "cfg_scale"})

    def commit(self, state: State, cand: Candidates, draft: Draft, noise: Noise) -> Tensor:
        rank = rank_of(draft.confidence, cand.valid)
        return (rank < scheduled_count(state)[:, None]) & cand.valid


class RandomOrder(LowConfidence):
    """The scheduled number of candidates in random order."""

    name = "random"
    certifies = False
    random_order = True

    def commit(self, state: State, cand: Candidates, draft: Draft, noise: Noise) -> Tensor:
        key = noise.per_position(cand.pos, cand.valid)
        draft.confidence = key
        return (rank_of(key, cand.valid) < scheduled_count(state)[:, None]) & cand.valid
