"""Timing that holds on a GPU and on a CPU: warm-up, a cold cache where it matters, median and spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_dllm.bench.stats import at
from flash_dllm.errors import FlashDLLMError

FLUSH_BYTES = 256 * 2**20
"""More than the last-level cache of any GPU that this runs on (an H200 has 50 MiB)."""


class BenchError(FlashDLLMError):
    """A measurement that cannot be made as asked; the message names what is wrong."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds over ``repeats`` runs: median, 10th and 90th percentile."""

    ms: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, values: list[float]) -> Timing:
        ordered = sorted(values)
        return cls(statistics.median(ordered), at(ordered, 0.1), at(ordered, 0.9), len(ordered))

    def row(self) -> dict[str, Any]:
        return {
            "ms": round(self.ms, 5), "ms_low": round(self.low, 5), "ms_high": round(self.high, 5),
            "repeats": self.repeats,
        }  # fmt: skip


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Timer:
    """Times functions on one device.

    Args:
        device: where the functions work.
        repeats: timed runs of each.
        warm_up: runs before them, which pay for compilation, handles and allocation.
    """

    def __init__(self, device: torch.device, repeats: int = 30, warm_up: int = 5) -> None:
        self.device, self.repeats, self.warm_up = device, repeats, warm_up
        self._flush: Tensor | None = None

    def __call__(self, fn: Callable[[], object], cold: bool = True) -> Timing:
        """Time ``fn``.

        Args:
            cold: on a GPU, overwrite the last-level cache before each run, so that inputs come from memory as they do
                inside a model. The overwriting also keeps the queue full: the time of a launch is not in the result.
        """
        for _ in range(self.warm_up):
            fn()
        synchronize(self.device)
        if self.device.type != "cuda":
            return Timing.of([self._wall(fn) for _ in range(self.repeats)])
        pairs = [self._events(fn, cold) for _ in range(self.repeats)]
        synchronize(self.device)
        return Timing.of([start.elapsed_time(end) for start, end in pairs])

    def _wall(self, fn: Callable[[], object]) -> float:
        began = time.perf_counter()
        fn()
        return 1e3 * (time.perf_counter() - began)

    def _events(self, fn: Callable[[], object], cold: bool) -> tuple[Any, Any]:
        if cold:
            if self._flush is None:
                self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)
            self._flush.zero_()
            # Work for about half a millisecond, so that all launches of ``fn`` are queued before the first starts.
            torch.cuda._sleep(1_000_000)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        fn()
        end.record()
        return start, end


@dataclass(frozen=True)
class Profile:
    """What a GPU did while ``runs`` calls were profiled.

    Attributes:
        busy_ms: time a call in which at least one kernel or copy ran.
        idle_share: share of the time from the first one's start to the last one's end in which none ran. The profiler
            can only make gaps longer. Time without it is no measure: under load the clock changes by more than the
            gaps are long.
        kernels: launches a call.
        top: (name, ms a call) of the longest, longest first.
    """

    busy_ms: float
    idle_share: float
    kernels: float
    top: list[tuple[str, float]]


def profile(fn: Callable[[], object], device: torch.device, runs: int = 3, most: int = 15) -> Profile | None:
    """Profile ``runs`` calls; None where there is no GPU or the profiler sees no kernel."""
    if device.type != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    synchronize(device)
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(runs):
            fn()
        synchronize(device)
    events = [e for e in seen.events() or [] if e.device_type.name == "CUDA"]
    spans = [(float(e.time_range.start), float(e.time_range.end)) for e in events]
    if not spans:
        return None
    by_name: dict[str, float] = {}
    for event, (start, end) in zip(events, spans, strict=True):
        by_name[event.name] = by_name.get(event.name, 0.0) + (end - start) / 1e3 / runs
    top = sorted(by_name.items(), key=lambda pair: -pair[1])[:most]
    return Profile(
        covered(spans) / 1e3 / runs,
        idle_share(spans),
        len(spans) / runs,
        [(n, round(ms, 4)) for n, ms in top],
    )


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def idle_share(spans: list[tuple[float, float]]) -> float:
    """Share of the time from the first start to the last end that no interval covers."""
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    return round(1 - covered(spans) / whole, 4) if whole else 0.0


def gib(count: float) -> float:
    """Bytes in GiB."""
    return round(count / 2**30, 3)


def reset_peak(device: torch.device) -> None:
    """Forget the highest memory use so far (GPU only)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float:
    """Most memory in use: of the GPU since :func:`reset_peak`, else of the whole process since its start."""
    from flash_dllm.bench.measure import peak_memory

    return gib(peak_memory(device))
