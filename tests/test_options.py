"""Options against a method: what is not read and what contradicts is refused, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flash_dllm import LLM, SamplingParams
from flash_dllm.options import OptionError
from flash_dllm.params import METHOD_FIELDS


@pytest.fixture(scope="module")
def llms(golden_dir: Path) -> dict[str, LLM]:
    llada, dream = LLM(golden_dir / "llada-tiny"), LLM(golden_dir / "dream-tiny")
    return {
        "threshold": llada,
        "greedy": llada.with_method("none", "greedy"),
        "random": llada.with_method("none", "random"),
        "entropy": dream.with_method("none", "entropy"),
        "origin": dream.with_method("none", "origin"),
    }


@pytest.mark.parametrize(
    ("method", "params", "message"),
    [
        ("threshold", {"steps": 8}, "steps=8 is not read by method none"),
        ("threshold", {"gamma": 0.5}, "gamma=0.5 is not read"),
        ("threshold", {"rule": "paper"}, "rule='paper' is not read"),
        ("threshold", {"alg_temp": 0.1}, "alg_temp"),
        ("greedy", {"epsilon": 0.5}, "epsilon=0.5 is not read by method none"),
        ("entropy", {"cfg_scale": 1.0}, "cfg_scale"),
        ("threshold", {"top_p": 0.9}, "top_p=0.9 has no effect at temperature 0"),
        ("threshold", {"top_k": 5}, "top_k=5 has no effect at temperature 0"),
        ("threshold", {"n": 2}, "n=2 at temperature 0"),
        ("greedy", {"steps": 65}, "steps=65 is more than the 64 tokens"),
        ("greedy", {"steps": 33}, "steps=33 is not a multiple of the 2 blocks"),
        ("greedy", {"block_length": 24}, "block_length=24 does not divide max_tokens=64"),
        ("greedy", {"steps": 10, "max_tokens": 40}, r"block_length=32 \(the default\)"),
        ("entropy", {"steps": 65}, "steps=65 is more than"),
    ],
)
def test_refused(llms: dict[str, LLM], method: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        llms[method].generate([1, 2, 3], SamplingParams(**{"max_tokens": 64, **params}))


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("threshold", {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "eos": "keep"}),
        ("entropy", {"top_p": 0.9}),
        ("random", {"n": 2}),
        ("origin", {"n": 2}),
        ("entropy", {"n": 2, "alg_temp": 0.5}),
        ("greedy", {"max_tokens": 37}),
        ("threshold", {"block_length": 64}),
    ],
)
def test_accepted(llms: dict[str, LLM], method: str, params: dict[str, Any]) -> None:
    assert llms[method].generate([1, 2, 3], SamplingParams(**{"max_tokens": 16, **params}))


@pytest.mark.parametrize(("steps", "nfe"), [(None, 32), (16, 16), (32, 32)])
def test_steps_set_the_number_of_passes(llms: dict[str, LLM], steps: int | None, nfe: int) -> None:
    params = SamplingParams(max_tokens=32, block_length=16, steps=steps, stop_at_eos=False)
    assert llms["greedy"].generate([1, 2, 3], params)[0].outputs[0].nfe == nfe


def test_every_option_of_a_method_changes_an_answer(llms: dict[str, LLM]) -> None:
    base = {"max_tokens": 32, "stop_at_eos": False, "logprobs": True}
    changes = {
        "threshold": {
            "epsilon": 0.3,
            "block_length": 8,
            "temperature": 2.0,
            "eos": "suppress_logits",
            "cfg_scale": 2.0,
        },
        "greedy": {
            "steps": 8,
            "block_length": 8,
            "temperature": 2.0,
            "eos": "suppress_confidence",
            "cfg_scale": 2.0,
        },
        "entropy": {"steps": 8, "temperature": 2.0, "top_p": 0.3, "top_k": 2, "t_end": 0.5, "alg_temp": 0.5},
    }
    for method, options in changes.items():
        plain = _outcome(llms[method], base)
        for name, value in options.items():
            assert _outcome(llms[method], {**base, name: value}) != plain, (method, name)
        hot = {**base, "temperature": 2.0}
        for name, value in {"top_p": 0.3, "top_k": 2, "seed": 4}.items():
            assert _outcome(llms[method], {**hot, name: value}) != _outcome(llms[method], hot), (method, name)


def _outcome(llm: LLM, params: dict[str, Any]) -> tuple[list[int], list[int] | None]:
    output = llm.generate([11, 22, 33, 44], SamplingParams(**params))[0]
    return output.canvas_ids, output.outputs[0].passes


def test_methods_read_only_known_options(llms: dict[str, LLM]) -> None:
    for llm in llms.values():
        assert llm.method.options <= METHOD_FIELDS


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"top_k": 2**63},
        {"block_length": 2**63},
        {"steps": 2**31},
        {"max_tokens": 10**4300 - 1},
        {"cfg_scale": float("inf")},
        {"factor": 1e300},
        {"alg_temp": 1e300},
        {"n": 0},
        {"stop": [""]},
        {"epsilon": 0.0},
        {"epsilon": 1.5},
        {"seed": -1},
        {"eos": "never"},
        {"nope": 1},
        {"temperature": float("nan")},
    ],
)
def test_values_out_of_range(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SamplingParams(**values)
