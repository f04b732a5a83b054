"""dKV-Cache (arXiv 2505.15781): a token's keys are kept from one step after it was decoded.

``dkv-decode`` ("one-step delayed"): a token committed in step i is computed once more with its
real identity in step i + 1 and served from the cache from i + 2 on, until the next refresh (a sweep).
``dkv-greedy`` (random order only): the order of a block is drawn when the block starts, so a
step knows what it will commit; it computes those positions, the ones of the step before, and for each of the
former the ``window`` nearest masks. ``dkv-prefill``: the prompt is computed once. ``dkv-pd``: the prompt is
computed once, the answer is decoded as in ``dkv-decode``.

Clocks, as released: LLaDA counts steps inside a block and sweeps in steps 0, 1 and every multiple of
``refresh`` (the paper has no per-block restart); Dream counts over the whole answer and sweeps at multiples.
A position whose row predicts another (Dream) is cached by ``shift_type``: ``un`` when the position it
*predicts* is known (its own token may still be MASK), ``un_right`` when both are. The published third type
(``right``) leaves predictions without a row and is not offered. LLaDA has no published prefill and pd, Dream
no greedy: those are ours.

Defaults: LLaDA decode ``refresh`` 8, greedy ``refresh`` 2 and ``window`` 4 (0 in some tables), zero-shot
tasks, length 128, block 64; Dream ``refresh`` 4, ``un``: GSM8K 8-shot length 256, MBPP 3-shot and HumanEval
length 512. The released Dream runs keep the 50 most probable tokens (``top_k`` 50, transformers' default) in
what ranks candidates; here that is the request's ``top_k``, off by default.

Cost a step between refreshes, m masks, n commits a step: decode m + n rows, greedy n (2 + window), prefill N
(the answer), pd m + n; the pass reads every cached key; nothing is stored beside K and V (greedy: 4 bytes a
position).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_dllm.core.cache import KVCache
from flash_dllm.core.noise import Noise
from flash_dllm.core.rows import fed_rows
from flash_dllm.core.select import highest, most, rank_of
from flash_dllm.core.state import State
from flash_dllm.core.types import Candidates, Lanes, Rows

from . import MethodError
from .fast_dllm import BlockCache
from .llada import scheduled_count

SHIFT_TYPES = ("un", "un_right")


class DecodeCache(BlockCache):
    """Recompute what was not known two steps ago.

    Args:
        family: of the model; Dream's rows are shifted and its clock runs over the whole answer.
        refresh: sweep every so many steps; None for the paper's value (LLaDA 8, Dream 4).
        shift_type: one of :data:`SHIFT_TYPES`, for shifted models.
    """

    name = "dkv-decode"

    def __init__(self, family: str = "llada", refresh: int | None = None, shift_type: str = "un") -> None:
        self.shifted = family == "dream"
        self.refresh = (4 if self.shifted else 8) if refresh is None else refresh
        self.shift_type = shift_type
        if self.refresh < 1:
            raise MethodError(f"refresh = {refresh}: {self.name} needs at least 1")
        if shift_type not in SHIFT_TYPES:
            raise MethodError(f"unknown shift_type {shift_type!r}; known: {', '.join(SHIFT_TYPES)}")

    def due(self, state: State) -> Tensor | None:
        if self.shifted:
            return state.step % self.refresh == 0
        return (state.block_step <= 1) | (state.block_step % self.refresh == 0)

    def kept(self, state: State, step: Tensor) -> Tensor:
        """Positions that may be served after ``step`` [S], by what was known when it began, [S, L] bool."""
        known = state.committed_at < step[:, None]
        if not self.shifted:
            return known
        edge = torch.zeros_like(known[:, :1])
        left, right = torch.cat([edge, known[:, :-1]], 1), torch.cat([known[:, 1:], edge], 1)
        last = state.order == state.total[:, None] - 1
        # The last row predicts nothing; as released it goes with the first position (un) or its left one.
        if self.shift_type == "un":
            return torch.where(last, known[:, :1] & (step >= 1)[:, None], right)
        return known & torch.where(last, left, right)

    def fed(self, state: State) -> Tensor:
        return state.inside & ~self.kept(state, state.step - 1)


class PrefillCache(DecodeCache):
    """Recompute the answer, never the prompt."""

    name = "dkv-prefill"

    def __init__(self, family: str = "llada", shift_type: str = "un") -> None:
        super().__init__(family, None, shift_type)

    def due(self, state: State) -> Tensor | None:
        return None

    def fed(self, state: State) -> Tensor:
        return state.inside & ~self.kept(state, torch.zeros_like(state.step))


class PdCache(DecodeCache):
    """Decode, whose refreshes leave the prompt alone."""

    name = "dkv-pd"

    def due(self, state: State) -> Tensor | None:
        return None

    def fed(self, state: State) -> Tensor:
        since = torch.where(state.step % self.refresh == 0, 0, state.step - 1)
        return state.inside & ~self.kept(state, since)


class GreedyCache(BlockCache):
    """Recompute what is committed in this step and was in the last one, and the masks next to the former.

    Args:
        refresh: sweep every so many steps of a block.
        window: masks recomputed beside each position committed in this step.
    """

    name = "dkv-greedy"
    # A step begins with a read: whose order is to be drawn.
    steady = varies = asks = False

    def __init__(self, refresh: int = 2, window: int = 4) -> None:
        if refresh < 1 or window < 0:
            raise MethodError(f"refresh = {refresh}, window = {window}: at least 1 and 0 are needed")
        self.refresh, self.window = refresh, window
        self._turn = torch.zeros(0)

    def due(self, state: State) -> Tensor | None:
        return state.block_step % self.refresh == 0

    def begin(self, state: State, cand: Candidates, noise: Noise) -> Candidates:
        """Draw the order of the blocks that start; the candidates of the step are the next ones in it."""
        if self._turn.shape != (state.slots, state.positions + 1):
            self._turn = torch.zeros((state.slots, state.positions + 1), device=state.device)
        starts = state.block_step == 0
        if bool((starts & state.running).any()):
            key = noise.per_position(cand.pos, cand.valid)
            where = torch.where(cand.valid & starts[:, None], cand.pos, state.positions)
            self._turn.scatter_(1, where, key)
        rank = rank_of(self._turn.gather(1, cand.pos), cand.valid)
        return Candidates(cand.pos, cand.valid & (rank < scheduled_count(state)[:, None]))

    def rows(self, state: State, lanes: Lanes, cand: Candidates, kv: KVCache) -> list[Rows]:
        now = _mark(torch.zeros_like(self._turn, dtype=torch.bool), cand.pos, cand.valid)[:, :-1]
        flags = now | (state.committed_at == state.step[:, None] - 1)
        pos, valid = highest(self._turn[:, :-1], now, most(cand.valid))
        for index in range(pos.shape[1]):
            centre, real = pos[:, index : index + 1], valid[:, index : index + 1]
            # Nearest masks first, the left one of two that are equally far.
            away = -(2 * (state.order - centre).abs() + (state.order > centre)).float()
            near = highest(away, state.masked & ~flags & real, self.window)
            flags = _mark(torch.nn.functional.pad(flags, (0, 1)), *near)[:, :-1]
        return [fed_rows(state, kv.base, lanes, flags)]


def _mark(grid: Tensor, pos: Tensor, take: Tensor) -> Tensor:
    """``grid`` [S, L + 1] bool with True at ``pos`` where ``take``; the spare column takes the rest."""
    return grid.scatter(1, torch.where(take, pos, grid.shape[1] - 1), True)
