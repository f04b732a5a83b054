r"""The queueing simulation against a measured server: one engine on the CPU, Poisson load, several loads.

    python benchmarks/simulation.py --output benchmarks/results/simulation-cpu.json
    python benchmarks/simulation.py --pace 0.2,0.05 --tokens 20 --loads 0.5,0.8 --requests 100 --steps 20 \
      --output benchmarks/results/simulation-paced.json

First the time of a step by busy slots is measured in this process, and the steps of every prompt's answer. Then a
server process gets an open-loop load, and the simulation, which knows only the curve, the steps and the arrival times,
predicts the latencies. The curve is measured before and after each load, since other programs may share the machine;
the mean of the two is what the simulation gets.

``--pace FIRST,MORE`` lets every step of the engine, here and in the server, wait until it has taken FIRST seconds and
MORE for every further busy slot. Then little depends on how busy the machine is, and what is left is an error of the
queueing model: the real server and its clients, the real engine and its slots, steps of known length.

``own_steps`` is the same with the curve stretched until a mean step takes as long as the server says that its steps did
during the load. It is no prediction; it tells an error of the queueing model from one of the curve.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flash_dllm import LLM, SamplingParams
from flash_dllm.bench.ablations import problem_set
from flash_dllm.bench.facts import facts
from flash_dllm.bench.serve import Target, arrivals, measure_serve
from flash_dllm.cli import main as command_line
from flash_dllm.core.step import Decoder
from flash_dllm.core.types import Lanes
from flash_dllm.scale.curve import Curve, Sizes
from flash_dllm.scale.simulate import Fleet, Trace, simulate

MODEL = "flash-dllm/tiny-dream"
RUNS = 200
"""Simulated loads of the same length, for the range in which a measured percentile may fall by chance."""


def prompts(count: int) -> list[str]:
    """Word problems that the model was not trained on."""
    return [sample.messages[-1][1] for sample in problem_set("gsm", count, 0) if sample.messages]


def slow_down(pace: str | None) -> None:
    """Let steps take FIRST seconds, and MORE for every further busy slot."""
    if pace is None:
        return
    first, more = map(float, pace.split(","))
    plain = Decoder.step

    def step(self: Decoder, lanes: Lanes) -> Any:
        began = time.perf_counter()
        record = plain(self, lanes)
        busy = len(lanes.run) + len(lanes.sweep)
        time.sleep(max(0.0, first + more * (busy - 1) - (time.perf_counter() - began)))
        return record

    Decoder.step = step  # type: ignore[method-assign]


def step_seconds(llm: LLM, talks: list[Any], params: SamplingParams, busy: int, steps: int) -> float:
    """Mean time of ``steps`` engine steps with ``busy`` slots, whose requests are replaced as they end."""
    engine, seconds, done, at = llm.engine, 0.0, 0, 0
    while done < steps:
        while len(engine.scheduler.busy) + len(engine.scheduler.queue) < busy:
            for request in llm.job(talks[at % len(talks)], params).requests:
                engine.add(request)
            at += 1
        began = time.perf_counter()
        engine.step()
        seconds += time.perf_counter() - began
        done += 1
    for request in [*engine.scheduler.queue, *filter(None, engine.scheduler.seated)]:
        engine.abort(request.id)
    return seconds / steps


def measure_curve(llm: LLM, talks: list[Any], params: SamplingParams, steps: int) -> dict[int, float]:
    """Seconds of a step for every number of busy slots; in small turns, so that a disturbance meets all alike."""
    turns = 4
    found: dict[int, list[float]] = {busy: [] for busy in range(1, llm.max_num_seqs + 1)}
    for _ in range(turns):
        for busy in found:
            found[busy].append(step_seconds(llm, talks, params, busy, steps // turns))
    return {busy: statistics.fmean(values) for busy, values in found.items()}


@contextmanager
def server(slots: int, pace: str | None) -> Iterator[str]:
    """A server process; gives its address."""
    command = [sys.executable, __file__, "serve", pace or "", MODEL, "--device", "cpu", "--port", "0"]
    command += ["--max-num-seqs", str(slots), "--max-queue", "100000"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            while True:
                log.seek(0)
                text = log.read()
                if found := re.search(r"on (http://127\.0\.0\.1:\d+)", text):
                    break
                if process.poll() is not None:
                    raise SystemExit(f"the server ended:\n{text}")
                time.sleep(0.1)
            yield found[1]
        finally:
            process.terminate()
            process.wait(60)


def percentiles(values: Any) -> dict[str, float]:
    return {
        "p50": round(float(np.percentile(values, 50)), 4),
        "p99": round(float(np.percentile(values, 99)), 4),
    }


def trace_of(sizes: Sizes, rate: float, count: int, seed: int) -> Trace:
    """The arrivals and answers of a measured load."""
    order = np.arange(count) % len(sizes.steps)
    return Trace(np.array(arrivals(rate, count, seed)), Sizes(sizes.steps[order], sizes.tokens[order]))


def predict(curve: Curve, sizes: Sizes, rate: float, count: int, seed: int) -> dict[str, Any]:
    """Latencies by simulation: with the arrivals and answers of the measured load, and by chance."""
    outcome = simulate(Fleet(1, curve), trace_of(sizes, rate, count, seed))
    runs = [
        percentiles(simulate(Fleet(1, curve), Trace.poisson(rate, count, sizes, s)).latency)
        for s in range(RUNS)
    ]

    def span(name: str) -> list[float]:
        values = [run[name] for run in runs]
        return [round(float(np.percentile(values, share)), 4) for share in (2.5, 97.5)]

    return {
        **percentiles(outcome.latency), "busy": round(outcome.busy, 4),
        "queued": percentiles(outcome.queued), "p50_by_chance": span("p50"), "p99_by_chance": span("p99"),
    }  # fmt: skip


def step_totals(url: str) -> tuple[float, int]:
    """Seconds and number of all steps so far, as the server counts them."""
    import httpx

    text = httpx.get(f"{url}/metrics", trust_env=False).text
    seconds, count = (
        sum(
            float(v) for v in re.findall(rf"^flash_dllm_step_seconds_{what}{{.*}} (\S+)$", text, re.MULTILINE)
        )
        for what in ("sum", "count")
    )
    return seconds, int(count)


def stretched(curve: Curve, trace: Trace, seconds: float) -> dict[str, float]:
    """Latencies with the curve stretched until the mean step takes ``seconds``."""
    factor = 1.0
    for _ in range(12):
        longer = replace(curve, seconds=tuple(factor * s for s in curve.seconds))
        outcome = simulate(Fleet(1, longer), trace)
        factor *= seconds / (outcome.stepping / outcome.steps)
    return {**percentiles(outcome.latency), "factor": round(factor, 3)}


def idle_overhead(target: Target, texts: list[str], steps: list[int], step: float) -> float:
    """Seconds of a request outside the engine: one at a time, less its steps."""
    over = []
    for text, count in list(zip(texts, steps, strict=True))[:12]:
        seen = measure_serve(target, [text], float("inf"), 1)
        over.append(seen["last_token_s"]["p50"] - count * step)
    # The least: whatever else the machine did only adds.
    return max(0.0, min(over))


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        slow_down(sys.argv[2] or None)
        sys.argv[1:] = ["serve", *sys.argv[3:]]
        command_line()
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--loads", default="0.3,0.6,0.85", help="shares of the capacity that the curve predicts"
    )
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--steps", type=int, default=80, help="timed steps for each number of busy slots")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer, at most")
    parser.add_argument("--pace", help="FIRST,MORE seconds of a step; default: as long as it takes")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    params = SamplingParams(max_tokens=options.tokens)
    texts = prompts(60)
    talks = [[{"role": "user", "content": text}] for text in texts]
    llm = LLM(MODEL, device="cpu", max_num_seqs=options.slots)
    answers = [out.outputs[0] for out in llm.chat(talks, params, use_tqdm=False)]
    sizes = Sizes.of([(a.steps, len(a.token_ids)) for a in answers])

    slow_down(options.pace)

    def curve_now() -> dict[int, float]:
        return measure_curve(llm, talks, params, options.steps)

    rows, curves, overheads = [], [curve_now()], []
    with server(options.slots, options.pace) as url:
        target = Target(url, max_tokens=options.tokens)
        measure_serve(target, texts, float("inf"), 4)
        for load in map(float, options.loads.split(",")):
            before = curve_now()
            overheads.append(idle_overhead(target, texts, sizes.steps.tolist(), before[1]))
            assumed = Curve(tuple(before), tuple(before.values()), options.slots)
            rate = round(load * assumed.capacity(float(sizes.steps.mean())), 4)
            seed = len(rows)
            start = step_totals(url)
            seen = measure_serve(target, texts, rate, options.requests, seed)
            end = step_totals(url)
            after = curve_now()
            curves += [before, after]
            mean = {busy: (before[busy] + after[busy]) / 2 for busy in before}
            curve = Curve(tuple(mean), tuple(mean.values()), options.slots, 0.0, overheads[-1])
            predicted = predict(curve, sizes, rate, options.requests, seed)
            step = (end[0] - start[0]) / (end[1] - start[1])
            measured = {name: seen["last_token_s"][name] for name in ("p50", "p99")}
            rows.append({
                "load": load, "rate": rate, "requests": options.requests, "failed": seen["failed"],
                "measured": measured, "predicted": predicted,
                "error_percent": {n: round(100 * (predicted[n] / measured[n] - 1), 1) for n in measured},
                "own_steps": stretched(curve, trace_of(sizes, rate, options.requests, seed), step),
                "curve_before_after_percent": round(100 * (after[options.slots] / before[options.slots] - 1), 1),
                "sent_late_s": seen["sent_late_s"],
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    overall = {str(b): round(statistics.fmean(c[b] for c in curves), 6) for b in curves[0]}
    report = {
        "kind": "simulation", **facts("cpu", torch.float32, synthetic=False), "model": MODEL,
        "method": llm.method.name, "max_tokens": options.tokens, "pace": options.pace, "slots": options.slots,
        "threads": 1,
        "note": "open-loop streamed chat requests over loopback; server and client share a machine with other programs",
        "curve": {
            "step_seconds": overall, "seat_seconds": 0.0, "request_seconds": round(statistics.fmean(overheads), 5),
        },
        "answers": [[a.steps, len(a.token_ids)] for a in answers],
        "rows": rows,
    }  # fmt: skip
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
