"""Flash-Cache (Flash-dLLM, arXiv 2609.26796, section 3.2, Eq. 1 and 2).

After a first pass over the whole canvas, each step recomputes a fixed number of rows a slot: the ``window``
candidates, the next ``lookahead`` masked positions, and ``track`` committed positions: fresh commits first, then
those with the highest attention score. Every row attends to all keys of its canvas and overwrites its own.

Defaults (paper, Table 3): window 16, look-ahead 48, track 64 (48 for MBPP), LLaDA and Dream alike.
Cost a step and slot: window + lookahead + track rows (128), their K and V written, the slot's K and V read once.
Guarantee: none after the first pass; ``track = -1`` recomputes everything and equals no cache.

What the paper leaves open are options. ``track_by``: attention (paper), recent, random or none (fresh commits only).
``score_layers``: all (Eq. 2) or from-third (released code). ``pin``: all (paper) or verified (released code: with a
verifier only its tokens are pinned; the others keep the K and V of MASK until they rank).
``refresh_every`` = n sweeps every n steps; ``refresh_on_drift`` = d sweeps once the mean confidence of the candidates
that stay uncommitted has fallen by more than d in a step (a stale context makes the model less sure).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_dllm.core.cache import KVCache
from flash_dllm.core.constants import constant
from flash_dllm.core.forward import Context
from flash_dllm.core.method import CachePolicy, PassOut
from flash_dllm.core.noise import counter_uniform
from flash_dllm.core.rows import run_rows
from flash_dllm.core.select import highest, leftmost
from flash_dllm.core.state import State
from flash_dllm.core.step import StepRecord
from flash_dllm.core.types import Candidates, Lanes, Plan, Rows

PINNED = 1e30
THIS_STEP = 2e30
TRACK_BY = ("attention", "recent", "random", "none")


class FlashCache(CachePolicy):
    """A masked window and a budget of tracked tokens recomputed in every step.

    Args:
        lookahead: masked positions behind the window that get fresh keys, but are not candidates.
        track: committed positions recomputed a step; -1 recomputes everything.
        track_by, score_layers, pin, refresh_every, refresh_on_drift: see the module.

    Raises:
        ValueError: an option out of range; the message names it.
    """

    name = "flash"
    # What is wanted is the beginning of what is masked.
    leads = True

    def __init__(
        self,
        lookahead: int = 48,
        track: int = 64,
        track_by: str = "attention",
        score_layers: str = "all",
        pin: str = "all",
        refresh_every: int = 0,
        refresh_on_drift: float = 0.0,
    ) -> None:
        _one_of("track_by", track_by, TRACK_BY)
        _one_of("score_layers", score_layers, ("all", "from-third"))
        _one_of("pin", pin, ("all", "verified"))
        for name, value, least in (
            ("lookahead", lookahead, 0),
            ("track", track, -1),
            ("refresh_every", refresh_every, 0),
        ):
            if value < least:
                raise ValueError(f"{name}={value}: at least {least}")
        self.lookahead, self.track, self.track_by, self.pin = lookahead, track, track_by, pin
        self.score_from = (2 if score_layers == "from-third" else 0) if track_by == "attention" else None
        self.refresh_every, self.refresh_on_drift = refresh_every, refresh_on_drift
        self.sync = refresh_every > 0 or refresh_on_drift > 0
        self.steady = track >= 0 and not self.sync
        self._mean: Tensor | None = None
        self._drifted: Tensor | None = None

    def always_sweeps(self) -> bool:
        return self.track < 0

    def slot_tensors(self) -> tuple[Tensor, ...]:
        return tuple(kept for kept in (self._mean, self._drifted) if kept is not None)

    def due(self, state: State) -> Tensor | None:
        due = torch.zeros(state.slots, dtype=torch.bool, device=state.device)
        if self.refresh_every:
            due |= state.step % self.refresh_every == 0
        if self._drifted is not None:
            due |= self._drifted
        return due

    def key(self, state: State) -> Tensor:
        """What ranks known positions for tracking, [S, L] float32; fresh commits come first."""
        if self.track_by == "attention":
            key = state.score
        elif self.track_by == "recent":
            key = state.committed_at.float()
        elif self.track_by == "random":
            seed, step = state.num["seed"][:, None], state.step[:, None]
            key = counter_uniform(seed, step, state.order[None], torch.full_like(seed, -2)).float()
        else:
            key = torch.zeros_like(state.score)
        return torch.where(state.fresh, constant(PINNED, key), key)

    def tracked(self, state: State) -> tuple[Tensor, Tensor]:
        """Committed positions to recompute: ``(pos, valid)`` [S, track]."""
        pool = state.fresh if self.track_by == "none" else state.known
        return highest(self.key(state), pool, self.track)

    def rows(self, state: State, lanes: Lanes, cand: Candidates, kv: KVCache) -> list[Rows]:
        masked = leftmost(state.masked, min(lanes.width + self.lookahead, state.positions))
        tracked = self.tracked(state)
        pos, valid = (torch.cat(pair, 1) for pair in zip(masked, tracked, strict=True))
        return [run_rows(state, kv.base, lanes, pos, valid)]

    def run(self, ctx: Context, state: State, lanes: Lanes, cand: Candidates, plan: Plan | None) -> PassOut:
        out = super().run(ctx, state, lanes, cand, plan)
        assert out.rows is not None
        refreshed(state, out.rows, ctx.kv.base)
        return out

    def context(self, state: State, lanes: Lanes, hidden: Tensor | None, n: int) -> tuple[Tensor, Tensor]:
        if self.always_sweeps():
            return super().context(state, lanes, hidden, n)
        now, key = state.committed_at == state.step[:, None], self.key(state)
        return highest(torch.where(now, constant(THIS_STEP, key), key), state.known, n)

    def observe(self, state: State, lanes: Lanes, record: StepRecord) -> None:
        if self.pin == "verified" and record.search is not None:
            state.write("fresh", state.spots(record.cand.pos, record.take), False)
        if self.refresh_on_drift:
            self._watch(state, record)

    def _watch(self, state: State, record: StepRecord) -> None:
        """Remember slots whose uncommitted candidates lost confidence since the last step."""
        if self._mean is None:
            self._mean = torch.zeros(state.slots, device=state.device)
        left = record.cand.valid & state.wanted.gather(1, record.cand.pos)
        some = left.any(1)
        mean = torch.where(left, record.draft.prob, 0.0).sum(1) / left.sum(1).clamp_min(1)
        swept = torch.zeros(state.slots, dtype=torch.bool, device=state.device)
        swept[torch.tensor(record.swept, dtype=torch.int64, device=state.device)] = True
        self._drifted = some & ~swept & (state.step > 0) & (self._mean - mean > self.refresh_on_drift)
        # Where none stays there is nothing to compare; a new request forgets what its slot had before.
        kept = torch.where(state.step > 0, self._mean, 0.0)
        self._mean = torch.where(state.running, torch.where(some, mean, kept), self._mean)


def refreshed(state: State, rows: Rows, base: int) -> None:
    """Recomputed positions are not fresh commits any more."""
    # Invalid rows write their key to the trash place.
    spots = state.spots(rows.pos, rows.place >= base)
    state.write_rows("fresh", rows.slot, spots, False)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is not known; one of {', '.join(known)}")
