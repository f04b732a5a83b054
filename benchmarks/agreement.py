"""Do the kernels answer as the definitions do? The same word problems through each, in bf16 and float32, on a GPU.

    python benchmarks/agreement.py OUT.json [--model NAME] [--problems N] [--method CACHE+DECODING] [--slots N]

Compared is the value behind ``####``, which is what is checked, and the whole text. The bound to meet: 95 % equal
values against the definitions in the same dtype, and accuracies within one standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any

import torch

from flash_dllm import LLM, SamplingParams
from flash_dllm.bench.facts import facts
from flash_dllm.bench.stats import rate
from flash_dllm.bench.tiny import job_of
from flash_dllm.train.tasks import check, make

FORMS: dict[str, dict[str, Any]] = {
    "ref bf16": {"kernels": "ref", "dtype": "bfloat16"},
    "triton bf16": {"kernels": "triton", "dtype": "bfloat16"},
    "fused bf16": {"kernels": "fused", "dtype": "bfloat16"},
    "deterministic bf16": {"deterministic": True, "dtype": "bfloat16"},
    "ref float32": {"kernels": "ref", "dtype": "float32"},
    "triton float32": {"kernels": "triton", "dtype": "float32"},
}
AGAINST = {"bf16": "ref bf16", "float32": "ref float32"}


def value(text: str) -> str:
    """What is checked: the number behind ``####``, or nothing."""
    found = re.search(r"####\s*(-?\d+)", text)
    return found[1] if found else ""


def answers(form: str, args: argparse.Namespace, samples: list[Any]) -> tuple[list[str], LLM]:
    cache, decoding = args.method.split("+")
    llm = LLM(
        args.model, cache=cache, decoding=decoding, device=args.device, max_num_seqs=args.slots, **FORMS[form]
    )
    params = SamplingParams(max_tokens=192)
    jobs = [job_of(llm, sample, params) for sample in samples]
    done = dict(llm.as_completed(jobs))
    return [done[i].outputs[0].text for i in range(len(jobs))], llm


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="flash-dllm/tiny-dream")
    parser.add_argument("--method", default="flash+threshold")
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--forms", default=",".join(FORMS))
    args = parser.parse_args()
    samples = [make("gsm", seed, "test") for seed in range(args.problems)]
    texts: dict[str, list[str]] = {}
    rows: dict[str, Any] = {}
    for form in args.forms.split(","):
        texts[form], llm = answers(form, args, samples)
        right = [check(s, t) for s, t in zip(samples, texts[form], strict=True)]
        rows[form] = {**rate(right), "standard_error": round(100 * math.sqrt(0.25 / len(right)), 2)}
        base = AGAINST[form.split()[-1]]
        if form != base and base in texts:
            pairs = list(zip(texts[form], texts[base], strict=True))
            rows[form]["against"] = base
            rows[form]["equal_values"] = round(
                100 * sum(value(a) == value(b) for a, b in pairs) / len(pairs), 2
            )
            rows[form]["equal_texts"] = round(100 * sum(a == b for a, b in pairs) / len(pairs), 2)
        report = {
            **facts(llm.loaded.model.device, llm.loaded.model.dtype, synthetic=False), "model": args.model,
            "method": args.method, "problems": args.problems, "slots": args.slots, "forms": rows,
        }  # fmt: skip
        args.out.write_text(json.dumps(report, indent=1) + "\n")
        print(form, rows[form], flush=True)
        del llm
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
