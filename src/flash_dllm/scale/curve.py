"""What a simulation takes as measured: the time of a step by busy slots, and the sizes of answers."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flash_dllm.scale.extras import ScaleError


@dataclass(frozen=True)
class Curve:
    """Time of one engine step by the number of busy slots.

    Attributes:
        busy: slots, rising from 1; seconds: of a step with so many, one each. In between, a straight line.
        seat_seconds: what a new request adds to its first step, for its sweep over the prompt.
        request_seconds: of a request outside the engine (HTTP, tokenizer), added to its latency.
        slots: of an engine; at most the last of ``busy``, since nothing is known beyond.

    Raises:
        ScaleError: the curve says nothing about some number of busy slots, or a time is not positive.
    """

    busy: tuple[int, ...]
    seconds: tuple[float, ...]
    slots: int
    seat_seconds: float = 0.0
    request_seconds: float = 0.0

    def __post_init__(self) -> None:
        if len(self.busy) != len(self.seconds) or list(self.busy) != sorted(set(self.busy)):
            raise ScaleError(f"curve: busy slots {list(self.busy)} must rise, with one time each")
        if not self.busy or self.busy[0] != 1:
            raise ScaleError(f"curve: busy slots {list(self.busy)} must start at 1")
        if not 1 <= self.slots <= self.busy[-1]:
            raise ScaleError(
                f"slots={self.slots}: the curve was measured from 1 to {self.busy[-1]} busy slots"
            )
        if not all(math.isfinite(s) and s > 0 for s in self.seconds):
            raise ScaleError(f"curve: step times {list(self.seconds)} must be positive")
        if not (self.seat_seconds >= 0 and self.request_seconds >= 0):
            raise ScaleError("curve: seat_seconds and request_seconds must not be negative")

    def step(self, busy: int) -> float:
        """Seconds of a step with ``busy`` slots."""
        at = bisect_left(self.busy, busy)
        if self.busy[at] == busy:
            return self.seconds[at]
        low, high = self.busy[at - 1], self.busy[at]
        share = (busy - low) / (high - low)
        return self.seconds[at - 1] * (1 - share) + self.seconds[at] * share

    def capacity(self, steps: float) -> float:
        """Requests a second that an engine answers while every slot is busy, at ``steps`` steps each."""
        return 1 / (steps * self.step(self.slots) / self.slots + self.seat_seconds)


@dataclass(frozen=True)
class Sizes:
    """Answers of a workload: engine steps and tokens of each, drawn with replacement.

    Raises:
        ScaleError: none, or one without a step.
    """

    steps: NDArray[np.int64]
    tokens: NDArray[np.int64]

    def __post_init__(self) -> None:
        if len(self.steps) == 0 or len(self.steps) != len(self.tokens):
            raise ScaleError("sizes: there is no answer")
        if self.steps.min() < 1 or self.tokens.min() < 0:
            raise ScaleError("sizes: an answer takes at least one step and has no negative number of tokens")

    @classmethod
    def of(cls, pairs: Sequence[Sequence[int]]) -> Sizes:
        """From (steps, tokens) of measured answers."""
        if not pairs:
            raise ScaleError("sizes: there is no answer")
        steps, tokens = zip(*pairs, strict=True)
        return cls(np.array(steps, np.int64), np.array(tokens, np.int64))

    @classmethod
    def assumed(cls, tokens: float, tpf: float, spread: float = 0.5) -> Sizes:
        """Log-normal answer lengths of a mean and a relative ``spread`` (standard deviation over mean).

        ``tpf``: tokens a step. 4,096 quantiles stand for the distribution, so nothing here is random.
        """
        if not (tokens >= 1 and tpf > 0 and 0 <= spread <= 10):
            raise ScaleError(
                f"tokens={tokens}, tpf={tpf}, spread={spread}: tokens from 1, tpf above 0, spread 0 to 10"
            )
        from statistics import NormalDist

        sigma = math.sqrt(math.log1p(spread**2))
        normal = [NormalDist().inv_cdf((i + 0.5) / 4096) for i in range(4096)] if sigma else [0.0]
        lengths = np.maximum(1, np.rint(tokens * np.exp(sigma * np.array(normal) - sigma**2 / 2)))
        return cls(np.ceil(lengths / tpf).astype(np.int64), lengths.astype(np.int64))

    def draw(self, count: int, random: np.random.Generator) -> Sizes:
        """``count`` answers."""
        picked = random.integers(len(self.steps), size=count)
        return Sizes(self.steps[picked], self.tokens[picked])


def read_curve(path: Path, method: str | None = None, slots: int | None = None) -> tuple[Curve, Sizes | None]:
    """A curve from a file, with the sizes of answers where the file has them.

    The file is either one of ``benchmarks/simulation.py``, or a report of ``flash-dllm bench step --json``, of which
    ``method`` picks the rows.

    Raises:
        ScaleError: neither, or several methods or prompt lengths to choose from.
    """
    data = _object(path)
    if data.get("kind") == "step":
        return _of_bench(path, data["rows"], method, slots), None
    try:
        raw = data["curve"]
        seconds = {int(busy): float(value) for busy, value in raw["step_seconds"].items()}
        busy = tuple(sorted(seconds))
        curve = Curve(
            busy, tuple(seconds[b] for b in busy), slots or busy[-1],
            float(raw.get("seat_seconds", 0.0)), float(raw.get("request_seconds", 0.0)),
        )  # fmt: skip
        return curve, Sizes.of(data["answers"]) if "answers" in data else None
    except (KeyError, TypeError, AttributeError, IndexError) as exc:
        raise ScaleError(f"{path}: no curve in it (bench step --json writes one): {exc}") from exc


def _of_bench(path: Path, rows: list[dict[str, Any]], method: str | None, slots: int | None) -> Curve:
    rows = [row for row in rows if row.get("ms") is not None]
    methods = sorted({row["method"] for row in rows})
    if method is None and len(methods) == 1:
        method = methods[0]
    if method not in methods:
        raise ScaleError(f"{path}: method={method!r}; the file has {', '.join(methods) or 'no finished row'}")
    rows = sorted((row for row in rows if row["method"] == method), key=lambda row: row["batch"])
    if len({row["prompt"] for row in rows}) > 1:
        raise ScaleError(f"{path}: several prompt lengths; measure the curve with one")
    # The sweep of one slot beside its steady step; the wall time, since the host is part of a step.
    first = rows[0]
    seat = max(0.0, first["first_pass_ms"] - first["wall_ms"]) / 1e3 / first["batch"]
    busy = tuple(row["batch"] for row in rows)
    return Curve(busy, tuple(row["wall_ms"] / 1e3 for row in rows), slots or busy[-1], seat)


def read_answers(path: Path) -> Sizes:
    """Sizes of the answers that ``flash-dllm batch`` wrote as JSON Lines.

    Raises:
        ScaleError: a line without usage.
    """
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            try:
                usage = json.loads(line)["usage"]
                pairs.append((int(usage["steps"]), int(usage["completion_tokens"])))
            except (ValueError, TypeError, KeyError) as exc:
                raise ScaleError(f"{path}:{number}: no answer with its usage") from exc
    return Sizes.of(pairs)


def _object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ScaleError(f"{path}: not JSON ({exc})") from exc
    if not isinstance(data, dict):
        raise ScaleError(f"{path}: must be a JSON object")
    return data
