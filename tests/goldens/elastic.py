"""Runner of the elastic-cache traces (dllm-golden-trace/1): rows, similarities, tracked, commits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flash_dllm.core.state import Canvas
from flash_dllm.core.step import StepRecord
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.observe import SlotStep, slot_steps
from flash_dllm.engine.request import Request
from flash_dllm.methods.elastic import Drift, ElasticCache
from flash_dllm.models.layers import Model

from .harness import MASK, Setup, build_engine, close

TOLERANCE = 2e-4


@dataclass
class Look:
    """A step with what the cache measured in it."""

    step: SlotStep
    seen: Drift


def run_elastic(model: Model, trace: dict[str, Any]) -> None:
    """The traces are reconstructions from descriptions of the code, see the notes on the method."""
    p = trace["parameters"]
    prompt, length = trace["prompt_ids"], p["gen_length"]
    options = {
        "drift": p["gamma"], "track_num": p["track_num"], "block_caching": p["block_caching"],
        "window": p["window_length"],
    }  # fmt: skip
    if p["threshold"] is None:
        setup = Setup("elastic", "greedy", {"steps": length // p["tokens_per_iter"]}, options)
    else:
        setup = Setup("elastic", "threshold", {"epsilon": p["threshold"]}, options)
    engine = build_engine(model, setup, slots=1, positions=len(prompt) + length)
    looks: list[Look] = []
    engine.observer = lambda e, record: looks.append(_look(e, record))
    masked = [False] * len(prompt) + [True] * length
    engine.add(Request("golden", Canvas(prompt + [MASK] * length, masked, (p["eos_id"],), setup.numbers)))
    ended = []
    while not engine.idle:
        ended += engine.step()
    for ours, theirs in zip(looks, trace["steps"], strict=True):
        _check(ours, theirs, len(model.layers))
    assert ended[0].ids == trace["final_ids"]
    assert ended[0].nfe == trace["num_forward_passes"]


def _look(engine: Engine, record: StepRecord) -> Look:
    policy = engine.method.cache
    assert isinstance(policy, ElasticCache)
    (step,) = slot_steps(engine, record)
    return Look(step, policy.seen)


def _check(ours: Look, theirs: dict[str, Any], n_layers: int) -> None:
    where, seen = f"step {theirs['step']}", ours.seen
    every = theirs["query"] == "all"
    first = 0 if every else theirs["first_full_layer"]
    similarity = [float(s[0]) for s in seen.similarity]
    for layer, (mine, wanted) in enumerate(zip(similarity, theirs["similarity"], strict=True)):
        assert (mine != mine) == (wanted is None), f"{where}, layer {layer}: compared or not"
        same = wanted is None or close(mine, wanted, TOLERANCE)
        assert same, f"{where}, layer {layer}: similarity {mine} against {wanted}"
    assert seen.first_full[0] == first, f"{where}: first full layer"
    rows = [mask[0].nonzero().flatten().tolist() for mask in seen.layers]
    if not every:
        assert all(r == sorted(theirs["query"]) for r in rows[:first]), f"{where}: rows"
    assert all(len(r) == len(seen.layers[0][0]) for r in rows[first:]), f"{where}: rows of full layers"
    tracked = [mask[0].nonzero().flatten().tolist() for mask in seen.most_attended]
    assert tracked == [sorted(t) for t in theirs["most_attended"]], f"{where}: most attended"
    commits = {m.pos: m for m in ours.step.commits()}
    expected = dict(zip(theirs["committed"], theirs["tokens"], strict=True))
    assert {p: m.token for p, m in commits.items()} == expected, f"{where}: commits"
    for pos, confidence in zip(theirs["committed"], theirs["confidence"], strict=True):
        assert close(commits[pos].confidence, confidence, TOLERANCE), f"{where}: confidence at {pos}"
