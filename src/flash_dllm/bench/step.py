"""The time of one step by batch and prompt length, against the floor of its passes.

Every slot starts together; the first step sweeps all of them, the next ones run steadily. Times are taken between
events on the device without waiting in between, so that the host's own work is hidden if the engine hides it. The idle
share is that of the gaps between kernels as the profiler sees them. The first pass is timed as it comes, with whatever
is compiled on the way, and after the steps (the median of three where they are short).
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from flash_dllm.bench.floors import Ceilings, Work, pass_floor
from flash_dllm.bench.synthetic import Setting, engine_for, request
from flash_dllm.bench.timing import (
    BenchError,
    Timing,
    gib,
    peak_gib,
    profile,
    reset_peak,
    synchronize,
)
from flash_dllm.engine.engine import Engine
from flash_dllm.models.layers import Model

WARM_UP = 5
PROFILED = 3
REPEATED, SHORT = 3, 500.0
"""First passes that are timed after the steps, where one is shorter than so many ms: short ones vary with the host."""


@dataclass(frozen=True)
class Place:
    """One point of the table: slots, prompt and answer length, and how many steps are timed."""

    batch: int
    prompt: int
    answer: int
    steps: int = 20


def measure_step(setting: Setting, model: Model, place: Place, ceilings: Ceilings) -> dict[str, Any]:
    """Time of the first pass and of a steady step.

    Raises:
        BenchError: the answer is too short for so many steps at the forced pace.
    """
    device = model.device
    pace = (setting.commits or 1.0) + setting.accepts
    needed = pace * (WARM_UP + place.steps + PROFILED + 2)
    if needed + 64 > place.answer:
        raise BenchError(
            f"answer={place.answer}: {place.steps} steps at {pace} tokens need {int(needed) + 64}"
        )
    reset_peak(device)
    engine = engine_for(setting, model, place.batch, place.prompt + place.answer)
    began = time.perf_counter()
    for _ in engine.warm_up():
        pass
    synchronize(device)
    warm_up = time.perf_counter() - began
    cold = _first_pass(engine, setting, place)
    for _ in range(WARM_UP):
        engine.step()
    timing, wall, host = timed_steps(engine, place.steps, device)
    rows, passes = _cost(engine)
    seen = profile(engine.step, device, PROFILED)
    firsts = [_first_pass(engine, setting, place)]
    while len(firsts) < REPEATED and firsts[0] < SHORT:
        firsts.append(_first_pass(engine, setting, place))
    first = statistics.median(firsts)
    floors = _floors(setting, model, place, rows, ceilings)
    return {
        **setting.row(), "batch": place.batch, "prompt": place.prompt, "answer": place.answer,
        **timing.row(), "wall_ms": round(wall, 4), "host_ms": round(host, 4), **floors, "passes": passes,
        "times_floor": round(timing.ms / floors["floor_ms"], 2), "first_pass_ms": round(first, 3),
        "first_pass_cold_ms": round(cold, 3), "warm_up_s": round(warm_up, 3), "peak_gib": peak_gib(device),
        "weights_gib": gib(sum(t.numel() * t.element_size() for t in model.tensors())),
        "kv_gib": gib(engine.decoder.ctx.kv.nbytes),
        "idle_share": seen.idle_share if seen else None,
        "kernels_a_step": round(seen.kernels, 1) if seen else None, "top_kernels": seen.top if seen else None,
    }  # fmt: skip


def _first_pass(engine: Engine, setting: Setting, place: Place) -> float:
    """Fill every slot anew and time the step that sweeps them all, in ms."""
    device = engine.model.device
    for slot in engine.scheduler.main_slots():
        seated = engine.scheduler.seated[slot]
        assert seated is not None
        engine.abort(seated.id)
    made = random.Random(0)
    for index in range(place.batch):
        engine.add(request(setting.config, str(index), place.prompt, place.answer, place.answer, made))
    synchronize(device)
    began = time.perf_counter()
    engine.step()
    synchronize(device)
    return 1e3 * (time.perf_counter() - began)


def timed_steps(engine: Engine, steps: int, device: torch.device) -> tuple[Timing, float, float]:
    """Time of each step on the device, and means over all of them: wall time, and time until ``step`` returned (ms)."""
    marks, host = [_mark(device)], 0.0
    synchronize(device)
    began = time.perf_counter()
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        host += time.perf_counter() - start
        marks.append(_mark(device))
    synchronize(device)
    wall = 1e3 * (time.perf_counter() - began) / steps
    gaps = [_between(a, b) for a, b in pairwise(marks)]
    return Timing.of(gaps), wall, 1e3 * host / steps


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(a: Any, b: Any) -> float:
    return float(a.elapsed_time(b)) if hasattr(a, "elapsed_time") else 1e3 * (b - a)


def _cost(engine: Engine) -> tuple[list[int], int]:
    """Rows of each pass of one more step, over all slots, and how many passes it had."""
    seen: list[int] = []
    former = engine.observer

    def look(_: Engine, record: Any) -> None:
        seen.extend(int(p.recomputed.sum()) for p in record.passes)

    engine.observer = look
    engine.step()
    engine.observer = former
    return seen, len(seen)


def _floors(
    setting: Setting, model: Model, place: Place, rows: list[int], ceilings: Ceilings
) -> dict[str, Any]:
    """Floors of a steady step, pass by pass, and of the first pass."""
    config, size = setting.config, model.embed.element_size()
    keys, reads = place.prompt + place.answer, 16 * place.batch

    def floor(count: int) -> float:
        return pass_floor(config, Work(place.batch, count, keys, min(reads, count)), ceilings, size)

    steady = [floor(count) for count in rows]
    return {
        "rows": rows, "floor_ms": round(sum(steady), 4),
        "first_pass_floor_ms": round(floor(place.batch * keys), 4),
    }  # fmt: skip
