"""Every trace of the published implementations: token for token, step for step, in float32."""

from __future__ import annotations

from typing import Any

import pytest

from flash_dllm.engine.runner import Runner
from flash_dllm.models.config import ModelError

from ..tapes import Replayed
from .harness import (
    EOS,
    MASK,
    TraceFile,
    build_engine,
    check_step,
    find_traces,
    golden_model,
    make_request,
    model_sha256,
    run_case,
)  # fmt: skip
from .mapping import setup_for
from .runners import runner_for


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    from pathlib import Path

    traces = find_traces(Path(metafunc.config.getoption("--golden-dir")))
    metafunc.parametrize("trace_file", traces, ids=[t.label for t in traces])


def length_of(parameters: dict[str, Any]) -> int:
    return int(parameters.get("gen_length") or parameters["max_new_tokens"])


def test_trace(trace_file: TraceFile) -> None:
    check_trace(trace_file, "cpu")


def test_trace_of_recorded_steps(trace_file: TraceFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would play, played on the CPU."""
    monkeypatch.setattr(Runner, "for_device", classmethod(lambda cls, decoder, eager: cls(decoder, Replayed)))
    check_trace(trace_file, "cpu")


@pytest.mark.gpu
def test_trace_on_gpu(trace_file: TraceFile) -> None:
    check_trace(trace_file, "cuda")


def check_trace(trace_file: TraceFile, device: str) -> None:
    trace = trace_file.read()
    try:
        model = golden_model(trace_file.folder, device)
    except ModelError as error:
        pytest.xfail(f"{trace_file.name}: {error}")
    assert trace["model_sha256"] == model_sha256(trace_file.folder), "the trace belongs to other weights"
    runner = runner_for(trace_file.name)
    if runner is not None:
        return runner(model, trace)
    setup = setup_for(trace, trace_file.name, model.config.family)
    if setup is None:
        pytest.xfail(f"method not implemented: {trace.get('method', trace_file.name)}")
    length = length_of(trace["parameters"])
    if trace["format"] == "golden-batch/1":
        engine = build_engine(model, setup, slots=2, positions=max(map(len, trace["prompts"])) + length)
        for index, prompt in enumerate(trace["prompts"]):
            engine.add(make_request(str(index), prompt, length, setup.numbers))
        ended = {}
        while not engine.idle:
            ended.update({f.request.id: f for f in engine.step()})
        for index, prompt in enumerate(trace["prompts"]):
            assert ended[str(index)].ids[len(prompt) :] == trace["single_final_generated"][index]
        return
    for case in trace["cases"]:
        steps, finished = run_case(model, setup, case["prompt_ids"], length)
        for index, (ours, theirs) in enumerate(zip(steps, case["steps"], strict=True)):
            check_step(index, ours, theirs, setup)
        assert finished.ids == case["final_ids"]
        assert finished.nfe == case["forward_calls"] * (2 if setup.numbers.get("cfg_scale") else 1)
        assert MASK not in finished.ids and EOS < MASK
