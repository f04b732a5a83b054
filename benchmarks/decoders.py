"""Accuracy, tokens a forward and rows a token of methods on the bundled model's own held-out problems.

    python benchmarks/decoders.py PLAN OUT.json [--model M] [--seconds N] [--shard I/N] [--slots N]
        [--limit N]

A plan is a list of runs (see PLANS); each run decodes the same problems and records which were right, so that
runs can be compared pairwise. Written after every run, so that a time limit loses nothing but the runs not
started.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from flash_dllm.bench.measure import accuracy, circumstances, peak_memory, run_jobs, totals, warm_up
from flash_dllm.bench.tiny import job_of
from flash_dllm.llm import LLM
from flash_dllm.params import SamplingParams
from flash_dllm.train.evaluate import questions
from flash_dllm.train.tasks import Sample, check, make

LENGTH = 192
SHOWN = (
    "problems", "method", "options", "request", "accuracy", "tokens_per_forward", "rows_per_token", "seconds"
)  # fmt: skip
# Problems, cache, decoding, options, request fields.
Run = tuple[str, str, str, dict[str, Any], dict[str, Any]]
W = {"schedule": "window"}
SMALL = {"lookahead": 16, "track": 32}


def decoder_runs() -> list[Run]:
    """Decoders without a cache, the main ones first: threshold, verify by rule and view, branch by K."""
    runs: list[Run] = [("gsm", "none", "threshold", W, {"epsilon": e}) for e in (0.9, 0.95, 0.8, 0.7)]
    runs += [
        ("gsm", "none", "branch", {"branches": k}, {"gamma": g})
        for k, g in ((4, 0.6), (2, 0.6), (1, 0.6), (4, 0.4))
    ]
    for views in ("paper", "leak-free", "branch"):
        runs += [
            ("gsm", "none", "verify", {"views": views}, {"rule": r, "gamma": 0.8})
            for r in ("product", "paper")
        ]
    runs += [("gsm", "none", "branch", {"branches": k}, {"gamma": g}) for k in (4, 2, 1) for g in (0.8, 0.5)]
    runs += [("gsm", "none", "threshold", W, {"epsilon": 0.85}), ("gsm", "none", "greedy", W, {})]
    runs += [
        ("gsm", "none", "branch", {"branches": k}, {"gamma": g}) for k, g in ((2, 0.4), (1, 0.4), (4, 0.7))
    ]
    runs += [
        ("gsm", "none", "verify", {"views": v}, {"gamma": 0.6}) for v in ("paper", "leak-free", "branch")
    ]
    runs += [("gsm", "none", "factor", W, {"factor": f}) for f in (0.5, 1.0)]
    return runs


def cache_runs() -> list[Run]:
    """Flash-Cache: tracking by budget at equal rows, decoders over it, then the other options."""
    runs: list[Run] = []
    for track in (32, 16, 64):
        for by in ("attention", "random", "recent", "none"):
            runs += [("gsm", "flash", "threshold", {"lookahead": 16, "track": track, "track_by": by}, {})]
    runs += [("gsm", "flash", "threshold", {"lookahead": 16, "track": 0}, {})]
    for views in ("paper", "leak-free", "branch"):
        runs += [("gsm", "flash", "verify", {**SMALL, "views": views}, {"gamma": 0.8})]
    runs += [
        ("gsm", "flash", "branch", {**SMALL, "branches": k}, {"gamma": g})
        for k, g in ((4, 0.6), (2, 0.6), (4, 0.4))
    ]
    runs += [("gsm", "flash", "verify", {**SMALL, "pin": "verified"}, {"gamma": 0.8})]
    for option in (
        {"score_layers": "from-third"}, {"lookahead": 48}, {"lookahead": 0}, {"refresh_every": 8},
        {"refresh_every": 16}, {"refresh_on_drift": 0.05}, {"track": 64, "lookahead": 48}, {"window": 32},
    ):  # fmt: skip
        runs += [("gsm", "flash", "threshold", {**SMALL, **option}, {})]
    runs += [("gsm", "flash", "threshold", SMALL, {"epsilon": e}) for e in (0.95, 0.8)]
    runs += [
        ("gsm", "flash", "branch", {**SMALL, "branches": k}, {"gamma": g})
        for k, g in ((1, 0.6), (2, 0.4), (1, 0.4))
    ]
    runs += [("gsm", "flash", "greedy", SMALL, {})]
    return runs


def card_runs() -> list[Run]:
    """The model card: block 32 at four thresholds on fresh seeds and held-out templates."""
    block = {"block_length": 32}
    runs: list[Run] = []
    for problems in ("mixed", "heldout"):
        runs += [(problems, "none", "threshold", {}, {**block, "epsilon": 0.9})]
        runs += [(problems, "none", "greedy", {}, block)]
        runs += [(problems, "none", "threshold", {}, {**block, "epsilon": e}) for e in (0.7, 0.5)]
    return runs


PLANS = {"decoders": decoder_runs, "caches": cache_runs, "card": card_runs}


def problems(kind: str, count: int) -> list[Sample]:
    """``gsm``: word problems of the test split; ``mixed``: all families; ``heldout``: unseen templates."""
    if kind == "gsm":
        return [make("gsm", seed, "test", shots=0) for seed in range(count)]
    return questions(count, "heldout" if kind == "heldout" else "test")


def run_one(llm: LLM, samples: list[Sample], run: Run) -> dict[str, Any]:
    kind, cache, decoding, options, fields = run
    engine = llm.with_method(cache, decoding, **options)
    warm_up(engine)
    params = SamplingParams.model_validate({"max_tokens": LENGTH, **fields})
    done = run_jobs(engine, [job_of(engine, sample, params) for sample in samples])
    outputs, seconds = done.outputs, done.seconds
    right = [check(s, o.text) for s, o in zip(samples, outputs, strict=True)]
    counted = totals(outputs)
    families = {}
    for family in sorted({s.family for s in samples}):
        mine = [i for i, s in enumerate(samples) if s.family == family]
        families[family] = accuracy([right[i] for i in mine]) | {
            "tokens_per_forward": totals([outputs[i] for i in mine])["tokens_per_forward"]
        }
    bounds = [o.outputs[0].certificate for o in outputs]
    return {
        "problems": kind, "method": f"{cache}+{decoding}", "options": options, "request": fields,
        **accuracy(right), **counted,
        "rows_per_token": round(counted["rows"] / max(1, counted["answer_tokens"]), 1),
        "steps": sum(o.outputs[0].steps for o in outputs),
        "tokens_per_second": round(counted["answer_tokens"] / seconds, 1), "seconds": round(seconds, 2),
        "peak_bytes": peak_memory(engine.loaded.model.device),
        "certificates_not_vacuous": sum(b is not None and not b.vacuous for b in bounds),
        "families": families if len(families) > 1 else None, "verdicts": "".join("01"[r] for r in right),
    }  # fmt: skip


def command(out: Path) -> str:
    """This command line, with OUT.json for the file that it writes."""
    words = ["OUT.json" if word == str(out) else word for word in sys.argv[1:]]
    return shlex.join(["python", "benchmarks/decoders.py", *words])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("plan", choices=PLANS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="flash-dllm/tiny-llada")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after this long")
    parser.add_argument("--shard", default="0/1", help="run every N-th of the plan, from the I-th")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--limit", type=int, default=1000, help="problems a run")
    args = parser.parse_args()
    began = time.monotonic()
    index, count = map(int, args.shard.split("/"))
    size = {"max_num_seqs": args.slots, "max_model_len": 320}
    llm = LLM(args.model, cache="none", decoding="threshold", dtype=args.dtype, **size)
    sets = {}
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(), "command": command(args.out),
        "plan": args.plan, "shard": args.shard, "length": LENGTH, **circumstances(llm),
        "not_run": [], "runs": [],
    }  # fmt: skip
    for run in PLANS[args.plan]()[index::count]:
        if time.monotonic() - began > args.seconds:
            report["not_run"].append(run)
            continue
        samples = sets.setdefault(run[0], problems(run[0], args.limit))
        try:
            result = run_one(llm, samples, run)
        except Exception as error:  # a run that fails must not lose the others
            traceback.print_exc()
            result = {"method": f"{run[1]}+{run[2]}", "options": run[3], "request": run[4]}
            result["failed_with"] = repr(error)
        report["runs"].append(result)
        print(json.dumps({key: result.get(key) for key in SHOWN}), flush=True)
        args.out.write_text(json.dumps(report) + "\n")
    args.out.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
