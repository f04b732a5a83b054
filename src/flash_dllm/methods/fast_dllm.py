"""Fast-dLLM (arXiv 2505.22618): confidence-aware parallel decoding, block-wise prefix and dual caches.

Rules: ``threshold`` commits candidates with confidence >= epsilon (section 3.3), ``factor`` the largest n
with (n + 1)(1 - c_(n)) < f, as later versions of the code do it, ``quota`` (the code for Dream without cache)
a threshold with a budget. All commit at least the best one.

Caches: at each block's start one pass over the whole canvas, which also commits; then ``prefix`` recomputes
the block and everything behind it, ``dual`` the block alone. Keys of the rest stay as the block's first pass
left them. Schedules: ``blocks`` is that of later code and our default; the first public code is
``blocks-as-released`` (LLaDA) and ``blocks-dream-as-released``.

Defaults, LLaDA and Dream, every task: block 32, epsilon 0.9. Cost a step and slot: T rows at a block's start,
then T - start (``prefix``) or B (``dual``), over a plain cache of T places.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_dllm.core.cache import KVCache
from flash_dllm.core.method import Blocks, CachePolicy, Rule, at_least_best, prefix_true
from flash_dllm.core.noise import Noise
from flash_dllm.core.rows import fed_rows, run_rows
from flash_dllm.core.select import best_first, leftmost, rank_of
from flash_dllm.core.state import State
from flash_dllm.core.types import Candidates, Draft, Lanes, Rows


class Threshold(Rule):
    """Candidates with confidence >= epsilon, else the best one."""

    name = "threshold"
    certifies = True
    options = frozenset({"epsilon", "block_length", "temperature", "top_p", "top_k", "eos", "cfg_scale"})

    def commit(self, state: State, cand: Candidates, draft: Draft, noise: Noise) -> Tensor:
        take = draft.confidence >= state.num["epsilon"][:, None]
        return at_least_best(take, draft.confidence, cand.valid)


class Factor(Rule):
    """As many candidates as their confidences carry: the n-th needs at least 1 - f / (n + 1).

    If the search reaches the last candidate, all are committed, that one's bound met or not (as published).
    """

    name = "factor"
    certifies = True
    options = (Threshold.options - {"epsilon"}) | {"factor"}

    def commit(self, state: State, cand: Candidates, draft: Draft, noise: Noise) -> Tensor:
        rank = rank_of(draft.confidence, cand.valid)
        bound = 1 - state.num["factor"][:, None] / (rank + 2)
        meets = (draft.confidence >= bound) | (rank == 0)
        order = best_first(draft.confidence, cand.valid)
        count = prefix_true(meets.gather(1, order) & cand.valid.gather(1, order)).sum(1)
        total = cand.valid.sum(1)
        count = torch.where(count >= total - 1, total, count)
        return (rank < count[:, None]) & cand.valid


class Quota(Rule):
    """The released code for Dream without cache: a threshold, and an even pace of tokens as the most a step.

    Step i may commit what the pace allows up to it and earlier steps did not use.
    """

    name = "quota"
    categorical = True
    options = frozenset({"epsilon", "steps", "block_length", "temperature", "top_p", "top_k", "eos"})

    def commit(self, state: State, cand: Candidates, draft: Draft, noise: Noise) -> Tensor:
        steps = (state.num["steps"] // state.blocks).clamp_min(1)
        pace = state.block_masks // steps
        left = (state.masked & in_block(state)).sum(1)
        quota = torch.minimum(state.block_step + 1, steps) * pace - (state.block_masks - left)
        take = draft.confidence >= state.num["epsilon"][:, None]
        take &= rank_of(draft.confidence, cand.valid) < quota[:, None]
        return at_least_best(take, draft.confidence, cand.valid)


def in_block(state: State) -> Tensor:
    """Positions of each slot's current block, [S, L] bool."""
    size = state.num["block_length"]
    start = state.first + state.block * size
    return state.inside & (state.order >= start[:, None]) & (state.order < (start + size)[:, None])


class BlockCache(CachePolicy):
    """Whole refresh at block boundaries; :meth:`due` and :meth:`fed` follow from the state, so they can be asked."""

    graphable = False
    sync = True
    steady = varies = asks = True
    supports_cfg = False

    def due(self, state: State) -> Tensor | None:
        return state.block_step == 0

    def fed(self, state: State) -> Tensor:
        """Positions recomputed between refreshes, [S, L] bool."""
        raise NotImplementedError

    def counts(self, state: State) -> Tensor | None:
        return self.fed(state).sum(1) if self.varies else None

    def rows(self, state: State, lanes: Lanes, cand: Candidates, kv: KVCache) -> list[Rows]:
        return [fed_rows(state, kv.base, lanes, self.fed(state))]


class PrefixCache(BlockCache):
    """Recompute the block and everything behind it."""

    name = "prefix"

    def fed(self, state: State) -> Tensor:
        start = state.first + state.block * state.num["block_length"]
        return state.inside & (state.order >= start[:, None])


class DualCache(BlockCache):
    """Recompute the block: as many rows as a block has positions, so these passes have one shape."""

    name = "dual"
    varies = False

    def fed(self, state: State) -> Tensor:
        return in_block(state)

    def rows(self, state: State, lanes: Lanes, cand: Candidates, kv: KVCache) -> list[Rows]:
        # A block has no more positions than a step may have candidates; nobody has to count them.
        return [run_rows(state, kv.base, lanes, *leftmost(self.fed(state), lanes.width))]


class AsReleased(Blocks):
    """The first public code runs a cached pass over every block, finished or not: one wasted pass a block."""

    name = "blocks-as-released"

    def _holds(self, state: State) -> Tensor:
        return state.running & (state.block_step == 1)

    def enter(self, state: State) -> Tensor:
        hold, block = self._holds(state), state.block.clone()
        step, masks = state.block_step.clone(), state.block_masks.clone()
        super().enter(state)
        for line, kept in ((state.block, block), (state.block_step, step), (state.block_masks, masks)):
            line.copy_(torch.where(hold, kept, line))
        return state.first + state.block * state.num["block_length"]

    def done(self, state: State) -> Tensor:
        return super().done(state) & (state.block_step > 0)


class DreamAsReleased(AsReleased):
    """The public code for Dream: a block's whole pass commits the block's first position, sure or not, alone.

    Its prediction is read at the position before the block, which the later passes do not recompute. The
    default (``blocks``) chooses from the whole block in every pass and adds that row as a reader.
    """

    name = "blocks-dream-as-released"

    def revise(self, state: State, cand: Candidates, take: Tensor) -> Tensor:
        start = state.first + state.block * state.num["block_length"]
        first = cand.valid & (cand.pos == start[:, None])
        return torch.where((state.block_step == 0)[:, None], first, take)
