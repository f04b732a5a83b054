"""The parts a method is made of: schedule, cache policy, decoding rule, verifier.

A paper's method is one file of `flash_dllm.methods` with subclasses of these. All of them read and write
:class:`State` tensors; only a policy with ``sync = True`` may read values back to the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .cache import KVCache
from .constants import upto, where
from .forward import Context, compact
from .noise import Noise
from .rows import count_rows, lane_rows, sweep_rows, with_readers
from .select import highest, leftmost
from .state import Canvas, State
from .types import Candidates, Draft, Lanes, Plan, Rows, View
from .visibility import canvas_view

if TYPE_CHECKING:
    from flash_dllm.models.config import ModelConfig

    from .step import StepRecord, Vocabulary


class Schedule:
    """Names the candidates of a step."""

    name = "schedule"

    def width(self, lengths: list[int], blocks: list[int]) -> int:
        """Most candidates a step, from each slot's masked count and block length (host numbers)."""
        raise NotImplementedError

    def candidates(self, state: State, width: int) -> Candidates:
        """Positions that may be committed now."""
        raise NotImplementedError

    def revise(self, state: State, cand: Candidates, take: Tensor) -> Tensor:
        """The last word on the commits by confidence ``take``, [S, C] bool."""
        return take

    def done(self, state: State) -> Tensor:
        """Slots that have nothing left to decode, [S] bool."""
        return ~state.wanted.any(1)


class Window(Schedule):
    """The ``size`` leftmost positions that are still to be decoded."""

    name = "window"

    def __init__(self, size: int) -> None:
        self.size = size

    def width(self, lengths: list[int], blocks: list[int]) -> int:
        return self.size

    def candidates(self, state: State, width: int) -> Candidates:
        return Candidates(*leftmost(state.wanted, width))


class Blocks(Schedule):
    """Semi-autoregressive blocks of each request's ``block_length``, counted from its first masked position."""

    name = "blocks"

    def width(self, lengths: list[int], blocks: list[int]) -> int:
        return max(min(n, b) for n, b in zip(lengths, blocks, strict=True))

    def enter(self, state: State) -> Tensor:
        """Move to the block of the first position still wanted; returns its start, [S] int64."""
        size = state.num["block_length"]
        wanted = state.wanted
        ahead = torch.where(wanted, state.order, state.positions).amin(1)
        block = (ahead - state.first).clamp_min(0) // size
        live = state.running & wanted.any(1)
        changed = live & (block != state.block)
        blocks = (state.total - state.first + size - 1) // size
        state.blocks.copy_(torch.where(live, blocks, state.blocks))
        state.block.copy_(torch.where(live, block, state.block))
        start = state.first + state.block * size
        here = state.masked & (state.order >= start[:, None]) & (state.order < (start + size)[:, None])
        state.block_step.copy_(torch.where(changed, 0, state.block_step))
        state.block_masks.copy_(torch.where(changed, here.sum(1), state.block_masks))
        return start

    def candidates(self, state: State, width: int) -> Candidates:
        start = self.enter(state)
        pos = start[:, None] + torch.arange(width, device=state.device)
        end = torch.minimum(start + state.num["block_length"], state.total)
        inside = (pos >= 0) & (pos < end[:, None])
        pos = torch.where(inside, pos, 0)
        return Candidates(pos, inside & state.wanted.gather(1, pos))


class Whole(Blocks):
    """One pool of all masked positions, as in Dream: a single block as long as the canvas."""

    name = "whole"

    def width(self, lengths: list[int], blocks: list[int]) -> int:
        return max(lengths)

    def enter(self, state: State) -> Tensor:
        state.num["block_length"].copy_(torch.where(state.running, state.total - state.first, 1))
        return super().enter(state)


@dataclass
class PassOut:
    """What a pass gave: ``hidden`` [S, C, d] of the read rows, and what it cost.

    ``recomputed`` [S] counts valid rows; ``rows`` lists them for the event log (None for the delta loop, which
    reports through ``marks`` instead: a [S, L] bool of positions recomputed in the last layer; ``layers`` has
    one for each layer).
    """

    hidden: Tensor
    recomputed: Tensor
    rows: Rows | None = None
    marks: Tensor | None = None
    score: Tensor | None = None
    kind: str = "denoise"
    layers: tuple[Tensor, ...] = ()


class CachePolicy:
    """Which rows a pass recomputes. The base class is ``cache="none"``: every position, every pass.

    Attributes:
        graphable: a step of running slots reads nothing back to the host.
        steady: such a step has one shape whatever the canvases hold, so it can be recorded once.
        varies: that shape is one for each number of rows that :meth:`counts` gives, rounded up; of a policy of whole
            canvases (``whole``), one for each bound of their lengths and of the answers'.
        sync: the policy reads values back to the host (block caches).
        asks: all that it reads back can be asked before a step: :meth:`due`, :meth:`odd` and :meth:`counts`.
        loop: ``compact`` policies give a plan; others override :meth:`run`.
        leads: :meth:`rows` of a slot begin with the candidates, in their order, so that nobody has to look for them.
    """

    name = "none"
    graphable = True
    steady = False
    varies = False
    whole = False
    sync = False
    asks = False
    loop = "compact"
    leads = False
    supports_cfg = True

    def positions(self, longest: int) -> int:
        """Positions of a slot for canvases of up to ``longest`` (host side)."""
        return longest

    def prepare(self, canvas: Canvas, positions: int) -> Canvas:
        """The canvas as it enters a slot of ``positions`` (host side)."""
        return canvas

    def seat(self, slot: int, canvas: Canvas) -> None:
        """``canvas`` enters ``slot``: forget its former tenant."""
        self.reset(slot)

    def reset(self, slot: int) -> None:
        """Forget what is kept about ``slot``."""

    def slot_tensors(self) -> tuple[Tensor, ...] | None:
        """What it keeps by slot beside the state and the K/V cache, each [S, ...]: a canvas that moves takes it along.

        None, as here: a canvas stays in its slot. So it has to be for what is kept on the host.
        """
        return None

    def bytes_per_position(self, config: ModelConfig, size: int) -> int:
        """Bytes a position of a slot that it needs beside keys and values; ``size``: of a number of the weights."""
        return 0

    def begin(self, state: State, cand: Candidates, noise: Noise) -> Candidates:
        """A step starts. A policy that plans which candidates it recomputes narrows them here."""
        return cand

    def due(self, state: State) -> Tensor | None:
        """Slots that want a sweep now, [S] bool, or None for never."""
        return torch.ones(state.slots, dtype=torch.bool, device=state.device)

    def odd(self, state: State) -> Tensor | None:
        """Slots whose next pass is no sweep and yet no steady one, [S] bool, or None for never."""
        return None

    def counts(self, state: State) -> Tensor | None:
        """Rows that each slot recomputes in its next pass, if that is no sweep, [S] int64; None where nobody asks."""
        return None

    def always_sweeps(self) -> bool:
        """True if every pass is a sweep, which the host then knows without asking."""
        return type(self) is CachePolicy

    def rows(self, state: State, lanes: Lanes, cand: Candidates, kv: KVCache) -> list[Rows]:
        """Rows of the slots in ``lanes.run``."""
        return []

    def view(self, state: State, kv: KVCache) -> View:
        """Visibility of the pass before any verifier changes it."""
        return canvas_view(state, kv.base, kv.places)

    score_from: int | None = None

    def plan(self, state: State, lanes: Lanes, cand: Candidates, ctx: Context) -> Plan:
        """Rows, visibility and reads of the pass."""
        parts = sweep_rows(state, ctx.kv.base, lanes.sweep, lanes) if lanes.sweep else []
        if lanes.run:
            parts += self.rows(state, lanes, cand, ctx.kv)
        rows = parts[0] if len(parts) == 1 else Rows.concat(parts)
        shift, count = ctx.model.config.shift, cand.pos.shape[1]
        if (
            self.leads
            and not (shift or lanes.sweep)
            and len(rows.groups) == 1
            and count <= rows.groups[0].width
        ):
            reads = lane_rows(state, rows.groups[0], count).contiguous()
        else:
            rows, reads = with_readers(state, ctx.kv.base, rows, cand, lanes, shift)
        return Plan(rows, self.view(state, ctx.kv), reads, cand.valid)

    def run(self, ctx: Context, state: State, lanes: Lanes, cand: Candidates, plan: Plan | None) -> PassOut:
        """Do the pass. ``plan`` is what :meth:`plan` gave, possibly extended by a verifier."""
        assert plan is not None
        out = compact(ctx, plan, self.score_from)
        if out.score is not None:
            torch.where(state.running[:, None], out.score, state.score, out=state.score)
        return PassOut(out.hidden, count_rows(state, plan.rows), plan.rows, score=out.score)

    def observe(self, state: State, lanes: Lanes, record: StepRecord) -> None:
        """See what the passes and the commits of the step gave; called before the clocks advance."""

    def context(self, state: State, lanes: Lanes, hidden: Tensor | None, n: int) -> tuple[Tensor, Tensor]:
        """Positions that a verify pass recomputes beside its views, best first: ``(pos, valid)`` [S, R].

        Args:
            hidden: [S, L] bool, positions that the views replace; all of them are masked. None for a policy that
                keeps rows, which chooses among the known ones.
            n: how many rows there is room for; the latest commits take them. A policy that keeps nothing
                (``none``) recomputes every other position, whatever ``n``.
        """
        if self.keeps:
            return highest(state.committed_at.float(), state.known, n)
        assert hidden is not None
        longest = max(lanes.total[s] for s in lanes.live)
        return leftmost(state.inside & ~hidden, longest)

    @property
    def keeps(self) -> bool:
        """Whether rows that a pass leaves out are served from the cache in a later pass."""
        return not self.always_sweeps()


class Rule:
    """Which drafts of the denoise pass are committed.

    Attributes:
        measure: what ranks candidates, see :class:`flash_dllm.kernels.head_confidence.HeadSpec`.
        categorical: tokens are drawn in Dream's form.
        certifies: it commits argmax tokens by their probability, so that Fast-dLLM's theorem applies.
        random_order: seeds give different answers at temperature 0 too.
        options: per-request numbers that the rule reads.
        defaults: numbers of requests that name none, where they are not those of :data:`NUMBERS`.
        sync: the rule reads values back to the host, so its steps cannot be captured.
    """

    name = "rule"
    measure = "prob"
    categorical = False
    certifies = False
    random_order = False
    options: frozenset[str] = frozenset()
    defaults: Mapping[str, float] = {}
    sync = False

    def bind(self, ctx: Context, state: State, vocabulary: Vocabulary) -> None:
        """The rule enters an engine: a rule with tensors of its own allocates them here.

        Raises:
            ValueError: it cannot work with this model or these lengths.
        """

    def slot_tensors(self) -> tuple[Tensor, ...] | None:
        """As :meth:`CachePolicy.slot_tensors`. None where :meth:`bind` allocates and nothing is said of it."""
        return () if getattr(self.bind, "__func__", self.bind) is Rule.bind else None

    def bytes_per_position(self, config: ModelConfig, size: int) -> int:
        """As :meth:`CachePolicy.bytes_per_position`."""
        return 0

    def notes(self, slot: int) -> dict[str, float]:
        """What else to report of the request that ends in ``slot``."""
        return {}

    def prepare(self, numbers: Sequence[Mapping[str, float]]) -> None:
        """The numbers of the live requests changed (host side); a rule may skip what none of them needs."""

    def modes(self) -> tuple[bool, ...]:
        """What :meth:`prepare` decided: steps of other modes do other work."""
        return ()

    @property
    def reads_logits(self) -> bool:
        """Whether :meth:`see` does anything, so that the logits have to exist."""
        return getattr(self.see, "__func__", self.see) is not Rule.see

    def see(self, state: State, cand: Candidates, logits: Tensor) -> None:
        """The candidates' logits [S, C, V] float32, for rules that need more than a draft; before :meth:`commit`."""

    def commit(self, state: State, cand: Candidates, draft: Draft, noise: Noise) -> Tensor:
        """Candidates to commit, [S, C] bool."""
        raise NotImplementedError


@dataclass
class Second:
    """What a verify pass or the branch rows gave at their reads, each [S, K].

    ``token`` is the argmax, ``prob`` its probability, ``prob_draft`` that of the draft under test.
    """

    token: Tensor
    prob: Tensor
    prob_draft: Tensor


@dataclass
class Search:
    """Drafts under test: positions ``pos`` [S, K] in order of confidence, their tokens, and which exist."""

    pos: Tensor
    token: Tensor
    valid: Tensor


class Verifier:
    """Checks drafts with views of the canvas (two passes a step) or inside the next pass (folded).

    Attributes:
        certifies: what it accepts has a bound (design of docs/verify.md): no view sees its own draft.
        options, defaults: per-request numbers that it reads, and those whose default is not that of ``NUMBERS``.
    """

    name = "verifier"
    folded = False
    certifies = False
    options: frozenset[str] = frozenset()
    defaults: ClassVar[dict[str, float]] = {}

    def slot_tensors(self) -> tuple[Tensor, ...] | None:
        """As :meth:`CachePolicy.slot_tensors`."""
        return None

    def scratch(self) -> int:
        """Key places that its rows need."""
        return 0

    def room(self, width: int) -> int:
        """The same for a step of ``width`` candidates, which a block may have more of than was foreseen."""
        return self.scratch()


@dataclass
class Method:
    """A cache policy with a decoding: what ``LLM(model, cache=..., decoding=...)`` builds."""

    cache: CachePolicy
    schedule: Schedule
    rule: Rule
    verifier: Verifier | None = None
    options: frozenset[str] = frozenset()
    preset: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.cache.name}+{self.verifier.name if self.verifier else self.rule.name}"

    @property
    def graphable(self) -> bool:
        return self.cache.graphable and not self.cache.sync and not self.rule.sync

    @property
    def recordable(self) -> bool:
        """A step without a sweep can be recorded once and played again, whatever the canvases hold."""
        return self.cache.steady and not self.rule.sync and (self.graphable or self.cache.asks)

    def slot_tensors(self) -> tuple[Tensor, ...] | None:
        """What its parts keep by slot, each [S, ...], or None where a canvas cannot move. A schedule keeps nothing."""
        found: list[Tensor] = []
        for part in (self.cache, self.rule, *((self.verifier,) if self.verifier else ())):
            own = part.slot_tensors()
            if own is None:
                return None
            found += own
        return tuple(found)

    def bytes_per_position(self, config: ModelConfig, size: int) -> int:
        """Bytes a position of a slot that its parts need beside keys and values."""
        return self.cache.bytes_per_position(config, size) + self.rule.bytes_per_position(config, size)

    @property
    def defaults(self) -> dict[str, float]:
        """Per-request numbers of this method that differ from those of an empty slot."""
        return {**self.rule.defaults, **(self.verifier.defaults if self.verifier else {}), **self.preset}

    @property
    def certificate(self) -> str | None:
        """What a bound on its answers assumes, or None where it has none."""
        if not self.rule.certifies or (self.verifier and not self.verifier.certifies):
            return None
        against = "the model's own distribution given the canvas of each step"
        context = "; the context frozen while drafts are tested" if self.verifier else ""
        frozen = "; keys and values as cached, not as a full pass would give them" if self.cache.keeps else ""
        return against + context + frozen


def at_least_best(take: Tensor, key: Tensor, valid: Tensor) -> Tensor:
    """``take`` [S, C] with the valid candidate of highest ``key`` added (the lower position wins ties)."""
    best = where(valid, key, torch.finfo(key.dtype).min).argmax(1, keepdim=True)
    return (take | (upto(key.shape[1], key) == best)) & valid


def prefix_true(flags: Tensor) -> Tensor:
    """True up to the first False of each row, [S, K] bool."""
    return flags.cummin(1).values
