"""The released code of Flash-dLLM, quirks included (VILA-Lab/Flash-dLLM, commit 7437a55): ``preset="reference"``.

What it does beside the paper (arXiv 2609.26796) and our ``flash`` + ``verify``:

- Key lengths are multiples of 128: rows past the answer hold EOS, are computed in the first pass and attended by
  everything. Until an EOS is committed they enter the window like masks and may be committed.
- The first group of commits that holds an EOS sets the length to its *last* EOS, once. Candidates past it get
  confidence 0 but keep their place in the window.
- Scores come from the third layer on; only the tokens of the last group of commits are pinned, so with
  verification on the confident ones compete by the score they got as masks.
- The verify pass always has 2 x 16 rows: S drafts, S masks and the last 32 - 2 S entries of the decoded list as it
  was ordered before this step; with nothing to verify it runs all the same.

The window is a list there (leftovers, then new positions ascending); as a set it is the 16 leftmost undecoded.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from flash_dllm.core.cache import KVCache
from flash_dllm.core.forward import Context
from flash_dllm.core.method import CachePolicy, Method, Rule, Schedule, Search, Second, at_least_best
from flash_dllm.core.noise import Noise
from flash_dllm.core.rows import rectangle, with_readers
from flash_dllm.core.select import best_first, highest, leftmost
from flash_dllm.core.state import Canvas, State
from flash_dllm.core.step import StepRecord, TwoPass
from flash_dllm.core.types import NEVER, Candidates, Draft, Lanes, Plan, Rows, View
from flash_dllm.core.views import ViewBuilder
from flash_dllm.core.visibility import canvas_view, set_interval

from .flash import PINNED, THIS_STEP, FlashCache

TILE = 128


class Progress:
    """Where each slot's answer ends, as the released code follows it: ``end`` [S] int64, ``known`` [S] bool."""

    def __init__(self, eos_id: int) -> None:
        self.eos_id = eos_id
        self.end = self.known = self.live = torch.empty(0)

    def begin(self, state: State) -> None:
        """Slots in their first step have no EOS yet."""
        if len(self.end) != state.slots:
            self.end = torch.zeros(state.slots, dtype=torch.int64, device=state.device)
            self.known = torch.zeros(state.slots, dtype=torch.bool, device=state.device)
        new = state.running & (state.step == 0)
        self.end = torch.where(new, state.total - state.num["pad"], self.end)
        self.known = self.known & ~new

    def past(self, pos: Tensor) -> Tensor:
        """Positions behind a known end, [S, C] bool."""
        return self.known[:, None] & (pos >= self.end[:, None])

    def group(self, pos: Tensor, token: Tensor, take: Tensor) -> None:
        """A group of commits, [S, C]: the first that holds an EOS sets the end."""
        last = torch.where(take & (token == self.eos_id), pos, -1).amax(1)
        found = (last >= 0) & ~self.known
        self.end = torch.where(found, last + 1, self.end)
        self.known = self.known | found


class ReferenceWindow(Schedule):
    """The leftmost undecoded positions, EOS padding included."""

    name = "window"

    def __init__(self, size: int, progress: Progress) -> None:
        self.size, self.progress = size, progress

    def width(self, lengths: list[int], blocks: list[int]) -> int:
        return self.size

    def candidates(self, state: State, width: int) -> Candidates:
        self.progress.begin(state)
        return Candidates(*leftmost(state.masked, width))

    def done(self, state: State) -> Tensor:
        return ~(state.masked & (state.order < self.progress.end[:, None])).any(1)


class ReferenceRule(Rule):
    """Confidence >= epsilon, else the best; nothing past the known end."""

    name = "threshold"
    options = frozenset({"epsilon"})

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def commit(self, state: State, cand: Candidates, draft: Draft, noise: Noise) -> Tensor:
        progress = self.progress
        progress.live = (cand.valid & (cand.pos < progress.end[:, None])).sum(1)
        key = draft.confidence.masked_fill(progress.past(cand.pos), 0.0)
        draft.confidence = key
        take = at_least_best(key >= state.num["epsilon"][:, None], key, cand.valid)
        progress.group(cand.pos, draft.token, take)
        return take


class ReferenceCache(FlashCache):
    """Flash-Cache over key lengths that are multiples of 128.

    Args:
        window: candidates (the code's ``block_length``); ``track`` and ``lookahead`` are multiples of it there.
    """

    name = "flash-reference"
    supports_cfg = False

    def __init__(self, window: int, lookahead: int, track: int, eos_id: int) -> None:
        super().__init__(lookahead, track, score_layers="from-third")
        # Its key lengths are kept on the host.
        self.steady = False
        self.eos_id, self.window = eos_id, window
        self._keys: dict[int, int] = {}
        self.listed: Tensor | None = None

    def positions(self, longest: int) -> int:
        return ((longest + self.window) // TILE + 1) * TILE

    def prepare(self, canvas: Canvas, positions: int) -> Canvas:
        pad = positions - len(canvas.ids)
        return Canvas(
            canvas.ids + [self.eos_id] * pad,
            canvas.masked + [True] * pad,
            canvas.stop_ids,
            {**canvas.numbers, "pad": pad, "stop_at_eos": False},
        )

    def seat(self, slot: int, canvas: Canvas) -> None:
        end = len(canvas.ids) - int(canvas.numbers["pad"])
        self._keys[slot] = min(end // TILE * TILE + TILE, len(canvas.ids))
        if self.listed is not None:
            self.listed[slot] = self._positions

    def key_lengths(self, state: State) -> Tensor:
        """Keys attended in each slot, [S] int64."""
        lengths = [self._keys.get(s, 0) for s in range(state.slots)]
        return torch.tensor(lengths, device=state.device)

    def view(self, state: State, kv: KVCache) -> View:
        view = canvas_view(state, kv.base, kv.places)
        outside = state.order >= self.key_lengths(state)[:, None]
        view.hi[:, kv.base : kv.base + state.positions].masked_fill_(outside, 0)
        return view

    def plan(self, state: State, lanes: Lanes, cand: Candidates, ctx: Context) -> Plan:
        if self.listed is None:
            # The decoded list starts as the prompt in order of position.
            self._positions = state.order.float()
            self.listed = self._positions.expand(state.slots, -1).clone()
        base, parts = ctx.kv.base, []
        lengths = self.key_lengths(state)[:, None]
        if lanes.sweep:
            slots = tuple(lanes.sweep)
            longest = max(self._keys[s] for s in slots)
            pos = state.order[:longest].expand(state.slots, -1)
            parts.append(rectangle(state, base, slots, base + longest, pos, pos < lengths))
            beyond = cand.valid & (cand.pos >= lengths)
            parts.append(rectangle(state, base, slots, base + longest, cand.pos, beyond))
        if lanes.run:
            parts += self.rows(state, lanes, cand, ctx.kv)
        rows, reads = with_readers(state, base, Rows.concat(parts), cand, lanes, ctx.model.config.shift)
        return Plan(rows, self.view(state, ctx.kv), reads, cand.valid)

    def rows(self, state: State, lanes: Lanes, cand: Candidates, kv: KVCache) -> list[Rows]:
        slots = tuple(lanes.run)
        n_keys = kv.base + max(self._keys[s] for s in slots)
        behind = state.masked & (state.order > cand.pos.amax(1, keepdim=True))
        behind &= state.order < self.key_lengths(state)[:, None]
        ahead = leftmost(behind, self.lookahead)
        parts = [(cand.pos, cand.valid), ahead, self.tracked(state)]
        pos, valid = (torch.cat(columns, 1) for columns in zip(*parts, strict=True))
        return [rectangle(state, kv.base, slots, n_keys, pos, valid)]

    def key(self, state: State) -> Tensor:
        assert self.listed is not None
        return self.listed

    def observe(self, state: State, lanes: Lanes, record: StepRecord) -> None:
        assert self.listed is not None
        inside = state.order < self.key_lengths(state)[:, None]
        state.score.copy_(torch.where(inside, state.score, 0.0))
        key = state.score.clone()
        if record.search is None:
            pinned, flags = record.cand.pos, record.take
        else:
            assert record.accepted is not None
            pinned, flags = record.search.pos, record.accepted
        spare = torch.cat([key, key[:, :1]], 1)
        spare.scatter_(1, torch.where(flags, pinned, state.positions), PINNED)
        self.listed = torch.where(state.running[:, None], spare[:, :-1], self.listed)


class ReferenceVerify(TwoPass):
    """The verify pass of the released code: always 2 x window rows."""

    name = "verify"
    defaults: ClassVar[dict[str, float]] = {"gamma": 0.8}
    options = frozenset({"gamma"})

    def __init__(self, window: int, progress: Progress, cache: ReferenceCache) -> None:
        self.window, self.progress, self.cache = window, progress, cache
        self.search = window // 2

    def scratch(self) -> int:
        return 4 * self.window

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
        search = self._search(state, cand, draft, taken)
        view = self.cache.view(state, ctx.kv)
        b = ViewBuilder(
            state, lanes, ctx, search, view, ctx.kv.base + max(self.cache._keys[s] for s in lanes.live)
        )
        k = torch.arange(self.search, device=state.device, dtype=torch.int32)
        wide = torch.arange(2 * self.window, device=state.device).expand(state.slots, -1)
        drafts, masks = 1 + wide[:, : self.search], 1 + self.search + wide[:, : self.search]
        places = 1 + 2 * self.search + wide
        now = state.committed_at == state.step[:, None]
        key = torch.where(now, THIS_STEP, self.cache.key(state))
        pos, valid = highest(key, state.known, 2 * self.window)
        valid = valid & (wide < (2 * self.window - 2 * search.valid.sum(1))[:, None])
        set_interval(view, b.place(pos), 0, 0, valid)
        set_interval(view, b.place(search.pos), 0, 0, search.valid)
        set_interval(view, places, 0, NEVER, valid)
        set_interval(view, drafts, k + 2, NEVER, search.valid)
        set_interval(view, masks, 0, k + 2, search.valid)
        slots = tuple(lanes.live)

        def rows(at: Tensor, flags: Tensor, place: Tensor, rank: Tensor | int, token: Tensor | None) -> Rows:
            return rectangle(
                state, ctx.kv.base, slots, b.n_keys, at, flags, token=token, place=place, rank=rank
            )

        parts = [
            rows(pos, valid, places, 0, None),
            rows(search.pos, search.valid, drafts, k + 2, search.token),
            rows(search.pos, search.valid, masks, k + 1, None),
        ]
        return search, b.finish(parts, ranks=k + 1, drafts_seen=k)

    def _search(self, state: State, cand: Candidates, draft: Draft, taken: Tensor) -> Search:
        """The next most confident candidates: half a window at most, and no more than are live."""
        order = best_first(draft.confidence, cand.valid & ~taken)
        best = order[:, : self.search]
        count = (self.progress.live - taken.sum(1)).clamp_min(0)
        valid = torch.arange(self.search, device=state.device) < count[:, None]
        return Search(cand.pos.gather(1, best), draft.token.gather(1, best), valid)

    def accept(self, state: State, search: Search, second: Second) -> Tensor:
        prob = second.prob_draft.masked_fill(self.progress.past(search.pos) | ~search.valid, 0.0)
        take = (prob.cumprod(1) >= state.num["gamma"][:, None]) & search.valid
        self.progress.group(search.pos, search.token, take)
        return take


def reference(
    eos_id: int, *, verify: bool = True, window: int = 16, track_num: int = 4, mask_num: int = 4
) -> Method:
    """The released code's method.

    Args:
        eos_id: what fills the rows past the answer.
        verify: Flash-Verify on.
        window: ``block_length`` of the code.
        track_num, mask_num: tracked rows, and window plus look-ahead rows, in units of ``window``; ``track_num``
            below 0 recomputes everything.
    """
    progress = Progress(eos_id)
    track = track_num * window if track_num >= 0 else -1
    cache = ReferenceCache(window, (mask_num - 1) * window, track, eos_id)
    rule = ReferenceRule(progress)
    verifier = ReferenceVerify(window, progress, cache) if verify else None
    options = rule.options | (verifier.options if verifier else frozenset())
    return Method(cache, ReferenceWindow(window, progress), rule, verifier, options)
