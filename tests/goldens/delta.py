"""Runners of the dllm-cache and dynamic-dllm traces (dllm-golden-trace/1): commits and rows of each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flash_dllm.core.step import StepRecord
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.observe import SlotStep, slot_steps
from flash_dllm.models.layers import Model

from .harness import CONFIDENCE_TOLERANCE, Setup, build_engine, close, make_request

Layer = dict[str, Any]


@dataclass
class Seen:
    """A step with what only these methods have: positions recomputed in each layer, drift and thresholds."""

    step: SlotStep
    layers: list[list[int]]
    moved: list[float] | None
    tau: dict[int, float] | None


def run_dllm_cache(model: Model, trace: dict[str, Any]) -> None:
    p = trace["parameters"]
    options = {"kp": p["prompt_interval_steps"], "kr": p["gen_interval_steps"], "rho": p["transfer_ratio"]}
    numbers = {"steps": p["steps"], "block_length": p["block_length"], "temperature": p["temperature"]}
    check(model, trace, Setup("dllm-cache", "greedy", numbers, options))


def run_dynamic_dllm(model: Model, trace: dict[str, Any]) -> None:
    p = trace["parameters"]
    cache, decoding, options = "none", "greedy", {}
    numbers: dict[str, Any] = {k: p[k] for k in ("steps", "block_length", "temperature")}
    if p["use_cache"]:
        cache = "dynamic"
        options = {
            "window_size": p["window_size"],
            "layer_budget": p["layer_budget"],
            "kp": p["prompt_interval_steps"],
            "kr": p["gen_interval_steps"],
            "budget": "released",
            "compare": {"v": "value"}[p["select_from"]],
        }
    if p["mode"] == "pd":
        decoding, numbers["epsilon"] = "adaptive", p["pd_threshold"]
        options |= {"mode": p["pd_mode"], "alpha": p["alpha"], "beta": p["beta"]}
    check(model, trace, Setup(cache, decoding, numbers, options))


def check(model: Model, trace: dict[str, Any], setup: Setup) -> None:
    """Decode the prompt of ``trace`` and compare every step, the result and the number of passes."""
    prompt, length = trace["prompt_ids"], trace["parameters"]["gen_length"]
    engine = build_engine(model, setup, slots=1, positions=len(prompt) + length)
    steps: list[Seen] = []
    engine.observer = lambda e, record: steps.append(look(e, record))
    engine.add(make_request("golden", prompt, length, setup.numbers))
    ended = []
    while not engine.idle:
        ended += engine.step()
    for ours, theirs in zip(steps, trace["steps"], strict=True):
        check_commits(ours, theirs)
        check_layers(ours, theirs, len(prompt), length)
        check_threshold(ours, theirs)
    assert ended[0].ids == trace["final_ids"]
    assert ended[0].nfe == trace["num_forward_passes"]


def look(engine: Engine, record: StepRecord) -> Seen:
    """What the only slot did in a step."""
    (step,) = slot_steps(engine, record)
    moved = getattr(engine.method.cache, "moved", None)
    tau = getattr(engine.method.rule, "tau", None)
    first = int(engine.state.first[0])
    return Seen(
        step,
        [mask[0].nonzero().flatten().tolist() for mask in record.passes[0].layers],
        None if moved is None else moved[:, 0].tolist(),
        None if tau is None else {first + i: t for i, t in enumerate(tau[0].tolist())},
    )


def check_commits(ours: Seen, theirs: dict[str, Any]) -> None:
    number, commits = theirs["step"], {m.pos: m for m in ours.step.commits()}
    assert ours.step.step == number
    expected = dict(zip(theirs["committed"], theirs["tokens"], strict=True))
    assert {p: m.token for p, m in commits.items()} == expected, f"step {number}: commits"
    for pos, confidence in zip(theirs["committed"], theirs["confidence"], strict=True):
        got = commits[pos].confidence
        assert close(got, confidence, CONFIDENCE_TOLERANCE), (
            f"step {number}, position {pos}: confidence {got} against {confidence}"
        )


def check_layers(ours: Seen, theirs: dict[str, Any], prompt: int, response: int) -> None:
    layers: list[Layer] = theirs.get("layers", [])
    for index, (rows, layer) in enumerate(zip(ours.layers, layers, strict=True)):
        where = f"step {theirs['step']}, layer {index}"
        expected = list(range(prompt)) if layer["mode"] in ("full", "prompt", "prompt+partial") else []
        if layer["mode"] in ("full", "gen"):
            expected += range(prompt, prompt + response)
        expected += [prompt + r for r in layer.get("selected", [])]
        assert rows == expected, f"{where}: rows recomputed in mode {layer['mode']}"
        if "mean_dissimilarity" in layer:
            assert ours.moved is not None
            wanted = layer["mean_dissimilarity"]
            assert close(ours.moved[index], wanted, CONFIDENCE_TOLERANCE), f"{where}: mean dissimilarity"


def check_threshold(ours: Seen, theirs: dict[str, Any]) -> None:
    if "threshold" not in theirs or ours.tau is None:
        return
    wanted = theirs["threshold"]
    wanted = wanted if isinstance(wanted, list) else [wanted] * len(theirs["committed"])
    for pos, tau in zip(theirs["committed"], wanted, strict=True):
        assert close(ours.tau[pos], tau, CONFIDENCE_TOLERANCE), (
            f"step {theirs['step']}, position {pos}: threshold {ours.tau[pos]} against {tau}"
        )
