"""Where the cells of a plan get their numbers: the benchmarks, the bundled model's own tasks, or random weights."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from flash_dllm.bench.measure import accuracy, peak_memory, run_jobs, totals, warm_up
from flash_dllm.bench.tiny import job_of
from flash_dllm.eval.answers import Policy
from flash_dllm.eval.errors import EvalError
from flash_dllm.eval.plans import HARNESS_TASK, Cell
from flash_dllm.eval.run import Settings, evaluate
from flash_dllm.eval.tasks import GROUPS, TASKS, local_files
from flash_dllm.llm import LLM
from flash_dllm.loading import Loaded
from flash_dllm.methods import split_name
from flash_dllm.params import EngineArgs, SamplingParams

STAND_INS = {"gsm8k": "gsm", "math": "arith", "humaneval": "code", "mbpp": "code"}
"""The bundled model's task that stands in for a benchmark whose data are not given."""
TINY = "flash-dllm/tiny-"
GUIDE = "flash-dllm/tiny-guide"


class Source(Protocol):
    """Measures cells."""

    label: str
    """What is measured, for the report."""

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Numbers of one cell.

        Raises:
            FlashDLLMError: why it cannot be measured.
        """


def engine_args(base: EngineArgs, cell: Cell, problems: int | None) -> EngineArgs:
    """The engine of a cell: its method, and no more slots than problems, or than the user allows."""
    cache, decoding = split_name(cell.method)
    options = dict(cell.options)
    if decoding == "guided":
        guide = base.options.get("guide") or (GUIDE if base.model.startswith(TINY) else None)
        if guide is None:
            raise EvalError("needs a left-to-right guide for this model (--guide)")
        options["guide"] = guide
    slots = min(cell.batch, base.max_num_seqs or cell.batch, problems or cell.batch)
    return base.model_copy(
        update={"cache": cache, "decoding": decoding, "options": options, "max_num_seqs": slots}
    )


@dataclass
class BundledTasks:
    """New problems of the bundled model's own tasks, in place of the benchmarks."""

    engine: EngineArgs
    loaded: Loaded
    problems: int
    label: str = (
        "stand-in: the bundled model's own tasks, not the benchmarks; there are no examples in the prompt"
    )

    def jobs(self, llm: LLM, cell: Cell) -> tuple[list[Any], list[Any]]:
        """Problems and the jobs that ask for them."""
        from flash_dllm.train.tasks import make

        family = STAND_INS[cell.task]
        samples = [make(family, i, "test") for i in range(self.problems)]
        params = SamplingParams.model_validate({"max_tokens": cell.length, **cell.params})
        return samples, [job_of(llm, sample, params) for sample in samples]

    def measure(self, cell: Cell) -> dict[str, Any]:
        from flash_dllm.train.tasks import check

        device = self.loaded.model.device
        _fresh(device)
        llm = LLM.from_args(engine_args(self.engine, cell, self.problems), self.loaded)
        warm_up(llm)
        began = time.perf_counter()
        samples, jobs = self.jobs(llm, cell)
        outputs = run_jobs(llm, jobs).outputs
        seconds = time.perf_counter() - began
        verdicts = [check(sample, output.text) for sample, output in zip(samples, outputs, strict=True)]
        counts = totals(outputs)
        steps = sum(output.outputs[0].steps for output in outputs)
        tokens = counts["answer_tokens"]
        return {
            "accuracy": accuracy(verdicts), "seconds": round(seconds, 3), **counts, "steps": steps,
            "tokens_per_second": round(tokens / seconds, 2),
            "tokens_per_step": round(tokens / steps, 3) if steps else None,
            "memory_gb": _memory(device), "slots": llm.max_num_seqs, "task": f"bundled task {STAND_INS[cell.task]}",
        }  # fmt: skip


@dataclass
class Benchmarks:
    """The benchmarks themselves, through the harness."""

    engine: EngineArgs
    loaded: Loaded
    settings: Settings
    output: Path | None
    label: str = "the benchmarks through lm-evaluation-harness"

    def task(self, cell: Cell) -> str:
        """The harness task; MATH-500 where the local files have no more of MATH."""
        name, data = HARNESS_TASK[cell.task], self.settings.data_dir
        if name == "minerva_math" and data is not None:
            try:
                local_files(TASKS[GROUPS[name][0]], data)
            except EvalError:
                return "minerva_math500"
        return name

    def measure(self, cell: Cell) -> dict[str, Any]:
        name = self.task(cell)
        settings = replace(self.settings, tasks=(name,), num_fewshot=cell.shots)
        params = SamplingParams.model_validate({"max_tokens": cell.length, **cell.params})
        folder = None if self.output is None else self.output / _slug(cell.name)
        engine = engine_args(self.engine, cell, settings.limit)
        _fresh(self.loaded.model.device)
        report = evaluate(engine, settings, Policy(params, stop="late"), folder, self.loaded)
        return {
            **summary(report, name),
            "slots": report["slots"],
            "memory_gb": _memory(self.loaded.model.device),
        }


def summary(report: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A cell's numbers from the report of an evaluation; several tasks of a group are added up."""
    tasks = [report["tasks"][task] for task in GROUPS.get(name, (name,))]
    rule = tasks[0]["published_rule"]
    rates = report["groups"][name]["rules"] if name in GROUPS else tasks[0]["rules"]
    counted = {key: sum(task["counters"][key] for task in tasks)
               for key in ("seconds", "answer_tokens", "kept_tokens", "nfe", "steps", "rows", "failed")}  # fmt: skip
    tokens = counted["answer_tokens"]
    return {
        "accuracy": {**rates[rule], "rule": rule}, **counted, "task": name,
        "tokens_per_second": round(tokens / counted["seconds"], 2) if counted["seconds"] else None,
        "tokens_per_step": round(tokens / counted["steps"], 3) if counted["steps"] else None,
        "tokens_per_forward": round(tokens / counted["nfe"], 3) if counted["nfe"] else None,
    }  # fmt: skip


@dataclass
class RandomWeights:
    """Random weights of a named shape at the paper's tokens a step: time and memory only, no accuracy.

    A cell gets ``requests`` requests, but not more than four for each of its slots, with answers of up to ``longest``
    tokens, uniform from three eighths of that.
    """

    shape: str
    dtype: torch.dtype
    device: torch.device
    requests: int
    longest: int = 256
    label: str = "synthetic: random weights, commits forced to the paper's tokens a step; no accuracy"

    def __post_init__(self) -> None:
        from flash_dllm.bench.synthetic import weights

        self.model = weights(self.shape, self.dtype, self.device)

    def measure(self, cell: Cell) -> dict[str, Any]:
        from flash_dllm.bench.synthetic import Setting
        from flash_dllm.bench.throughput import Load, measure_load

        # Prompts of GSM8K have about 60 tokens without examples and about 185 more for each of them.
        middle = 60 + 185 * cell.shots
        longest = min(self.longest, cell.length)
        _fresh(self.device)
        slots = min(cell.batch, self.requests)
        requests = min(self.requests, 4 * slots)
        load = Load(requests, (middle - 30, middle + 90), (max(1, longest * 3 // 8), longest), cell.length)
        setting = Setting(self.shape, cell.method, cell.options, cell.commits, cell.accepts)
        row = measure_load(setting, self.model, slots, load, runs=1)[-1]
        kept = ("requests", "seconds", "answer_tokens", "nfe", "tokens_per_second", "tokens_per_forward")
        memory = row["peak_gib"]
        return {
            **{name: row[name] for name in kept}, "accuracy": None, "slots": slots, "task": "random prompts",
            "tokens_per_step": round(cell.commits + cell.accepts, 3),
            "memory_gb": None if memory is None else round(memory * 2**30 / 1e9, 2),
        }  # fmt: skip


def _fresh(device: torch.device) -> None:
    """Give back what the cell before left, and count the peak of memory anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _memory(device: torch.device) -> float | None:
    """Peak of this cell; on the CPU only that of the whole process is known, which says nothing about a cell."""
    return round(peak_memory(device) / 1e9, 2) if device.type == "cuda" else None


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in name.lower()).strip("-")
