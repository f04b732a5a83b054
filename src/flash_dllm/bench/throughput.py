"""Many requests through the engine: tokens a second, latency and memory, with refills as they come.

Counting: answer tokens; every pass counts; time runs from the first request's arrival (all arrive at once) to the last
answer's end. Loading the model is not in it; there is no text, so no tokenising either.
"""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from flash_dllm.bench.stats import quantiles
from flash_dllm.bench.synthetic import Setting, engine_for, request
from flash_dllm.bench.timing import BenchError, peak_gib, profile, reset_peak, synchronize
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.request import Finished, Request
from flash_dllm.models.layers import Model

PROFILED = 5

PARTS = ("fusion", "selective refresh", "refill")
"""What :func:`without` can switch off."""


def without(setting: Setting, part: str) -> Setting:
    """A setting over ``flash`` with one of :data:`PARTS` switched off.

    That is: the definitions instead of fused kernels; every position recomputed in every pass; or new requests seated
    only when all slots are free.

    Raises:
        BenchError: no such part, or a cache that does not refresh selectively.
    """
    if part == "fusion":
        return replace(setting, impl="ref")
    if part == "refill":
        return replace(setting, gang=True)
    if part != "selective refresh" or not setting.method.startswith("flash"):
        raise BenchError(
            f"{setting.method} without {part!r}: flash methods without one of {', '.join(PARTS)}"
        )
    return replace(setting, options={**setting.options, "track": -1})


@dataclass(frozen=True)
class Load:
    """Requests: how many, prompt and answer lengths (uniform, both ends included), canvas room behind the prompt.

    The room is longer than the answer, as where nobody knows how long an answer will be.
    """

    requests: int = 64
    prompt: tuple[int, int] = (850, 1099)
    answer: tuple[int, int] = (96, 256)
    room: int = 512
    seed: int = 0

    def check(self) -> None:
        """Raises BenchError where a range is empty or an answer does not fit."""
        for name, (low, high) in (("prompt", self.prompt), ("answer", self.answer)):
            if not 1 <= low <= high:
                raise BenchError(f"{name}={low}-{high}: from at least 1 up to the larger")
        if self.answer[1] > self.room:
            raise BenchError(f"answer={self.answer[1]}: longer than the room of {self.room} positions")

    def build(self, setting: Setting) -> list[Request]:
        made = random.Random(self.seed)
        return [
            request(
                setting.config,
                str(i),
                made.randint(*self.prompt),
                made.randint(*self.answer),
                self.room,
                made,
            )
            for i in range(self.requests)
        ]


WORKLOAD = Load()
"""64 prompts of 850-1,099 tokens, answers of 96-256 tokens; meant for 32 slots at three commits a step."""


def pace_of(method: str) -> tuple[float, float]:
    """The pace that :data:`WORKLOAD` is measured at: tokens a step by confidence, and drafts accepted a step."""
    return (2.0, 2.0) if method.endswith(("+verify", "+branch")) else (3.0, 0.0)


def measure_load(
    setting: Setting, model: Model, slots: int, load: Load, runs: int = 2
) -> list[dict[str, Any]]:
    """Send the same requests ``runs`` times through one engine, after its warm-up and one request.

    The first run pays for whatever the warm-up did not meet (kernels for other row counts, captured graphs); the
    difference to the last one is its penalty.
    """
    load.check()
    engine = engine_for(setting, model, slots, load.prompt[1] + load.room)
    began = time.perf_counter()
    for _ in engine.warm_up():
        pass
    _drain(engine, Load(1, load.prompt, (4, 4), load.room, load.seed + 1).build(setting), setting.gang)
    warm_up = time.perf_counter() - began
    rows = [_once(setting, engine, model, load, slots, index, warm_up) for index in range(runs)]
    rows[-1]["idle_share"] = _idle(setting, engine, model, load)
    rows[0]["first_run_penalty_s"] = round(rows[0]["seconds"] - rows[-1]["seconds"], 3)
    return rows


def _once(
    setting: Setting, engine: Engine, model: Model, load: Load, slots: int, run: int, warm_up: float
) -> dict[str, Any]:
    reset_peak(model.device)
    steps = engine.totals.steps, engine.totals.passes
    requests = load.build(setting)
    synchronize(model.device)
    began = time.perf_counter()
    done, times = _drain(engine, requests, setting.gang)
    synchronize(model.device)
    seconds = time.perf_counter() - began
    tokens = sum(f.end - f.request.canvas.first for f in done)
    nfe = sum(f.nfe for f in done)
    took = engine.totals.steps - steps[0]
    return {
        **setting.row(), "batch": slots, **asdict(load), "run": run, "warm_up_s": round(warm_up, 3),
        "answer_tokens": tokens, "seconds": round(seconds, 4), "tokens_per_second": round(tokens / seconds, 2),
        "nfe": nfe, "tokens_per_forward": round(tokens / nfe, 4), "steps": took,
        "passes": engine.totals.passes - steps[1], "ms": round(1e3 * seconds / took, 4),
        "step_ms": _rounded(quantiles([1e3 * t for t in times])),
        "latency_s": _rounded(quantiles([f.queued + f.seconds for f in done])),
        "queued_s": _rounded(quantiles([f.queued for f in done])),
        "peak_gib": peak_gib(model.device), "idle_share": None,
        "failed": sum(f.error is not None for f in done),
    }  # fmt: skip


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


def _drain(engine: Engine, requests: list[Request], gang: bool) -> tuple[list[Finished], list[float]]:
    """Run requests to their end; ``gang`` adds the next ones only when every slot is free."""
    waiting, done, times = list(requests), [], []
    while waiting or not engine.idle:
        if waiting and (not gang or engine.idle):
            batch = waiting[: engine.slots] if gang else waiting
            waiting = waiting[len(batch) :]
            for item in batch:
                engine.add(item)
        began = time.perf_counter()
        done += engine.step()
        times.append(time.perf_counter() - began)
    return done, times


def _idle(setting: Setting, engine: Engine, model: Model, load: Load) -> float | None:
    """Idle share of steady steps with every slot busy, profiled apart."""
    if model.device.type != "cuda":
        return None
    for item in Load(engine.slots, load.prompt, load.answer, load.room, load.seed + 2).build(setting):
        engine.add(item)
    for _ in range(3):
        engine.step()
    seen = profile(engine.step, model.device, PROFILED)
    for slot in engine.scheduler.main_slots():
        seated = engine.scheduler.seated[slot]
        if seated is not None:
            engine.abort(seated.id)
    return seen.idle_share if seen else None
