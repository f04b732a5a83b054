"""An answer does not depend on its batch mates, its slot or its arrival: token for token in float32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from flash_dllm import LLM, SamplingParams

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "threshold": [
        {},
        {"epsilon": 0.4},
        {"block_length": 8},
        {"temperature": 1.0, "seed": 3},
        {"eos": "suppress_logits"},
        {"temperature": 0.7, "top_p": 0.8, "seed": 9},
        {"stop_at_eos": False},
        {"eos": "suppress_confidence"},
        {"cfg_scale": 1.0},
        {"temperature": 1.2, "top_k": 7},
    ],
    "greedy": [{}, {"steps": 8, "block_length": 8}, {"temperature": 1.0, "seed": 1}, {"block_length": 4}],
    "random": [{"seed": 1}, {"seed": 2, "block_length": 8}, {"temperature": 0.5, "seed": 4}],
    "factor": [{}, {"factor": 1.7}, {"block_length": 8, "factor": 0.5}],
    "entropy": [
        {},
        {"steps": 8},
        {"temperature": 0.4, "top_p": 0.9, "seed": 5},
        {"alg_temp": 0.3, "seed": 6},
        {"t_end": 0.2},
    ],
    "origin": [{"seed": 1}, {"steps": 12, "seed": 2}, {"temperature": 1.0, "seed": 3}],
}


def requests(method: str) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(method)
    out = []
    for index, setting in enumerate(SETTINGS[method] * 2):
        prompt = [rng.randrange(500) for _ in range(rng.choice((1, 4, 11, 30, 57)))]
        length = rng.choice((8, 16, 24)) if "steps" in setting or "block_length" in setting else 5 + 3 * index
        # A fixed schedule wants a multiple of the blocks.
        settings = {**setting, "steps": length // 2} if "steps" in setting else setting
        out.append((prompt, SamplingParams(max_tokens=length, logprobs=True, **settings)))
    return out


def run(llm: LLM, cases: list[tuple[list[int], SamplingParams]]) -> list[tuple[Any, ...]]:
    outputs = llm.generate([prompt for prompt, _ in cases], [params for _, params in cases])
    return [
        (o.canvas_ids, o.outputs[0].finish_reason, o.outputs[0].passes, o.outputs[0].nfe) for o in outputs
    ]


@pytest.mark.parametrize("method", SETTINGS)
@pytest.mark.parametrize("folder", ["llada-tiny", "dream-tiny"])
def test_any_mixture_gives_the_same_answers(golden_dir: Path, folder: str, method: str) -> None:
    base = LLM(golden_dir / folder, decoding=method, max_model_len=128, max_num_seqs=2)
    cases = requests(method)
    alone = [run(base, [case])[0] for case in cases]
    for slots, seed in ((3, 1), (5, 2), (16, 3)):
        order = list(range(len(cases)))
        random.Random(seed).shuffle(order)
        llm = LLM.from_args(base.args.model_copy(update={"max_num_seqs": slots}), base.loaded)
        together = run(llm, [cases[i] for i in order])
        for position, index in enumerate(order):
            assert together[position] == alone[index], f"{folder} {method}: request {index} in {slots} slots"


def test_a_slot_forgets_its_former_tenant(golden_dir: Path) -> None:
    llm = LLM(golden_dir / "llada-tiny", max_num_seqs=1, max_model_len=128)
    short = ([9, 8, 7], SamplingParams(max_tokens=6, logprobs=True))
    first = run(llm, [short])
    run(llm, [([3] * 90, SamplingParams(max_tokens=30, temperature=1.0))])
    assert run(llm, [short]) == first
