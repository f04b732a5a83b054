"""How many replicas a load needs, and what they cost, by simulation."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from flash_dllm.scale.curve import Curve, Sizes
from flash_dllm.scale.extras import ScaleError
from flash_dllm.scale.simulate import Fleet, Outcome, Trace, simulate

FEWEST, MOST = 20_000, 400_000
"""Requests of one simulation: enough for a 99th percentile; few enough for seconds of computing."""
TURNS = 40
"""Requests for each slot of the fleet, between these bounds: so long it takes to forget that it began empty."""


@dataclass(frozen=True)
class Goal:
    """``share`` percent of the answers are there within ``seconds``."""

    share: float
    seconds: float

    @classmethod
    def parse(cls, text: str) -> Goal:
        """From ``p99=5``.

        Raises:
            ScaleError: not of this form.
        """
        found = re.fullmatch(r"p(\d{1,2}(?:\.\d+)?)\s*(?:=|<=|<)\s*(\d+(?:\.\d*)?)s?", text.strip())
        if not found or not float(found[2]) > 0:
            raise ScaleError(f"goal={text!r}: write p99=5 for 99 % of the answers within 5 seconds")
        return cls(float(found[1]), float(found[2]))

    def reached(self, outcome: Outcome) -> float:
        """Latency at ``share`` of the settled requests, in seconds; infinite if any was refused."""
        if outcome.refused or not len(outcome.latency):
            return math.inf
        return float(np.percentile(outcome.settled(outcome.latency), self.share))

    def __str__(self) -> str:
        return f"p{self.share:g} <= {self.seconds:g} s"


@dataclass(frozen=True)
class Workload:
    """What a fleet is planned for.

    Attributes:
        max_load: share of the capacity that a plan may use. Closer to 1 the queue grows so slowly that a simulation
            of minutes does not show it, and nothing is left for a burst or a lost replica.
        count: requests of a simulation; None chooses by the fleet's size.
    """

    curve: Curve
    sizes: Sizes
    routing: str = "two-choices"
    seed: int = 0
    max_load: float = 0.9
    count: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.max_load < 1:
            raise ScaleError(f"max_load={self.max_load}: a share between 0 and 1")

    def run(self, replicas: int, rate: float) -> Outcome:
        """Simulate a fleet under a Poisson load; the same seed gives every fleet the same arrivals."""
        count = self.count or min(MOST, max(FEWEST, TURNS * replicas * self.curve.slots))
        trace = Trace.poisson(rate, count, self.sizes, self.seed)
        return simulate(Fleet(replicas, self.curve, self.routing), trace, self.seed)

    def fewest(self, rate: float) -> int:
        """Replicas below which the load is above ``max_load``."""
        return max(1, math.ceil(rate / (self.max_load * self.curve.capacity(float(self.sizes.steps.mean())))))

    def floor(self, share: float) -> float:
        """Latency at ``share`` percent where every request has a replica to itself, in seconds."""
        steps = float(np.percentile(self.sizes.steps, share))
        return steps * self.curve.step(1) + self.curve.seat_seconds + self.curve.request_seconds


def replicas_for(work: Workload, rate: float, goal: Goal, most: int = 100_000) -> tuple[int, Outcome]:
    """The fewest replicas that reach a goal, and how they do.

    Searches upwards in growing strides, then halves the last one. That more replicas are never slower holds up to the
    noise of the simulation.

    Raises:
        ScaleError: not even an idle fleet would, or it would take more than ``most``.
    """
    floor = work.floor(goal.share)
    if floor > goal.seconds:
        raise ScaleError(f"{goal} is out of reach: a replica with nothing else to do takes {floor:.3g} s")
    low, stride = work.fewest(rate) - 1, 1
    while True:
        high = low + stride
        if high > most:
            raise ScaleError(f"{goal} at {rate:g} requests a second takes more than {most} replicas")
        outcome = work.run(high, rate)
        if goal.reached(outcome) <= goal.seconds:
            break
        low, stride = high, 2 * stride
    while high - low > 1:
        middle = (low + high) // 2
        tried = work.run(middle, rate)
        if goal.reached(tried) <= goal.seconds:
            high, outcome = middle, tried
        else:
            low = middle
    return high, outcome


@dataclass(frozen=True)
class Price:
    """GPUs of a replica and what an hour of one costs, in any currency; None where nobody said."""

    gpus: int = 1
    hour: float | None = None

    def row(self, replicas: int, tokens_per_second: float) -> dict[str, Any]:
        """Cost an hour and per million answer tokens, at the load of the plan."""
        hour = None if self.hour is None else replicas * self.gpus * self.hour
        million = None if hour is None or not tokens_per_second else hour / 3600 / tokens_per_second * 1e6
        return {"gpus": replicas * self.gpus, "cost_an_hour": hour, "cost_a_million_tokens": million}


def plan_row(work: Workload, rate: float, goal: Goal, price: Price) -> dict[str, Any]:
    """One line of a plan; see :func:`replicas_for`."""
    replicas, outcome = replicas_for(work, rate, goal)
    row = outcome.row()
    # Rates are those of the load: over the simulated span the fleet fills up and runs empty once.
    tokens = rate * float(work.sizes.tokens.mean())
    load = rate / (replicas * work.curve.capacity(float(work.sizes.steps.mean())))
    return {
        "rate": rate, "goal": str(goal), "replicas": replicas, **price.row(replicas, tokens),
        "load": load, "tokens_per_second": tokens, "queued_s": row["queued_s"], "latency_s": row["latency_s"],
    }  # fmt: skip
