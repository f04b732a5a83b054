"""Step time of a model over several GPUs, or with weights or keys and values in 8 bits. Random weights: times only.

    python benchmarks/split_step.py OUT.json                                  # one GPU: bf16, int8, fp8
    torchrun --standalone --nproc-per-node 2 benchmarks/split_step.py OUT.json   # two: bf16 and fp8

Rows are added to OUT.json, so that both runs can share one file. ``--requests 64`` adds, for each method and number of
slots, the throughput of that many requests (prompts of 850-1,099 tokens, answers of 96-256, the pace of ``flash-dllm
bench workload``). On a CPU: --shape llada-tiny --device cpu.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flash_dllm.bench.facts import facts
from flash_dllm.bench.floors import measure_ceilings
from flash_dllm.bench.step import Place, measure_step
from flash_dllm.bench.synthetic import Setting, weights
from flash_dllm.bench.throughput import WORKLOAD, measure_load, pace_of
from flash_dllm.models.layers import Model
from flash_dllm.parallel import random_part
from flash_dllm.parallel.group import Group
from flash_dllm.parallel.launch import Place as Process
from flash_dllm.parallel.launch import check_world, join
from flash_dllm.quant import quantized

KEPT = ("method", "batch", "prompt", "answer", "ms", "wall_ms", "host_ms", "first_pass_ms", "passes", "peak_gib",
        "weights_gib", "kv_gib", "kernels_a_step", "idle_share")  # fmt: skip
LOAD = ("method", "batch", "requests", "prompt", "answer", "answer_tokens", "seconds", "tokens_per_second",
        "tokens_per_forward", "steps", "passes", "ms", "latency_s", "peak_gib", "warm_up_s", "failed")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="llada-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--methods", default="flash+threshold,flash+verify")
    parser.add_argument("--forms", default=None, help="of plain,int8,fp8; default by the number of GPUs")
    parser.add_argument("--batch", default="1,32")
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--answer", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    process = Process.from_environment()
    size = process.size if process else 1
    group: Group | None = None
    if size > 1:
        check_world(size, args.device)
        team = join(size, args.device, (), json.dumps(vars(args), default=str))
        group = team.group
    device = group.device if group else torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ceilings = measure_ceilings(device, dtype)
    forms = (args.forms or ("plain,int8,fp8" if size == 1 else "plain,fp8")).split(",")
    for form in forms:
        setting = Setting(args.shape, "none+threshold", eager=args.eager)
        model = (
            weights(args.shape, dtype, device)
            if group is None
            else random_part(setting.config, group, dtype, device)
        )
        model = model if form == "plain" else in_8_bits(model, form)
        for method in args.methods.split(","):
            for batch in map(int, args.batch.split(",")):
                place = Place(batch, args.prompt, args.answer, args.steps)
                mine = replace(setting, method=method)
                parts = [("rows", KEPT, measure_step(mine, model, place, ceilings))]
                if args.requests:
                    commits, accepts = pace_of(method)
                    paced = replace(mine, commits=commits, accepts=accepts)
                    load = replace(WORKLOAD, requests=args.requests)
                    parts.append(("throughput", LOAD, measure_load(paced, model, batch, load, runs=1)[-1]))
                if group is None or group.rank == 0:
                    about = {"gpus": size, "form": form, "shape": args.shape}
                    for part, kept, row in parts:
                        save(args.out, part, about | {k: row.get(k) for k in kept}, model)
        del model
    if group is not None:
        team.close()


def in_8_bits(model: Model, form: str) -> Model:
    """The same with 8-bit matrices; of a rank's part, its own."""
    from flash_dllm.parallel import with_sums

    if model.shard is None:
        return quantized(model, form)
    bare = replace(
        model, layers=[replace(layer, wo=layer.wo.local, w_down=layer.w_down.local) for layer in model.layers]
    )
    return with_sums(quantized(bare, form))


def save(out: Path, part: str, row: dict[str, Any], model: Model) -> None:
    report = json.loads(out.read_text()) if out.exists() else {
        **facts(model.device, model.dtype, synthetic=True), "rows": []
    }  # fmt: skip
    report.setdefault(part, []).append(row)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(row), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
