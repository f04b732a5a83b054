"""Accuracy with weights, or keys and values, in 8 bits, on the same held-out questions.

    python benchmarks/quantization.py OUT.json [--model NAME] [--questions N] [--device cpu] [--seconds S]

Every form answers the same questions in the same order, so differences are paired. The run stops after S seconds
and goes on where it stopped when it is started again with the same file.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from flash_dllm import LLM, SamplingParams
from flash_dllm.bench.facts import facts
from flash_dllm.bench.stats import paired, rate
from flash_dllm.bench.tiny import job_of
from flash_dllm.train.evaluate import questions
from flash_dllm.train.tasks import check

FORMS: dict[str, dict[str, str]] = {
    "plain": {},
    "int8": {"quantization": "int8"},
    "fp8": {"quantization": "fp8"},
    "kv-fp8": {"kv_cache_dtype": "fp8"},
    "fp8+kv-fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}
CHUNK = 20
"""Questions answered between two looks at the clock."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="flash-dllm/tiny-dream")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--cache", default="dual")
    parser.add_argument("--seconds", type=float, default=280.0)
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    samples = questions(args.questions, "test")
    # Every n questions are a fair sample of the kinds.
    order = sorted(range(len(samples)), key=lambda i: (i * 0.6180339887498949) % 1)
    state = json.loads(args.out.read_text()) if args.out.exists() else {"seconds": 0.0, "verdicts": {}}
    verdicts: dict[str, str] = state["verdicts"]
    params = SamplingParams(epsilon=0.9, block_length=32, max_tokens=192)
    models: dict[str, LLM] = {}
    began = time.monotonic()
    while (name := min(FORMS, key=lambda n: len(verdicts.get(n, "")))) and time.monotonic() < end:
        done = len(verdicts.get(name, ""))
        mine = [samples[i] for i in order[done : done + CHUNK]]
        if not mine:
            break
        if name not in models:
            models[name] = LLM(
                args.model,
                cache=args.cache,
                decoding="threshold",
                device=args.device,
                dtype=args.dtype,
                **FORMS[name],
            )
        llm = models[name]
        texts = [
            output.outputs[0].text
            for _, output in sorted(llm.as_completed([job_of(llm, s, params) for s in mine]))
        ]
        right = (check(sample, text) for sample, text in zip(mine, texts, strict=True))
        verdicts[name] = verdicts.get(name, "") + "".join("01"[ok] for ok in right)
        spent = state["seconds"] + time.monotonic() - began
        llm = models.get("plain", llm)
        args.out.write_text(json.dumps(report(verdicts, llm, args, spent), indent=1) + "\n")


def report(verdicts: dict[str, str], llm: LLM, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """What was measured so far."""
    common = min(len(v) for v in verdicts.values()) if len(verdicts) == len(FORMS) else 0
    flags = {name: [c == "1" for c in text[:common]] for name, text in verdicts.items()}
    rows = {}
    for name in FORMS if common else ():
        rows[name] = {**rate(flags[name]), "against_plain": paired(flags[name], flags["plain"])}
    return {
        **facts(llm.loaded.model.device, llm.loaded.model.dtype, synthetic=False),
        "model": args.model, "method": llm.method.name, "epsilon": 0.9, "block_length": 32, "max_tokens": 192,
        "split": "test", "threads": torch.get_num_threads(), "seconds": round(seconds, 1), "n": common,
        "note": "The bundled weights are stored in int8 with a scale a row: int8 gives back the numbers that are "
        "stored and loses nothing; fp8 rounds them once more.",
        "forms": rows, "verdicts": verdicts,
    }  # fmt: skip


if __name__ == "__main__":
    main()
