"""Runners of the dkv-cache, flashdlm-freecache and flashdlm-guided traces (dllm-golden-trace/1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flash_dllm.core.noise import CounterNoise, Noise
from flash_dllm.core.state import State
from flash_dllm.core.step import StepRecord
from flash_dllm.core.types import Candidates
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.observe import SlotStep, slot_steps
from flash_dllm.engine.request import Finished, Request
from flash_dllm.models.layers import Model

from .harness import CONFIDENCE_TOLERANCE, ENTROPY_TOLERANCE, Setup, build_engine, close, make_request

Step = dict[str, Any]


HIDDEN_TOP_K = 50
"""The traces do not name it, but only with top_k of transformers' GenerationConfig do the entropies rank so.

The confidences they list are those of the whole distribution.
"""


class PlannedNoise(CounterNoise):
    """Gives each position of a block its place in a recorded order, in every step."""

    def __init__(self, order: list[list[int]], positions: int) -> None:
        self._key = torch.zeros(positions)
        for block in order:
            self._key[torch.tensor(block)] = torch.linspace(0.9, 0.1, len(block))

    def per_position(self, pos: Tensor, valid: Tensor) -> Tensor:
        return self._key.to(pos.device)[pos]


@dataclass
class Seen:
    """A step, how many drafts the guide accepted in it, and each candidate's measure without top-k filter."""

    step: SlotStep
    accepted: int
    plain: dict[int, float]


def decode(
    model: Model, trace: dict[str, Any], setup: Setup, length: int, noise: Noise | None = None
) -> tuple[list[Seen], Finished]:
    """Decode the prompt of ``trace`` alone."""
    prompt = trace["prompt_ids"]
    engine = build_engine(model, setup, slots=1, positions=len(prompt) + length, noise=noise)
    seen: list[Seen] = []
    rule, logits = engine.method.rule, torch.zeros(0)

    def see(state: State, cand: Candidates, given: Tensor) -> None:
        nonlocal logits
        if logits.shape != given[0].shape:
            logits = torch.empty_like(given[0])
        # Into the same tensor: a recorded step does this again, but not what Python does around it.
        logits.copy_(given[0])

    def look(e: Engine, record: StepRecord) -> None:
        accepted = getattr(rule, "accepted", None)
        (step,) = slot_steps(e, record)
        probs = logits.softmax(-1)
        plain = (probs * (probs + 1e-10).log()).sum(-1) if rule.measure == "neg_entropy" else probs.amax(-1)
        by_pos = dict(zip(record.cand.pos[0].tolist(), plain.tolist(), strict=True))
        seen.append(Seen(step, 0 if accepted is None else int(accepted[0]), by_pos))

    rule.see = see  # type: ignore[method-assign]

    engine.observer = look
    request = make_request("golden", prompt, length, setup.numbers)
    stop = trace["parameters"].get("eos_token_id")
    if stop is not None:
        request = Request(request.id, replace(request.canvas, stop_ids=(stop,)))
    engine.add(request)
    ended: list[Finished] = []
    while not engine.idle:
        ended += engine.step()
    return seen, ended[0]


def check_commits(ours: Seen, theirs: Step, tolerance: float) -> None:
    commits = {m.pos: m for m in ours.step.commits()}
    expected = dict(zip(theirs["committed"], theirs["tokens"], strict=True))
    assert {p: m.token for p, m in commits.items()} == expected, f"step {theirs['step']}: commits"
    for pos, confidence in zip(theirs["committed"], theirs["confidence"], strict=True):
        assert close(ours.plain[pos], confidence, tolerance), (
            f"step {theirs['step']}, position {pos}: confidence {ours.plain[pos]} against {confidence}"
        )


def fed(ours: SlotStep, total: int) -> list[int]:
    """Positions fed in the only pass of a step; a reader row would be one too many."""
    (seen,) = ours.passes
    assert not seen.extra, "rows beside the canvas"
    assert seen.full == (seen.positions == list(range(total)))
    return seen.positions


def run_dkv(model: Model, trace: dict[str, Any]) -> None:
    """dKV-Cache on LLaDA (decode, greedy) and on Dream (decode, prefill, pd)."""
    p = trace["parameters"]
    if "variant" in p:
        options: dict[str, Any] = {"refresh": p["cache_reloading_step"]}
        numbers = {k: p[k] for k in ("steps", "block_length", "temperature")}
        setup, length = Setup("dkv-decode", "greedy", numbers, options), p["gen_length"]
        if p["variant"] == "greedy":
            setup = Setup("dkv-greedy", "random", numbers, {**options, "window": p["window_size"]})
    else:
        kind, length = p["cache_type"], p["max_new_tokens"]
        options = {"shift_type": p["shift_type"]}
        if kind != "prefill":
            options["refresh"] = p["cache_steps"]
        numbers = {
            "steps": p["steps"], "t_end": p["eps"], "temperature": p["temperature"],
            "alg_temp": p["alg_temp"] or 0.0, "top_p": p["top_p"] or 1.0, "top_k": HIDDEN_TOP_K,
        }  # fmt: skip
        cache = {"decoded": "dkv-decode", "prefill": "dkv-prefill", "pd": "dkv-pd"}[kind]
        tolerance = ENTROPY_TOLERANCE if p["alg"] == "entropy" else CONFIDENCE_TOLERANCE
        setup = Setup(cache, p["alg"], numbers, options, tolerance=tolerance)
    total = len(trace["prompt_ids"]) + length
    order = trace.get("denoising_order")
    noise = PlannedNoise(order, total) if order else None
    seen, ended = decode(model, trace, setup, length, noise)
    kept: list[int] | None = []
    for ours, theirs in zip(seen, trace["steps"], strict=True):
        where, rows = f"step {theirs['step']}", fed(ours.step, total)
        everything = list(range(total))
        expected = everything if theirs["computed"] == "all" else theirs["computed"]
        assert rows == expected, f"{where}: rows"
        check_commits(ours, theirs, setup.tolerance)
        rest = sorted(set(everything) - set(rows))
        if "cache_read" in theirs:
            assert rest == theirs["cache_read"], f"{where}: rows read from the cache"
        elif "cache_after" in theirs:
            assert rest == [] or rest == kept, f"{where}: rows read from the cache"
            kept = theirs["cache_after"]
    assert ended.ids == trace["final_ids"]
    assert ended.nfe == trace["num_forward_passes"]
    assert ended.rows == sum(len(s.step.passes[0].positions) for s in seen)


def run_freecache(model: Model, trace: dict[str, Any]) -> None:
    """FlashDLM's FreeCache on LLaDA, as released."""
    p = trace["parameters"]
    numbers = {k: p[k] for k in ("steps", "block_length", "temperature")}
    assert p["use_block_caching"] and not p["early_stop"]
    setup = Setup("freecache", "greedy", numbers, {"freeze": "last-step"})
    total = len(trace["prompt_ids"]) + p["gen_length"]
    seen, ended = decode(model, trace, setup, p["gen_length"])
    frozen = 0
    for ours, theirs in zip(seen, trace["steps"], strict=True):
        start, end = theirs["computed"]
        where = f"step {theirs['step']}"
        assert end == total and fed(ours.step, total) == list(range(start, end)), f"{where}: rows"
        # What is not fed is exactly what the steps before have frozen.
        assert start == theirs["cached"][1] == frozen
        frozen = theirs["frozen_after"]
        check_commits(ours, theirs, CONFIDENCE_TOLERANCE)
    assert ended.ids == trace["final_ids"]
    assert ended.nfe == trace["num_forward_passes"]


def as_guide(model: Model) -> Model:
    """The weights of a Dream model read as a causal Qwen2 model, as the traces do."""
    config = replace(model.config, family="qwen2", shift=False, causal=True, mask_id=None)
    return replace(model, config=config)


def run_guided(model: Model, trace: dict[str, Any]) -> None:
    """FlashDLM's guided diffusion on Dream; the guide is the same weights read causally."""
    p = trace["parameters"]
    correct = p["variant"] == "correct"
    options = {
        "guide": as_guide(model),
        "strategy": p["sampling_strategy"],
        "variant": p["variant"],
        "accept_top_k": p["acceptance_top_k"],
        "accept_ratio": p["top_p"],
        "accept_threshold": p["confidence_threshold"],
        "chunk": p["verify_batch_size"],
        "freeze": "prompt",
    }
    # A stop token that the guide writes does not end the published run of this variant.
    setup = Setup("freecache", "guided", {"stop_at_eos": not correct}, options)
    length, prompt = p["max_new_tokens"], len(trace["prompt_ids"])
    seen, ended = decode(model, trace, setup, length)
    for ours, theirs in zip(seen, trace["steps"], strict=True):
        check_round(ours, theirs, prompt + length)
    end = ended.end if not correct else prompt + length
    if ended.reason == "stop":
        # The stop token itself, then the published run fills up with it.
        assert set(trace["final_ids"][end:]) <= {p["eos_token_id"]}
        end += 1
    assert ended.ids[:end] == trace["final_ids"][:end]
    assert ended.nfe == trace["num_forward_passes"]
    assert ended.notes["guide_passes"] == trace["num_guider_passes"]


def check_round(ours: Seen, theirs: Step, total: int) -> None:
    where = f"round {theirs['step']}"
    start, end = theirs["computed"]
    assert end == total and fed(ours.step, total) == list(range(start, end)), f"{where}: rows"
    assert start == theirs["cached"]
    assert ours.accepted == theirs["accepted"], f"{where}: accepted drafts"
    commits = {m.pos: m.token for m in ours.step.commits()}
    expected = dict(zip(theirs["committed"], theirs["tokens"], strict=True))
    # Behind a stop token the published run fills up with it; the engine just ends.
    assert {pos: expected[pos] for pos in commits} == commits, f"{where}: commits"
    filled = {token for pos, token in expected.items() if pos not in commits}
    assert len(filled) <= 1 and filled <= {list(commits.values())[-1]}, f"{where}: commits"
    written = len(commits) - (ours.accepted < len(commits))
    for mark, token in list(zip(ours.step.marks, theirs["draft"], strict=False)):
        index = mark.pos - ours.step.marks[0].pos
        if index != written or mark.state == "guess":
            assert mark.token == token, f"{where}: draft of position {mark.pos}"
