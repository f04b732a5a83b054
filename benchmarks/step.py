"""Time of one step on randomly initialised weights of a named shape (reference kernels, no CUDA graph).

    python benchmarks/step.py --shape llada-8b --method flash+threshold --batch 1 --prompt 1000 --out step.json

Random weights never reach the threshold, so every step commits one token a slot; what counts is the time. The first
pass and five steps warm up; the median of the next steps is reported.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from flash_dllm.core.state import Canvas
from flash_dllm.core.step import Vocabulary
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.request import Request
from flash_dllm.methods import build_method, split_name
from flash_dllm.models.config import SHAPES
from flash_dllm.models.layers import random_model

WARM_UP = 5


def measure(args: argparse.Namespace) -> dict[str, object]:
    device = torch.device(args.device)
    config = SHAPES[args.shape]
    model = random_model(config, getattr(torch, args.dtype), args.device)
    cache, decoding = split_name(args.method)
    method = build_method(cache, decoding or "threshold", family=config.family)
    assert config.mask_id is not None
    length = args.prompt + args.answer
    engine = Engine(
        model, method, Vocabulary(config.n_tokens, config.mask_id), slots=args.batch, positions=length
    )
    made = torch.Generator().manual_seed(0)
    for index in range(args.batch):
        prompt = torch.randint(0, 500, (args.prompt,), generator=made).tolist()
        masked = [False] * args.prompt + [True] * args.answer
        numbers = {"stop_at_eos": False, "epsilon": 1.0}
        engine.add(
            Request(str(index), Canvas([*prompt, *[config.mask_id] * args.answer], masked, (), numbers))
        )

    def timed() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        engine.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3

    first = timed()
    steps = [timed() for _ in range(WARM_UP + args.steps)][WARM_UP:]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {
        "shape": args.shape, "method": method.name, "batch": args.batch, "prompt": args.prompt,
        "answer": args.answer, "dtype": args.dtype, "weights": "random", "kernels": "reference",
        "first_pass_ms": round(first, 2), "ms": round(statistics.median(steps), 3),
        "ms_min": round(min(steps), 3), "ms_max": round(max(steps), 3), "steps": args.steps, "peak_gib": peak,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor(),
        "torch": torch.__version__, "python": platform.python_version(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="llada-8b", choices=SHAPES)
    parser.add_argument("--method", default="flash+threshold")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--answer", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    row = measure(args)
    print(json.dumps(row))
    if args.out:
        args.out.write_text(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
