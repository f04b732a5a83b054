"""Folded branch decoding (ours): the drafts of the last step are tested inside this step's denoise pass.

The pass holds the rows of the cache policy and, for r = 1 .. K, a copy of the window with the first r drafts filled
and MASK elsewhere; copy r sees the canvas outside the window and itself. Branch k - 1 judges draft k (branch 0 is
the canvas). After a accepted drafts, branch a is read for everything else: its window positions with confidence >=
epsilon are committed too, since they have seen the accepted tokens, and its argmax at the rest are the next drafts.
So a step is one pass, and no commit of a step conflicts with another. See docs/verify.md.

Defaults: epsilon 0.9, gamma 0.6, K (``branches``) 4 where one slot is decoded at a time and 2 above that.
Cost a step and slot: the policy's rows and K x window more (a shifted model: twice that, for the readers).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from flash_dllm.core.forward import Context
from flash_dllm.core.method import Rule, Search, Second
from flash_dllm.core.rows import predictor
from flash_dllm.core.select import highest
from flash_dllm.core.state import State
from flash_dllm.core.step import Folded
from flash_dllm.core.types import Candidates, Draft, Lanes, Plan, Rows
from flash_dllm.core.views import ViewBuilder, branch_rows
from flash_dllm.kernels.head_confidence import HeadOut

from .fast_dllm import Threshold
from .verify import FlashVerify, accept_prefix, widened


class BranchDecoding(Folded):
    """One pass a step.

    Args:
        branches: most drafts tested in a step (K).
        window: candidates of a step, which each branch copies.
    """

    name = "branch"
    certifies = True
    defaults: ClassVar[dict[str, float]] = {"gamma": 0.6}
    options = FlashVerify.options

    def __init__(self, branches: int, window: int) -> None:
        if not 1 <= branches <= window:
            raise ValueError(f"branches={branches}: from 1 to the window's size {window}")
        self.branches, self.window = branches, window

    def slot_tensors(self) -> tuple[Tensor, ...]:
        return ()

    def scratch(self) -> int:
        return self.branches * self.window

    def fold(
        self, state: State, lanes: Lanes, cand: Candidates, plan: Plan, ctx: Context
    ) -> tuple[Search, Plan]:
        prob = state.draft_prob.gather(1, cand.pos)
        best, valid = highest(prob, (prob > 0) & cand.valid, self.branches)
        pos = cand.pos.gather(1, best) * valid
        search = widened(Search(pos, state.draft_token.gather(1, pos), valid), self.branches)
        n_keys = ctx.kv.base + max(lanes.total[s] for s in lanes.live)
        b = ViewBuilder(state, lanes, ctx, search, plan.view, n_keys)
        rows, token, rank, _ = branch_rows(b, cand, 1, self.branches)
        width = self.branches * cand.pos.shape[1]
        parts = [plan.rows, rows]
        if ctx.model.config.shift:
            parts.append(self._readers(b, cand, token, rank))
        joined = Rows.concat(parts)
        reads = torch.cat([plan.reads, b.reads(len(joined) - len(parts[-1]), width)], 1)
        return search, Plan(joined, plan.view, reads, plan.score_rows)

    def _readers(self, b: ViewBuilder, cand: Candidates, token: Tensor, rank: Tensor) -> Rows:
        """Rows at position j - 1 of every branch, with the token that the branch holds there."""
        state, count = b.state, self.branches
        at = predictor(cand.pos, True)
        hit = (at[..., None] == cand.pos[:, None]) & cand.valid[:, None]
        inside = (hit[:, None] * token[:, :, None]).sum(-1)
        here = torch.where(hit.any(-1)[:, None], inside, state.ids.gather(1, at)[:, None])
        valid = b.search.valid[..., None] & cand.valid[:, None]
        pos = at[:, None].expand(here.shape).flatten(1)
        ranks = rank[:, None].expand(count, at.shape[1]).reshape(-1)
        return b.rows(pos, valid.flatten(1), token=here.flatten(1), place=b.trash_like(pos), rank=ranks)

    def settle(
        self, state: State, search: Search, cand: Candidates, seen: HeadOut
    ) -> tuple[Tensor, Draft, Second]:
        assert seen.prob_wanted is not None
        column = (cand.pos[:, None] == search.pos[..., None]).long().argmax(-1)
        k = self.branches

        def judged(values: Tensor) -> Tensor:
            return values[:, :k].gather(2, column[..., None])[..., 0]

        second = Second(judged(seen.token), judged(seen.prob), judged(seen.prob_wanted))
        accepted = accept_prefix(state, search, second)
        count = accepted.sum(1)
        pick = count[:, None, None].expand(-1, 1, cand.pos.shape[1])
        draft = Draft(*(t.gather(1, pick)[:, 0] for t in (seen.token, seen.prob, seen.measure)))
        return accepted, draft, second

    def confirms(self, state: State, draft: Draft, accepted: Tensor) -> Tensor:
        sure = draft.confidence >= state.num["epsilon"][:, None]
        return sure | ~accepted[:, :1]

    def remember(self, state: State, cand: Candidates, draft: Draft, taken: Tensor) -> None:
        state.draft_prob.masked_fill_(state.running[:, None], 0.0)
        spots = state.spots(cand.pos, cand.valid & ~taken)
        state.write("draft_token", spots, draft.token)
        state.write("draft_prob", spots, draft.prob)


def branch(branches: int = 4, window: int = 16) -> tuple[Rule, BranchDecoding]:
    """``decoding="branch"``."""
    return Threshold(), BranchDecoding(branches, window)
