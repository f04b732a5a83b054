"""A queueing simulation of replicas: requests arrive whether or not earlier ones are done, engines step.

The model of an engine is that of ``engine.Engine``: a request is seated first come, first served, as soon as a slot is
free, but only between two steps; a step takes every busy slot one step further and lasts as long as the curve says for
so many of them. Nothing is simulated between two events of a replica: with the same busy slots, many steps are one.

What it leaves out: clients that give up, replicas that fail or start, the network, and that a step's time depends on
the lengths of the canvases in it, of which the curve knows the mean only.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flash_dllm.scale.curve import Curve, Sizes
from flash_dllm.scale.extras import ScaleError

FILLING = 3
"""Services of a full engine after which a fleet that began empty counts as settled."""
ROUTINGS = ("least", "two-choices", "random", "round-robin")
"""Least outstanding requests; the better of two random replicas (Ray Serve); a random one; each in turn."""
Float = NDArray[np.float64]


@dataclass(frozen=True)
class Fleet:
    """Replicas of one engine each, the way to them, and how many requests may wait at one (None: any number)."""

    replicas: int
    curve: Curve
    routing: str = "least"
    max_queue: int | None = None

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ScaleError(f"replicas={self.replicas}: at least 1")
        if self.routing not in ROUTINGS:
            raise ScaleError(f"routing={self.routing!r}: there are {', '.join(ROUTINGS)}")


@dataclass(frozen=True)
class Trace:
    """Requests: when each arrives (seconds, rising), and its steps and tokens."""

    arrivals: Float
    sizes: Sizes

    @classmethod
    def poisson(cls, rate: float, count: int, sizes: Sizes, seed: int) -> Trace:
        """``count`` arrivals at random, ``rate`` a second on average.

        Raises:
            ScaleError: no positive rate or count.
        """
        if not (math.isfinite(rate) and rate > 0) or count < 1:
            raise ScaleError(f"rate={rate}, requests={count}: both must be positive")
        random = np.random.default_rng(seed)
        return cls(np.cumsum(random.exponential(1 / rate, count)), sizes.draw(count, random))


@dataclass
class Outcome:
    """What became of a trace; times in seconds, one a request that was answered, in order of arrival.

    Attributes:
        queued, latency: from arrival to seat, and to the answer.
        tokens: of each.
        refused: requests that found a full queue.
        span: from the first arrival to the last answer.
        busy: mean share of slots that were busy over the span.
        steps: of all engines together; stepping: the seconds that they took.
        warm_up: share of the requests that percentiles leave out, since they came while the fleet filled up.
    """

    queued: Float
    latency: Float
    tokens: NDArray[np.int64]
    refused: int
    span: float
    busy: float
    steps: int = 0
    stepping: float = 0.0
    warm_up: float = 0.1

    def settled(self, times: Float) -> Float:
        """``times`` of the requests that found the fleet as it is in the long run."""
        return times[int(len(times) * self.warm_up) :]

    def row(self) -> dict[str, Any]:
        """Rates over the span, percentiles of the :meth:`settled` requests."""
        queued, latency = self.settled(self.queued), self.settled(self.latency)
        if not len(latency):
            raise ScaleError("every request was refused")

        def at(values: Float, *shares: int) -> dict[str, float]:
            return {f"p{s}": float(np.percentile(values, s)) for s in shares} | {"mean": float(values.mean())}

        return {
            "answered": len(self.latency), "refused": self.refused,
            "requests_per_second": len(self.latency) / self.span,
            "tokens_per_second": float(self.tokens.sum()) / self.span,
            "busy": self.busy, "queued_s": at(queued, 50, 99), "latency_s": at(latency, 50, 90, 99),
        }  # fmt: skip


@dataclass
class _Replica:
    """An engine. ``at`` is its last event, a boundary between steps; ``extra`` what the next step takes longer.

    ``done`` counts steps; ``ends`` holds (count at which it ends, request) of each busy slot; ``due`` is how many
    steps after ``at`` the next event is, and ``version`` tells it from those that it replaced.
    """

    at: float = 0.0
    pace: float = 0.0
    extra: float = 0.0
    done: int = 0
    due: int = 0
    version: int = 0
    ends: list[tuple[int, int]] = field(default_factory=list)
    queue: deque[int] = field(default_factory=deque)

    @property
    def outstanding(self) -> int:
        return len(self.ends) + len(self.queue)


def simulate(fleet: Fleet, trace: Trace, seed: int = 0) -> Outcome:
    """Send a trace to a fleet; ``seed`` is that of the routing."""
    return _Run(fleet, trace, seed).outcome()


class _Run:
    def __init__(self, fleet: Fleet, trace: Trace, seed: int) -> None:
        self.curve, self.fleet, self.trace = fleet.curve, fleet, trace
        self.replicas = [_Replica() for _ in range(fleet.replicas)]
        self.steps = trace.sizes.steps.tolist()
        count = len(trace.arrivals)
        self.seated, self.ended = np.full(count, np.nan), np.full(count, np.nan)
        self.events: list[tuple[float, int, int]] = []
        self.pace = [0.0, *(fleet.curve.step(b) for b in range(1, fleet.curve.slots + 1))]
        self.busy_seconds = self.stepping = 0.0
        self.passed = 0
        self.router = _Router(self.replicas, fleet.routing, seed)
        self._play()

    def _play(self) -> None:
        room = self.fleet.max_queue
        for request, now in enumerate(self.trace.arrivals.tolist()):
            while self.events and self.events[0][0] <= now:
                self._next_event()
            index = self.router.pick()
            replica = self.replicas[index]
            free = self.curve.slots - len(replica.ends)
            if room is not None and len(replica.queue) >= room + free:
                continue
            replica.queue.append(request)
            self.router.changed(index)
            if not replica.ends:
                replica.at = now
                self._seat(index, replica)
            elif len(replica.queue) <= free:
                self._hurry(index, replica, now)
        while self.events:
            self._next_event()

    def _next_event(self) -> None:
        when, index, version = heapq.heappop(self.events)
        replica = self.replicas[index]
        if version != replica.version:
            return
        self.busy_seconds += len(replica.ends) * (when - replica.at)
        self.stepping += when - replica.at
        self.passed += replica.due
        replica.at = when
        replica.done += replica.due
        replica.extra = 0.0
        while replica.ends and replica.ends[0][0] <= replica.done:
            _, request = heapq.heappop(replica.ends)
            self.ended[request] = when
        self._seat(index, replica)
        self.router.changed(index)

    def _seat(self, index: int, replica: _Replica) -> None:
        """Between two steps: fill free slots, then look how long nothing changes."""
        while replica.queue and len(replica.ends) < self.curve.slots:
            request = replica.queue.popleft()
            self.seated[request] = replica.at
            heapq.heappush(replica.ends, (replica.done + self.steps[request], request))
            replica.extra += self.curve.seat_seconds
        if replica.ends:
            replica.pace = self.pace[len(replica.ends)]
            self._schedule(index, replica, replica.ends[0][0] - replica.done)

    def _hurry(self, index: int, replica: _Replica, now: float) -> None:
        """A slot is free: the request is seated after the step that runs now."""
        passed = (now - replica.at - replica.extra) / replica.pace
        steps = max(1, math.ceil(passed))
        if steps < replica.due:
            self._schedule(index, replica, steps)

    def _schedule(self, index: int, replica: _Replica, steps: int) -> None:
        replica.due = steps
        replica.version += 1
        when = replica.at + replica.extra + steps * replica.pace
        heapq.heappush(self.events, (when, index, replica.version))

    def outcome(self) -> Outcome:
        answered = ~np.isnan(self.ended)
        arrivals = self.trace.arrivals[answered]
        span = float(np.nanmax(self.ended) - self.trace.arrivals[0]) if answered.any() else 0.0
        places = self.fleet.replicas * self.curve.slots
        filling = FILLING * float(self.trace.sizes.steps.mean()) * self.pace[-1]
        early = float((arrivals < self.trace.arrivals[0] + filling).mean()) if answered.any() else 0.0
        return Outcome(
            queued=self.seated[answered] - arrivals,
            latency=self.ended[answered] - arrivals + self.curve.request_seconds,
            tokens=self.trace.sizes.tokens[answered],
            refused=int((~answered).sum()),
            span=span,
            busy=self.busy_seconds / (places * span) if span else 0.0,
            steps=self.passed,
            stepping=self.stepping,
            warm_up=min(0.5, max(0.1, early)),
        )


class _Router:
    """Picks a replica by the requests that are outstanding there."""

    def __init__(self, replicas: list[_Replica], routing: str, seed: int) -> None:
        self._replicas = replicas
        self._random = np.random.default_rng(seed)
        self._draws: list[float] = []
        self._turn = -1
        picks: dict[str, Callable[[], int]] = {
            "least": self._least, "two-choices": self._two, "random": self._any, "round-robin": self._in_turn,
        }  # fmt: skip
        self.pick = picks[routing]
        self._versions = [0] * len(replicas)
        self._heap = [(0, self._draw(), i, 0) for i in range(len(replicas))] if routing == "least" else None
        if self._heap:
            heapq.heapify(self._heap)

    def changed(self, index: int) -> None:
        """The number of outstanding requests of a replica has changed."""
        if self._heap is not None:
            self._versions[index] += 1
            entry = (self._replicas[index].outstanding, self._draw(), index, self._versions[index])
            heapq.heappush(self._heap, entry)

    def _least(self) -> int:
        assert self._heap is not None
        # Entries that a later change has replaced are dropped when they come up.
        while self._heap[0][3] != self._versions[self._heap[0][2]]:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def _two(self) -> int:
        first = self._any()
        others = len(self._replicas) - 1
        if not others:
            return first
        second = (first + 1 + min(int(self._draw() * others), others - 1)) % len(self._replicas)
        better = self._replicas[second].outstanding < self._replicas[first].outstanding
        return second if better else first

    def _any(self) -> int:
        return min(int(self._draw() * len(self._replicas)), len(self._replicas) - 1)

    def _in_turn(self) -> int:
        self._turn = (self._turn + 1) % len(self._replicas)
        return self._turn

    def _draw(self) -> float:
        if not self._draws:
            self._draws = self._random.random(4096).tolist()
        return self._draws.pop()
