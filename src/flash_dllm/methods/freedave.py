"""FreeDave (arXiv 2510.00294): drafts of one pass are checked by the next, without loss.

A block starts with one whole pass, whose predictions are the first proposals. Then each pass holds K copies
of what the cache policy would recompute: branch k has the k + 1 most confident proposals filled in, so
branch 0 is what one-token decoding would do next. The target of a branch is itself and its own next token.
From branch 0 the walk goes to the furthest later branch whose every token the target of the branch it
stands on holds, as long as there is one. The branch where it ends is committed and its predictions are the
next proposals: every pass commits something, and the answer is that of ``greedy`` one token a step over the
same cache. A block's last mask needs no pass.

With ``epsilon`` (FreeDave++) branch 0 has all proposals that reach it and a target all that its branch
predicts with that confidence, at least the best one: as ``threshold`` decodes, not lossless in general.
Where a token was committed that the proposals have not seen (the first of a block under the schedule
``blocks-dream-as-released``), the next pass has the canvas itself as branch 0, as published.

The code's two forms, a batch of branches and a tree, are one thing here (ranks, core/visibility.py); its
options ``early_exit`` and eager acceptance (drafts in later blocks; off for LLaDA and Dream) are not built.
We know of no difference between paper and code.

Defaults, every task: draft_steps 4 (LLaDA), 8 (Dream); block 32; static; cache ``dual``; FreeDave++ with
epsilon 0.95.

Cost a step and slot: K times the rows of the cache policy (K x 32 over ``dual``, K x (T - start) over
``prefix``), and T rows at a block's start. Bytes: as many scratch places in every layer, made when a pass
first needs them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_dllm.core.forward import Context
from flash_dllm.core.method import Rule, Search, Second, at_least_best
from flash_dllm.core.noise import Noise
from flash_dllm.core.rows import predictor, row_map, sweep_rows
from flash_dllm.core.select import rank_of
from flash_dllm.core.state import State
from flash_dllm.core.step import Folded, Vocabulary
from flash_dllm.core.tree import Tree, recomputed
from flash_dllm.core.types import NEVER, Candidates, Draft, Lanes, Plan, Rows
from flash_dllm.core.visibility import canvas_view, set_interval
from flash_dllm.kernels.head_confidence import HeadOut

DRAFT_STEPS = {"llada": 4, "dream": 8}
UNREACHED = 2.0
"""An ``epsilon`` that no confidence reaches: one token at a time."""


class FreeDave(Folded):
    """The branches ride in the cache policy's pass and replace its rows.

    Args:
        draft_steps: branches of a pass (K); None for the family's default.
    """

    name = "freedave"
    options = frozenset({"epsilon", "block_length", "eos"})

    def __init__(self, draft_steps: int | None) -> None:
        if draft_steps is not None and draft_steps < 1:
            raise ValueError(f"draft_steps={draft_steps}: at least 1")
        self.draft_steps = draft_steps or 0

    def bind(self, ctx: Context, state: State) -> None:
        """Enter an engine."""
        self.draft_steps = self.draft_steps or DRAFT_STEPS[ctx.model.config.family]
        self.unseen = torch.zeros(state.slots, dtype=torch.bool, device=state.device)

    def entries(self, search: Search) -> int:
        return min(self.draft_steps, search.pos.shape[1]) + 1

    def branches(self, state: State, search: Search) -> tuple[Tensor, Tensor]:
        """Drafts that each branch fills in, [S, K, C] bool, and which branches there are, [S, K] bool."""
        prob = state.draft_prob.gather(1, search.pos)
        rank = rank_of(prob, search.valid)
        sure = (search.valid & (prob >= state.num["epsilon"][:, None])).sum(1).clamp_min(1)
        index = torch.arange(self.entries(search) - 1, device=state.device)
        count = torch.where(self.unseen, 0, sure)[:, None] + index
        masks = search.valid.sum(1, keepdim=True)
        exists = (index < masks) & (count <= masks)
        filled = search.valid[:, None] & (rank[:, None] < count[..., None]) & exists[..., None]
        return filled, exists

    def fold(
        self, state: State, lanes: Lanes, cand: Candidates, plan: Plan, ctx: Context
    ) -> tuple[Search, Plan]:
        running = torch.zeros_like(cand.valid[:, :1])
        running[lanes.run] = True
        search = Search(cand.pos, state.draft_token.gather(1, cand.pos), cand.valid & running)
        fed = recomputed(state, plan.rows, ctx.kv.base) & running
        filled, exists = self.branches(state, search)
        tree = Tree.grow(state, ctx, search, filled, exists, fed)
        shift = ctx.model.config.shift
        parts = sweep_rows(state, ctx.kv.base, lanes.sweep, lanes) if lanes.sweep else []
        swept = sum(len(part) for part in parts)
        if lanes.run:
            parts += tree.rows(lanes, shift)
        rows = Rows.concat(parts)
        at = predictor(cand.pos, shift)
        swept_at = row_map(state, rows).gather(1, at)[:, None]
        reads = torch.cat([swept_at, tree.reads(lanes, at, swept, shift)], 1)
        view = canvas_view(state, ctx.kv.base, ctx.kv.places)
        set_interval(view, state.order + ctx.kv.base, 0, 0, fed)
        set_interval(view, tree.place, tree.rank, tree.rank + 1, tree.valid)
        return search, Plan(rows, view, reads.flatten(1).clamp_min(0))

    def settle(
        self, state: State, search: Search, cand: Candidates, seen: HeadOut
    ) -> tuple[Tensor, Draft, Second]:
        filled, exists = self.branches(state, search)
        token, prob = seen.token[:, 1:], seen.prob[:, 1:]
        stops = (search.token[..., None] == state.stop_ids[:, None]).any(-1)
        stops &= state.num["stop_at_eos"][:, None]
        # A branch that holds a stop token decodes nothing behind it, as if it had been committed.
        end = torch.where(filled & stops[:, None], search.pos[:, None], NEVER).amin(-1, keepdim=True)
        open_ = search.valid[:, None] & ~filled & (search.pos[:, None] < end)
        sure = prob >= state.num["epsilon"][:, None, None]
        next_ = at_least_best(*(t.flatten(0, 1) for t in (sure, prob, open_))).view_as(open_)
        agrees = filled | (next_ & (token == search.token[:, None]))
        fits = (agrees[:, :, None] | ~filled[:, None]).all(-1) & exists[:, None]
        best = furthest(fits)
        accepted = filled[torch.arange(state.slots, device=state.device), best]
        entry = torch.where(search.valid.any(1), best + 1, 0)[:, None, None].expand(-1, 1, cand.pos.shape[1])
        draft = Draft(*(t.gather(1, entry)[:, 0] for t in (seen.token, seen.prob, seen.measure)))
        return accepted, draft, Second(draft.token, draft.prob, state.draft_prob.gather(1, search.pos))

    def confirms(self, state: State, draft: Draft, accepted: Tensor) -> Tensor:
        return torch.ones_like(draft.token, dtype=torch.bool)

    def remember(self, state: State, cand: Candidates, draft: Draft, taken: Tensor) -> None:
        spots = state.spots(cand.pos, cand.valid & ~taken)
        state.write("draft_token", spots, draft.token)
        state.write("draft_prob", spots, draft.prob)
        self.unseen.copy_(taken.any(1))


def furthest(fits: Tensor) -> Tensor:
    """Where the walk over the branches ends, [S] int64.

    Args:
        fits: [S, K, K] bool, entry [b, j]: the target of branch b holds every token of branch j.
    """
    index = torch.arange(fits.shape[1], device=fits.device)
    best = torch.zeros(fits.shape[0], dtype=torch.int64, device=fits.device)
    for _ in range(fits.shape[1] - 1):
        here = fits.gather(1, best[:, None, None].expand(-1, 1, fits.shape[2]))[:, 0]
        best = torch.maximum(best, torch.where(here, index, 0).amax(1))
    return best


class LastMask(Rule):
    """Commits the only candidate that is left: nothing is there to check it against."""

    name = "freedave"
    options = FreeDave.options
    defaults = {"epsilon": UNREACHED}  # noqa: RUF012
    sync = True

    def __init__(self, verifier: FreeDave) -> None:
        self.verifier = verifier

    def bind(self, ctx: Context, state: State, vocabulary: Vocabulary) -> None:
        self.verifier.bind(ctx, state)

    def commit(self, state: State, cand: Candidates, draft: Draft, noise: Noise) -> Tensor:
        return cand.valid & (cand.valid.sum(1, keepdim=True) == 1)


def freedave(draft_steps: int | None = None) -> tuple[Rule, FreeDave]:
    """``decoding="freedave"``."""
    verifier = FreeDave(draft_steps)
    return LastMask(verifier), verifier
