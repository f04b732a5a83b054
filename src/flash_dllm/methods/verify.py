"""Flash-Verify (Flash-dLLM, arXiv 2609.26796, section 3.3, Eq. 3 to 5): the model checks its own drafts.

After the commits by confidence (>= epsilon), the ``search`` most confident drafts are tested in a second, small
pass that reads the cache and writes nothing. It holds tracked context, the search positions filled with their drafts
(draft views) and the same positions as MASK (mask views); the mask view of the k-th draft judges it.

Views (docs/verify.md): ``paper`` as published, in which a mask view sees its own draft through the later mask rows
from the second layer on; ``leak-free``, whose masks see the originals of later positions instead of each other;
``branch``, a copy of the whole window for each draft.
Rules: ``product`` (released code, default): running product of the mask view's probabilities of the drafts >= gamma;
``paper`` (Eq. 5): the mask view's argmax is the draft and its probability >= gamma. Both stop at the first failure.

Defaults: search 8, verify_rows 32, gamma 0.8 (0.85 for MATH and HumanEval), LLaDA and Dream alike.
Cost a step and slot: a second pass of at most ``verify_rows`` rows (``branch``: search x window); over a cache that
keeps nothing, the whole canvas beside the views.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from flash_dllm.core.constants import upto, where
from flash_dllm.core.forward import Context
from flash_dllm.core.method import CachePolicy, Rule, Search, Second, prefix_true
from flash_dllm.core.select import best_first
from flash_dllm.core.state import State
from flash_dllm.core.step import TwoPass
from flash_dllm.core.types import NEVER, Candidates, Draft, Lanes, Plan, Rows
from flash_dllm.core.views import Columns, ViewBuilder, branch_rows
from flash_dllm.core.visibility import canvas_view, set_interval, set_scratch

from .fast_dllm import Threshold

VIEWS = ("paper", "leak-free", "branch")


def accept_prefix(state: State, search: Search, second: Second) -> Tensor:
    """Drafts accepted by each slot's rule, [S, K] bool: a prefix of the search order.

    ``num["rule"]`` is 0 for the product rule and 1 for the paper's.
    """
    gamma = state.num["gamma"][:, None]
    product = where(search.valid, second.prob_draft, 0.0).cumprod(1) >= gamma
    agrees = (second.token == search.token) & (second.prob_draft >= gamma)
    paper = prefix_true(agrees)
    return torch.where(state.num["rule"][:, None] == 1, paper, product) & search.valid


def most_confident(state: State, cand: Candidates, draft: Draft, taken: Tensor, n: int) -> Search:
    """The ``n`` most confident candidates that are still wanted, best first."""
    # Those that were not taken are still masked.
    open_ = cand.valid & ~taken & (cand.pos < state.limit[:, None])
    order = best_first(draft.confidence, open_)
    best = order[:, :n]
    return widened(Search(cand.pos.gather(1, best), draft.token.gather(1, best), open_.gather(1, best)), n)


def widened(search: Search, n: int) -> Search:
    """``search`` with ``n`` entries: a short canvas or block has fewer positions."""
    short = n - search.pos.shape[1]
    if short <= 0:
        return search
    return Search(*(pad(t, (0, short)) for t in (search.pos, search.token, search.valid)))


class FlashVerify(TwoPass):
    """Two passes a step.

    Args:
        search: most drafts tested in a step.
        verify_rows: rows of the second pass (``paper`` and ``leak-free`` views).
        views: see the module.
        window: candidates of a step, which is what ``branch`` copies.
    """

    name = "verify"
    defaults: ClassVar[dict[str, float]] = {"gamma": 0.8}
    options = Threshold.options - {"temperature", "top_p", "top_k", "cfg_scale"} | {"gamma", "rule"}

    def __init__(self, search: int, verify_rows: int, views: str, window: int) -> None:
        if views not in VIEWS:
            raise ValueError(f"views={views!r} is not known; one of {', '.join(VIEWS)}")
        if not 1 <= search <= window:
            raise ValueError(f"search={search}: from 1 to the window's size {window}")
        if views != "branch" and verify_rows < 2 * search:
            raise ValueError(
                f"verify_rows={verify_rows}: the views of search={search} drafts take {2 * search} rows"
            )
        self.search, self.verify_rows, self.views, self.window = search, verify_rows, views, window
        self.certifies = views != "paper"

    def slot_tensors(self) -> tuple[Tensor, ...]:
        return ()

    def scratch(self) -> int:
        if self.views == "branch":
            return self.search * self.window
        return 2 * self.search + self.verify_rows - 2

    def room(self, width: int) -> int:
        return self.search * width if self.views == "branch" else self.scratch()

    def accept(self, state: State, search: Search, second: Second) -> Tensor:
        return accept_prefix(state, search, second)

    def expand(
        self,
        state: State,
        lanes: Lanes,
        cand: Candidates,
        draft: Draft,
        taken: Tensor,
        policy: CachePolicy,
        ctx: Context,
    ) -> tuple[Search, Plan]:
        search = most_confident(state, cand, draft, taken, self.search)
        view = canvas_view(state, ctx.kv.base, ctx.kv.places)
        n_keys = ctx.kv.base + max(lanes.total[s] for s in lanes.live)
        builder = ViewBuilder(state, lanes, ctx, search, view, n_keys)
        if self.views == "branch":
            return search, branch_plan(builder, policy, cand)
        return search, self._views(builder, policy)

    def _views(self, b: ViewBuilder, policy: CachePolicy) -> Plan:
        """Context, draft views, mask views; and readers where the model is shifted."""
        search, paper = b.search, self.views == "paper"
        order = upto(self.search + 2, search.pos, torch.int32)
        k, above, next_ = order[:-2], order[1:-1], order[2:]
        # Ranks count drafts from 1: mask view k (from 0) has rank k + 1 and sees drafts before it.
        set_interval(b.view, b.place(search.pos), 0, 0 if paper else above, search.valid)
        masks = set_scratch(b.view, 1 + self.search, 0 if paper else above, next_, search.valid)
        # Nobody reads the last draft: mask view k sees drafts before k only. So each needs the next one.
        needed = search.valid[:, 1:]
        drafts = set_scratch(b.view, 1, next_[:-1], NEVER, needed)
        parts = [
            self._context(b, policy),
            b.columns(search.pos[:, :-1], needed, token=search.token[:, :-1], place=drafts, rank=next_[:-1]),
            b.columns(search.pos, search.valid, token=b.mask_like(search.pos), place=masks, rank=above),
        ]
        return b.packed(parts, above, k, self.verify_rows if policy.keeps else None)

    def _context(self, b: ViewBuilder, policy: CachePolicy) -> Columns:
        state, search, paper = b.state, b.search, self.views == "paper"
        if not policy.keeps:
            tested = b.flags(search.pos, search.valid if paper else torch.zeros_like(search.valid))
            return b.columns(*policy.context(state, b.lanes, tested, 0))
        pos, valid = policy.context(state, b.lanes, None, self.verify_rows - 2)
        # n drafts take n rows as masks and n - 1 as drafts.
        left = self.verify_rows + 1 - 2 * search.valid.sum(1, keepdim=True)
        valid = valid & (upto(pos.shape[1], pos) < left)
        if not paper:
            valid = valid & (state.committed_at.gather(1, pos) == state.step[:, None])
        set_interval(b.view, b.place(pos), 0, 0, valid)
        return b.columns(pos, valid, place=set_scratch(b.view, 1 + 2 * self.search, 0, NEVER, valid))


def branch_plan(b: ViewBuilder, policy: CachePolicy, cand: Candidates) -> Plan:
    """Two-pass form: branches r = 0 .. K-1; branch r judges draft r + 1."""
    count = b.search.pos.shape[1]
    # The window's copies hold what the canvas holds now, the commits of this step included.
    rows, _, rank, filled = branch_rows(b, cand, 0, count)
    parts = [rows]
    if not policy.keeps:
        pos, valid = policy.context(b.state, b.lanes, torch.zeros_like(b.state.masked), 0)
        parts = [b.rows(pos, valid), *parts]
    if b.ctx.model.config.shift:
        return b.finish(parts, rank, filled)
    joined = Rows.concat(parts)
    column = (cand.pos[:, None] == b.search.pos[..., None]).long().argmax(-1)
    own = upto(count, column) * cand.pos.shape[1] + column
    start = b.reads(len(joined) - len(parts[-1]), count * cand.pos.shape[1])[:, :1]
    return Plan(joined, b.view, start + own)


def verify(
    search: int = 8, verify_rows: int = 32, views: str = "paper", window: int = 16
) -> tuple[Rule, FlashVerify]:
    """``decoding="verify"``."""
    return Threshold(), FlashVerify(search, verify_rows, views, window)
