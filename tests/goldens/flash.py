"""Traces of the released Flash-dLLM code (format flash-dllm-trace/1): batched, with refill."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_dllm.core.step import StepRecord, Vocabulary
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.observe import SlotStep, slot_steps
from flash_dllm.methods.flash_reference import reference
from flash_dllm.models.layers import Model

from .harness import CONFIDENCE_TOLERANCE, VOCAB, make_request

SCORE_TOLERANCE = 1e-3
PRODUCT_TOLERANCE = 5e-4


def run_flash(model: Model, trace: dict[str, Any]) -> None:
    """Replay a trace with the reference preset and compare every iteration."""
    p = trace["params"]
    method = reference(
        p["eos_id"],
        verify=p["verify"],
        window=p["block_length"],
        track_num=p["track_num"],
        mask_num=p["mask_num"],
    )
    engine = Engine(
        model, method, Vocabulary(VOCAB, p["mask_id"]), slots=p["batch_size"], positions=trace["max_length"]
    )
    seen: list[tuple[list[SlotStep], StepRecord, torch.Tensor]] = []
    engine.observer = lambda e, record: seen.append((slot_steps(e, record), record, e.state.score.clone()))
    numbers = {"epsilon": p["threshold"], "gamma": p["gamma"], "block_length": p["block_length"]}
    for index, prompt in enumerate(trace["prompts"]):
        engine.add(make_request(str(index), prompt["tokens"], p["gen_length"], numbers))
    ended = {}
    while not engine.idle:
        ended.update({f.request.id: f for f in engine.step()})
    for number, (theirs, ours) in enumerate(zip(trace["iterations"], seen, strict=True)):
        _check_iteration(number, theirs["samples"], *ours)
    for result in trace["results"]:
        finished = ended[str(result["sample"])]
        tokens = result["slot_tokens_to_gen_end"]
        assert finished.ids[: len(tokens)] == tokens
        assert finished.steps == result["n_steps"]
    assert engine.totals.passes == trace["forward_passes"]["total"]


def _check_iteration(
    number: int, samples: list[dict[str, Any]], steps: list[SlotStep], record: StepRecord, score: torch.Tensor
) -> None:
    by_slot = {step.slot: step for step in steps}
    assert sorted(by_slot) == sorted(s["slot"] for s in samples)
    for theirs in samples:
        where = f"iteration {number}, sample {theirs['sample']}"
        ours = by_slot[theirs["slot"]]
        assert ours.request_id == str(theirs["sample"]), where
        _check_denoise(where, theirs, ours, record)
        if "verify" in theirs:
            _check_verify(where, theirs, ours, record)
        if "ranking" in theirs:
            _check_scores(where, theirs, score[theirs["slot"]])


def _check_denoise(where: str, theirs: dict[str, Any], ours: SlotStep, record: StepRecord) -> None:
    denoise = theirs["denoise"]
    assert ours.passes[0].positions == sorted(denoise["window_pos"] + denoise["other_pos"]), where
    slot = theirs["slot"]
    probs = dict(zip(record.cand.pos[slot].tolist(), record.draft.prob[slot].tolist(), strict=True))
    tokens = dict(zip(record.cand.pos[slot].tolist(), record.draft.token[slot].tolist(), strict=True))
    for pos, confidence, token in zip(
        denoise["window_pos"], denoise["confidence"], denoise["argmax"], strict=True
    ):
        assert probs[pos] == pytest.approx(confidence, abs=CONFIDENCE_TOLERANCE), f"{where}, position {pos}"
        if confidence > 0.05:
            assert tokens[pos] == token, f"{where}, position {pos}"
    commits = {m.pos: m.token for m in ours.marks if m.state == "committed"}
    expected = theirs["commit_confidence"]
    assert commits == dict(zip(expected["pos"], expected["tokens"], strict=True)), where


def _check_verify(where: str, theirs: dict[str, Any], ours: SlotStep, record: StepRecord) -> None:
    verify, slot = theirs["verify"], theirs["slot"]
    assert record.search is not None and record.second is not None
    live = record.search.valid[slot]
    assert record.search.pos[slot][live].tolist() == verify["cand_pos"], f"{where}: search order"
    assert record.search.token[slot][live].tolist() == verify["draft_tokens"], f"{where}: drafts"
    probs = record.second.prob_draft[slot][live].tolist()
    assert probs == pytest.approx(verify.get("draft_prob", []), abs=PRODUCT_TOLERANCE), f"{where}: mask views"
    context = sorted(pos for pos, _, rank in ours.passes[1].extra if rank == 0)
    assert context == sorted(verify["tracked_pos"]), f"{where}: context"
    accepted = {m.pos: m.token for m in ours.marks if m.state == "accepted"}
    # A pass with nothing to verify records no commits.
    expected = theirs.get("commit_verify", {"pos": [], "tokens": []})
    assert accepted == dict(zip(expected["pos"], expected["tokens"], strict=True)), f"{where}: accepted"


def _check_scores(where: str, theirs: dict[str, Any], score: torch.Tensor) -> None:
    ranking = theirs["ranking"]
    ours = score[torch.tensor(ranking["ranked_pos"], dtype=torch.int64)].tolist()
    assert ours == pytest.approx(ranking["ranked_score"], abs=SCORE_TOLERANCE), f"{where}: scores"
