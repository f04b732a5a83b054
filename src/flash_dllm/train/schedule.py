"""Learning rates by wall clock: a stage ends on time on any machine, and stages continue one schedule."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Curve:
    """Learning-rate factor over the plan: constant up to `flat`, then linear to zero at the end.

    Each stage starts with `warmup` steps from zero, or `rewarm` where it resumes a state with moments: only
    the momentum is rough then.
    """

    flat: float = 0.25
    warmup: int = 150
    rewarm: int = 30

    def factor(self, progress: float, step: int, warm: bool) -> float:
        """Factor at `progress` in [0, 1] of the whole plan, for the `step`-th step (from 0) of this stage.

        `warm`: the stage resumed a state with moments.
        """
        steps = self.rewarm if warm else self.warmup
        ramp = min(1.0, (step + 1) / steps)
        return ramp * min(1.0, max(0.0, (1.0 - progress) / (1.0 - self.flat)))


@dataclass(slots=True)
class Clock:
    """Progress of one stage inside the plan.

    `budget` seconds are counted from `start` (process start-up included); `reserve` of them are kept for what
    follows training. `span` is the stage's part of the plan. Progress runs from the first call of `begin` to
    the deadline.
    """

    budget: float
    reserve: float
    span: tuple[float, float]
    now: Callable[[], float] = time.monotonic
    start: float | None = None
    _begun: float = field(default=0.0)

    def __post_init__(self) -> None:
        if self.start is None:
            self.start = self.now()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        assert self.start is not None
        return self.now() - self.start

    @property
    def deadline(self) -> float:
        """Seconds after the start at which training stops."""
        return max(0.0, self.budget - self.reserve)

    def begin(self) -> None:
        """Marks the end of start-up: the schedule covers the time from here to the deadline."""
        self._begun = self.elapsed

    def progress(self) -> float:
        """Progress of the whole plan in [span[0], span[1]]."""
        low, high = self.span
        part = (self.elapsed - self._begun) / max(1e-6, self.deadline - self._begun)
        return low + (high - low) * min(1.0, max(0.0, part))

    def over(self) -> bool:
        """Whether training must stop now."""
        return self.elapsed >= self.deadline
