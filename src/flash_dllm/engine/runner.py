"""Runs steps: op by op, or a steady step of a GPU as one CUDA graph.

A step is steady where no slot sweeps and the cache policy's rows have one shape whatever the canvases hold
(``CachePolicy.steady``). A policy whose sweeps depend on the canvases is asked first whether one is due. Row counts and
key lengths are data on the device, so a graph serves every step of its number of slots: a slot that is free or done
has only invalid rows. The number of slots is rounded up to a bucket. Where the number of rows changes from step to step
(``CachePolicy.varies``), it is rounded up as well and there is a graph for each; steps of so many rows that they hide
what launching them takes run op by op.
A graph covers the lowest slots: requests are seated in the lowest free ones, and where those that are left sit too
high for the smallest graph that could hold them, the highest move down (:meth:`Runner.moves`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from flash_dllm.core.forward import warm
from flash_dllm.core.step import Decoder, Hints, StepRecord
from flash_dllm.core.types import Lanes
from flash_dllm.kernels.row_attention import held_tables

BUCKETS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of slots that have a graph of their own; above them, multiples of the last."""

PAD = 64
"""What numbers of rows, and lengths of whole canvases, are rounded up to a multiple of; large ones to larger multiples,
by an eighth at most, so that there are few."""

GRAPHS = 128
"""Recorded steps that are kept, those that played last: each is some MB of the driver's."""

HEIGHTS, MANY = (32, 64, 128, 256, 512), 2048
"""Lengths of canvases between which attention has other tiles, and rows of a pass that needs no splitting."""

MOVES = 8
"""Most canvases that move before a step: a long canvas of an 8B model is most of a GB of keys and values."""


class Tape(Protocol):
    """A recorded step."""

    def play(self) -> StepRecord:
        """Run it again on the same tensors; the record's tensors are overwritten by the next one that plays."""

    def drop(self) -> None:
        """Free what was recorded; it cannot play any more."""


Recorder = Callable[[Callable[[], StepRecord]], Tape]


class CudaTape:
    """A CUDA graph of a step.

    Args:
        step: launches the work. It ran before, so every kernel is compiled and every library has its workspace.
        pool: memory that all graphs of an engine share; one plays at a time.
    """

    def __init__(self, step: Callable[[], StepRecord], pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the GPU meanwhile.
        capture = torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local")
        with capture:
            self._record = step()

    def play(self) -> StepRecord:
        self._graph.replay()
        return self._record

    def drop(self) -> None:
        self._graph.reset()


def cuda_recorder() -> Recorder:
    """Records CUDA graphs that share one pool of memory."""
    pool = torch.cuda.graph_pool_handle()
    return lambda step: CudaTape(step, pool)


@dataclass(frozen=True)
class Key:
    """What a graph is good for: slots 0 .. ``slots - 1``, and what the host decided for the step.

    Attributes:
        width: candidates of a slot.
        base: key places before position 0.
        hints: what requests ask for (:class:`Hints`), and the rule's modes.
        fed: rows of a slot at most, where the policy counts them, else 0.
        total, answer: bounds of the canvases' and of the answers' lengths.
    """

    slots: int
    width: int
    base: int
    hints: tuple[bool, ...]
    fed: int = 0
    total: int = 0
    answer: int = 0


class Tapes(dict[Key, Tape]):
    """Recorded steps, in an object that does not know whose they are: ranks keep it until they part.

    Attributes:
        closed: they were forgotten, and none is kept any more.
    """

    closed = False

    def keep(self, key: Key, tape: Tape) -> None:
        """Raises RuntimeError if they were forgotten while ``tape`` was recorded."""
        self[key] = tape
        if self.closed:
            self.forget()
            raise RuntimeError("recorded steps were given up while one was recorded")

    def forget(self) -> None:
        """Drop every recorded step, and keep none from here on."""
        self.closed = True
        with contextlib.suppress(KeyError):
            while self:
                self.popitem()[1].drop()


class Runner:
    """Runs the steps of a decoder.

    Args:
        record: makes a tape of a steady step; None runs everything op by op.

    Attributes:
        tapes: recorded steps.
        played, eager: steps run either way.
    """

    def __init__(self, decoder: Decoder, record: Recorder | None) -> None:
        self.decoder, self._record = decoder, record
        self.tapes = Tapes()
        # What has run once and may be recorded, with the block tables that it reads; what played last comes last.
        self._seen: dict[Key, list[Tensor]] = {}
        self.played = self.eager = 0
        ranks = decoder.ctx.model.ranks
        if record is not None and ranks is not None:
            weakref.finalize(self, _let_go, self.tapes, ranks.before_parting(self.tapes))

    @classmethod
    def for_device(cls, decoder: Decoder, enforce_eager: bool) -> Runner:
        """Graphs on a CUDA GPU, unless they are switched off."""
        graphs = decoder.state.device.type == "cuda" and not enforce_eager
        return cls(decoder, cuda_recorder() if graphs else None)

    @property
    def records(self) -> bool:
        """Steady steps of this method are recorded."""
        return self._record is not None and not self.tapes.closed and self.decoder.method.recordable

    def step(self, lanes: Lanes) -> StepRecord:
        """One step of the slots in ``lanes``."""
        key = None
        if self.records and not (lanes.sweep or lanes.partner):
            lanes, steady = self.decoder.ask(lanes) if self.decoder.method.cache.asks else (lanes, True)
            key = self._key(lanes) if steady else None
        if key is None:
            self.eager += 1
            return self.decoder.step(lanes)
        return self._steady(key)

    def moves(self, live: Sequence[int]) -> list[tuple[int, int]]:
        """Moves (from, to) after which a smaller graph plays the steady steps of the slots ``live``.

        The highest go first, :data:`MOVES` at most; what is left to do comes out before the next step. Nothing where
        steps are not recorded or the method's canvases cannot move. All of it follows from the seats and the sizes of
        the engine, so ranks that share a model make the same moves.
        """
        size = bucket(len(live), self.decoder.state.slots)
        high = sorted((s for s in live if s >= size), reverse=True)
        if not high or not self.records or self.decoder.method.slot_tensors() is None:
            return []
        free = sorted(set(range(size)) - set(live))
        return list(zip(high, free, strict=False))[:MOVES]

    def warm_up(self, width: int) -> Iterator[tuple[int, int]]:
        """Compile what requests would wait for, and record every bucket whose shape is known, the largest first.

        Yields how many are recorded, and of how many. No slot may be busy: the steps that run here change nothing then.
        """
        method, on_gpu = self.decoder.method, self.decoder.state.device.type == "cuda"
        # Those that read back or keep numbers on the host may look for a request where there is none.
        known = method.cache.steady or method.cache.always_sweeps()
        if not known or method.rule.sync or not (on_gpu or self._record):
            return
        self._compile(width)
        if not self.records or method.cache.varies:
            return
        sizes = sorted({bucket(n, self.decoder.state.slots) for n in (*BUCKETS, self.decoder.state.slots)})
        for done, slots in enumerate(reversed(sizes), 1):
            positions = [self.decoder.state.positions] * self.decoder.state.slots
            key = self._key(Lanes(list(range(slots)), [], [0] * len(positions), positions, width))
            assert key is not None
            for _ in range(2):
                self._steady(key)
            yield done, len(sizes)

    def _compile(self, width: int) -> None:
        """Free slots sweep, in the shapes between which kernels differ: their rows are invalid, nothing changes."""
        slots, positions = self.decoder.state.slots, self.decoder.state.positions

        def sweep(count: int, length: int) -> None:
            # Schedules without blocks have as many candidates as the longest answer; nobody needs their logits here.
            few = min(width, length, PAD)
            self.decoder.step(Lanes([], list(range(count)), [0] * slots, [length] * slots, few))

        def counts(length: int) -> list[int]:
            return sorted(
                {min(slots, n) for n in (1, 2, 8, max(1, MANY // length)) if n * length <= MANY or n == 1}
            )

        for length in (*(n for n in HEIGHTS if n < positions), positions):
            for count in counts(length):
                sweep(count, length)
        warm(self.decoder.ctx)
        asked = {
            "temperature": Hints(sampling=True), "top_p": Hints(sampling=True, filters=True),
            "eos": Hints(suppress=True),
        }  # fmt: skip
        if self.decoder.ctx.model.shard is not None:
            # Refused where the vocabulary is split.
            del asked["top_p"]
        # In this order on all ranks.
        for option, hints in asked.items():
            if option in self.decoder.method.options:
                self.decoder.hints = hints
                for count in counts(shortest := min(HEIGHTS[0], positions)):
                    sweep(count, shortest)
        self.decoder.hints = Hints()

    def _key(self, lanes: Lanes) -> Key | None:
        """Which graph plays the steady step of ``lanes``; None where it is not worth one."""
        hints, state, policy = self.decoder.hints, self.decoder.state, self.decoder.method.cache
        slots = bucket(max(lanes.run) + 1, state.slots)
        fed, total, answer = min(_rounded(lanes.fed), state.positions), state.positions, state.positions
        # Schedules without blocks have as many candidates as the longest answer.
        width = lanes.width if lanes.width <= PAD else min(_rounded(lanes.width), state.positions)
        if policy.whole:
            total = min(total, _rounded(max(lanes.total[s] for s in lanes.run)))
            answer = min(total, _rounded(max(lanes.total[s] - lanes.first[s] for s in lanes.run) + 1))
        if slots * (total if policy.whole else fed) > self.decoder.ctx.slab:
            return None
        modes = (hints.sampling, hints.filters, hints.suppress, *self.decoder.method.rule.modes())
        return Key(slots, width, self.decoder.ctx.kv.base, modes, fed, total, answer)

    def _steady(self, key: Key) -> StepRecord:
        state = self.decoder.state
        # Lengths are upper bounds here; the device knows the true ones.
        lanes = Lanes(
            list(range(key.slots)), [], [key.total - key.answer] * state.slots, [key.total] * state.slots, key.width,
            exact=False, asked=True, fed=key.fed,
        )  # fmt: skip
        if key not in self._seen:
            self.eager += 1
            with held_tables() as tables:
                record = self.decoder.step(lanes)
            # Only now: what a step that failed did not compile or copy cannot be recorded.
            self._seen[key] = tables
            self._drop_oldest()
            return record
        self._seen[key] = self._seen.pop(key)
        if key not in self.tapes:
            assert self._record is not None
            with held_tables():
                self.tapes.keep(key, self._record(lambda: self.decoder.step(lanes)))
        self.played += 1
        return self.tapes[key].play()

    def _drop_oldest(self) -> None:
        while len(self._seen) > GRAPHS:
            oldest = next(iter(self._seen))
            # It played so many steps ago that the device is done with it. Its tables go after it.
            if (tape := self.tapes.pop(oldest, None)) is not None:
                tape.drop()
            del self._seen[oldest]


def _let_go(tapes: Tapes, withdraw: Callable[[], None]) -> None:
    """A runner is gone: free its recorded steps, which the ranks still keep."""
    tapes.forget()
    withdraw()


def _rounded(rows: int) -> int:
    """``rows`` rounded up, see :data:`PAD`."""
    pad = max(PAD, 1 << max(0, rows.bit_length() - 4))
    return -(-rows // pad) * pad


def bucket(slots: int, most: int) -> int:
    """The number of slots that a graph for ``slots`` of ``most`` slots covers."""
    last = BUCKETS[-1]
    fitting = [n for n in BUCKETS if n >= slots]
    return min(most, fitting[0] if fitting else -(-slots // last) * last)
