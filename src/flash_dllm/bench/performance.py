"""docs/performance.md: the speed that is aimed for at the 8B shape, and what was measured, from the JSON files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flash_dllm.bench.markdown import Source, link, read, table
from flash_dllm.bench.results_tables import load_name

BATCHES = (1, 8, 16, 32)
PROMPT = 1000
NOT_YET = "not measured yet"
Row = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """One line of the table, an entry a batch size.

    ``most`` is the aim, ``stretch`` what arithmetic and bandwidth would allow, ``released`` what the released code took
    on the same kind of card; ``value`` takes the measured number from a row of ``bench step`` by ``method``.
    """

    name: str
    unit: str
    method: str
    value: Callable[[Row], float | None]
    most: tuple[float, ...]
    stretch: tuple[float | None, ...]
    released: tuple[str | None, ...]


def _ms(row: Row) -> float | None:
    found: float | None = row["ms"]
    return found


def _idle(row: Row) -> float | None:
    return None if row["idle_share"] is None else 100 * row["idle_share"]


STEPS = (
    Target(
        "denoise step", "ms", "flash+threshold", _ms, (6.0, 25, 50, 96), (4.6, 22, 45, 84),
        ("17.7-20.8", "56.5", "106", "211"),
    ),
    Target(
        "denoise + verify", "ms", "flash+verify", _ms, (11, 34, 65, 122), (8.6, 29, 57, 105),
        ("34-35", "74.9", "141", "279"),
    ),
    Target(
        "folded branch step (K = 4, 2, 2, 2)", "ms", "flash+branch", _ms, (7.2, 31, 62, 119), (6, 28, 56, 105),
        (None, None, None, None),
    ),
    Target(
        "first pass", "ms", "flash+threshold", lambda row: row.get("first_pass_ms"), (33, 265, 530, 1060),
        (None, None, None, 980), ("71", "572", "1170", "2337"),
    ),
    Target(
        "peak memory", "GiB", "flash+threshold", lambda row: row["peak_gib"], (16.5, 22.5, 29, 41.5),
        (None, None, None, None), ("16.1", "24.1", "33.3", "51.6"),
    ),
    Target(
        "GPU idle share of a step", "%", "flash+threshold", _idle, (5, 3, 3, 3), (None, None, None, None),
        ("37-47", None, None, "8"),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Single:
    """A number of its own, from ``bench kernels`` or ``bench workload``: an aim that is a ceiling or a floor."""

    name: str
    unit: str
    aim: float
    at_least: bool
    released: str
    file: str
    value: Callable[[list[Row]], float | None]


def _kernel(op: str, divide: int = 1, **size: int) -> Callable[[list[Row]], float | None]:
    def value(rows: list[Row]) -> float | None:
        times = [
            r["ms"] for r in rows
            if r["op"] == op and r.get("ms") and not r["impl"].startswith(("library", "ref"))
            and all(r.get(k) == v for k, v in size.items())
        ]  # fmt: skip
        return min(times) / divide if times else None

    return value


def _warm(name: str) -> Callable[[list[Row]], float | None]:
    def value(rows: list[Row]) -> float | None:
        mine = [
            r for r in rows if r["method"] == "flash+threshold" and r["refill"] and r.get(name) is not None
        ]
        return mine[-1][name] if mine else None

    return value


SINGLES = (
    Single(
        "QKV projection, rotation and cache write, 4,096 rows", "ms", 0.62, False, "2.14", "kernels",
        _kernel("qkv_rope_write", rows=4096),
    ),
    Single(
        "the same, 128 rows", "ms", 0.042, False, "0.096", "kernels", _kernel("qkv_rope_write", rows=128),
    ),
    Single(
        "attention of one layer, 32 slots, score included", "ms", 0.35, False, "1.08", "kernels",
        _kernel("row_attention", slots=32, score=1),
    ),
    Single(
        "whole workload, warm", "answer tokens/s", 800, True, "376", "workload", _warm("tokens_per_second"),
    ),
    Single(
        "whole workload, what the first run after the warm-up costs more", "s", 2, False, "33", "workload",
        _warm("first_run_penalty_s"),
    ),
)  # fmt: skip

HEAD = """# Performance

Written by `flash-dllm bench report` from the files of [benchmarks/results](../benchmarks/results); do not edit.

What is aimed for and what was measured at the shape of LLaDA-8B in bfloat16 on one NVIDIA H200: prompt 1,000 tokens,
512 masked positions behind it, 16 candidates, 48 look-ahead and 64 tracked rows a slot, 32 rows in a verify pass.
Weights are random and the commit rate is set: these are times of a shape, synthetic, and say nothing of answers.

The aims are not limits of the hardware. *Stretch* is what the pass costs if every weight is read once at the copy
rate and every product runs at the rate of a large matrix product, both measured on that card; attention and what cannot
be hidden are added. In brackets: the released code of Flash-dLLM (VILA-Lab/Flash-dLLM, commit 7437a55), measured on the
same kind of card with the same shape, its host loop included.

What is missed, why, and what the next 10 % would take: [benchmarks/kernels.md](../benchmarks/kernels.md).
"""


def page(results: Path, docs: Path) -> str:
    """The text of docs/performance.md."""
    names = ("step", "kernels", "workload", "throughput", "step-deterministic", "split-step", "shares")
    files = [read(results / f"{name}-h200.json") for name in names]
    step, kernels, workload, throughput, exact, split, shares = files
    parts = [HEAD, "## A step by number of slots\n", _steps(step), "## Single numbers\n"]
    parts.append(_singles({"kernels": kernels, "workload": workload}))
    parts += [*_throughput(throughput), *_deterministic(step, exact), *_split(split), *_shares(shares)]
    parts.append("## How it is measured\n\n" + _how([s for s in files if s], docs))
    return "\n".join(parts)


def _steps(source: Source | None) -> str:
    rows = []
    for target in STEPS:
        rows.append([f"**{target.name}**, {target.unit}", *(_aim(target, i) for i in range(len(BATCHES)))])
        rows.append(["measured", *(_measured(target, i, source) for i in range(len(BATCHES)))])
    return table(["", *(f"{b} slots" if b > 1 else "1 slot" for b in BATCHES)], rows)


def _aim(target: Target, index: int) -> str:
    text = f"<= {target.most[index]:g}"
    if (stretch := target.stretch[index]) is not None:
        text += f", stretch {stretch:g}"
    released = target.released[index]
    return text + (f" [{released}]" if released else "")


def _measured(target: Target, index: int, source: Source | None) -> str:
    if source is None:
        return NOT_YET
    for row in source.data["rows"]:
        if (row["method"], row["batch"], row["prompt"]) == (target.method, BATCHES[index], PROMPT):
            value = target.value(row)
            if value is None:
                return NOT_YET
            missed = " (missed)" if value > target.most[index] else ""
            floor = f", {row['times_floor']:g} x floor" if target.value is _ms else ""
            return f"{value:.4g}{missed}{floor}"
    return NOT_YET


def _singles(sources: dict[str, Source | None]) -> str:
    rows = []
    for single in SINGLES:
        source = sources[single.file]
        value = single.value(source.data["rows"]) if source else None
        sign = ">=" if single.at_least else "<="
        shown = NOT_YET
        if value is not None:
            missed = value < single.aim if single.at_least else value > single.aim
            shown = f"{value:.4g}{' (missed)' if missed else ''}"
        rows.append([single.name, f"{sign} {single.aim:g} {single.unit} [{single.released}]", shown])
    return table(["", "aim", "measured"], rows)


def _throughput(source: Source | None) -> list[str]:
    if source is None:
        return []
    first = source.data["rows"][0]
    prompt, answer = first["prompt"], first["answer"]
    told = (
        f"{first['requests']} requests at once, prompts of {prompt[0]} to {prompt[1]} tokens, answers of {answer[0]} "
        f"to {answer[1]}, {first['commit_per_step']:g} commits a step forced. A latency runs from the arrival of all.\n"
    )
    rows = [
        [
            str(r["batch"]), f"{r['tokens_per_second']:.4g}", f"{r['latency_s']['p50']:.3g}",
            f"{r['latency_s']['p99']:.3g}", f"{r['peak_gib']:.4g}",
        ]
        for r in source.data["rows"]
    ]  # fmt: skip
    columns = ["slots", "answer tokens/s", "latency p50, s", "p99, s", "peak GiB"]
    return ["## Requests over slots\n", told, table(columns, rows)]


def _deterministic(usual: Source | None, exact: Source | None) -> list[str]:
    if usual is None or exact is None:
        return []
    told = "`deterministic=True` takes one tile for any number of rows in every op, and no product of the library's.\n"
    known = {(r["method"], r["batch"], r["prompt"]): r["ms"] for r in usual.data["rows"]}
    rows = []
    for r in exact.data["rows"]:
        if (before := known.get((r["method"], r["batch"], r["prompt"]))) is None:
            continue
        rows.append(
            [r["method"], str(r["batch"]), f"{before:.4g}", f"{r['ms']:.4g}", f"{r['ms'] / before:.2f}"]
        )
    columns = ["method", "slots", "ms", "deterministic, ms", "times as long"]
    return ["## A step whose bits do not depend on the batch\n", told, table(columns, rows)]


SPLIT = """*plain* is bfloat16; with two GPUs each holds a part of every matrix, and the memory is that of one of them.
Weights are random. [scaling.md](scaling.md) says how it was run and what follows from it.
"""


def _split(source: Source | None) -> list[str]:
    if source is None:
        return []
    rows = [
        [
            str(r["gpus"]), r["form"], r["method"], str(r["batch"]), f"{r['ms']:.4g}", f"{r['peak_gib']:.4g}"
        ]
        for r in source.data["rows"]
    ]  # fmt: skip
    columns = ["GPUs", "weights", "method", "slots", "ms", "peak GiB"]
    return ["## A step over GPUs, and with weights in 8 bits\n", SPLIT, table(columns, rows)]


def _shares(source: Source | None) -> list[str]:
    if source is None:
        return []
    warm = [r for r in source.data["rows"] if r["run"] == 1]
    slots, requests = warm[0]["batch"], warm[0]["requests"]
    told = f"{requests} requests over {slots} slots, everything on and then each part switched off alone; warm run.\n"
    rows = [[load_name(r), f"{r['seconds']:.2f}", f"{r['seconds'] / warm[0]['seconds']:.2f}"] for r in warm]
    return ["## What each part gives\n", told, table(["", "seconds", "times as long"], rows)]


HOW = """\
* `flash-dllm bench step`: every slot starts together; the first step sweeps all of them, and is timed again at the
  end, when everything is compiled. In between, after five steps of warm-up, the median of the next ones is taken,
  from events on the device, with nothing waiting. The idle share is that of the time in which no kernel ran, seen by
  the profiler in further steps.
* `flash-dllm bench kernels`: an implementation is first compared with the definition on random inputs; the last-level
  cache is overwritten before each run; median of 30.
* `flash-dllm bench workload`: 64 requests at once over 32 slots, prompts of 850 to 1,099 tokens, answers of 96 to 256,
  three commits a step forced, freed slots refilled; sent twice through one engine.
* `flash-dllm bench throughput`: the same requests over other numbers of slots.
* `flash-dllm bench shares`: fewer and shorter requests through the engine with all of its parts, and without each.
* `benchmarks/split_step.py`: as `bench step`, on one GPU and, under `torchrun`, on two over NCCL.
* Device, dtype, versions, command and date stand in each file; in those of `flash-dllm bench` also copy bandwidth and
  matrix product rate, measured in the same process.
* `benchmarks/gpu_check.sh OUT` runs the GPU tests and the first three of these in one call of at most nine minutes.
"""


def _how(sources: list[Source], docs: Path) -> str:
    lines = [HOW]
    for source in sources:
        d = source.data
        top, versions = d.get("ceilings"), d["versions"]
        rates = (
            f"copy {top['copy_tb_s']} TB/s, matrix product {top['matmul_tflop_s']} TFLOP/s; " if top else ""
        )
        lines.append(
            f"* {link(source, docs)}: {d['date']}, {d['device_name']}, {d['dtype']}, torch {versions['torch']}; "
            f"{rates}`{d['command']}`"
        )
    if not sources:
        lines.append("No file of a GPU run is committed yet, so every measured value above is empty.\n")
    return "\n".join(lines) + ("\n" if sources else "")
