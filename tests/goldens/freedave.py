"""Runner of the freedave traces (dllm-golden-trace/1): rows, drafts, branches and commits of every pass."""

from __future__ import annotations

from typing import Any

from flash_dllm.engine.observe import PassSeen, SlotStep
from flash_dllm.models.layers import Model

from .harness import MASK, Setup, close, run_case

TOLERANCE = 2e-4


def run_freedave(model: Model, trace: dict[str, Any]) -> None:
    """Draft-and-verify (``algorithm: freedave``) and the decoders it is measured against (``static``)."""
    p = trace["parameters"]
    prompt, length = trace["prompt_ids"], p["gen_length"]
    fixed = {"alg_temp": None, "token_per_step": 1, "early_exit": False, "temperature": 0.0}
    for name, value in {**fixed, "use_cache": True, "eager_acceptance_mode": False}.items():
        assert p.get(name, value) == value, f"{name}={p[name]!r} is not built"
    steps, finished = run_case(model, _setup(p), prompt, length)
    passes = _merge(trace["steps"])
    assert len(steps) == len(passes) == trace["num_forward_passes"] == finished.nfe
    for ours, theirs in zip(steps, passes, strict=True):
        _check(ours, theirs)
    branches = sum(len(_branches(s.passes[0])) or 1 for s in steps)
    assert branches == trace["num_branch_forwards"]
    assert finished.ids == trace["final_ids"] and MASK not in finished.ids


def _setup(p: dict[str, Any]) -> Setup:
    cache = "dual" if p["dual_cache"] else "prefix"
    numbers = {"block_length": p["block_length"]}
    if p["confidence_threshold"] is not None:
        numbers["epsilon"] = p["confidence_threshold"]
    if p["algorithm"] == "freedave":
        return Setup(cache, "freedave", numbers, {"draft_steps": p["draft_steps"]})
    if p["confidence_threshold"] is not None:
        return Setup(cache, "threshold", numbers)
    return Setup(cache, "greedy", {**numbers, "steps": p["gen_length"]})


def _merge(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The published loop's passes; what it commits without one belongs to the pass before."""
    out: list[dict[str, Any]] = []
    for event in events:
        if event["kind"] != "last":
            out.append({**event, "commits": []})
        sure = event.get("confidence") or [None] * len(event["committed"])
        out[-1]["commits"] += zip(event["committed"], event["tokens"], sure, strict=True)
    return out


def _check(ours: SlotStep, theirs: dict[str, Any]) -> None:
    seen = ours.passes[0]
    start, end = theirs["computed"]
    branches = _branches(seen)
    if theirs["kind"] == "verify":
        assert not seen.positions, f"step {ours.step}: rows beside the branches"
        assert len(branches) == len(theirs["drafts"]), f"step {ours.step}: branches"
        for branch, drafts in zip(branches, theirs["drafts"], strict=True):
            assert sorted(branch) == list(range(start, end)), f"step {ours.step}: rows"
            _check_drafts(ours, branch, drafts)
    else:
        assert seen.positions == list(range(start, end)) and not branches, f"step {ours.step}: rows"
    commits = {m.pos: m for m in ours.commits()}
    wanted = {pos: token for pos, token, _ in theirs["commits"]}
    assert {pos: m.token for pos, m in commits.items()} == wanted, f"step {ours.step}: commits"
    for pos, _, confidence in theirs["commits"]:
        sure = confidence is None or close(commits[pos].confidence, confidence, TOLERANCE)
        assert sure, f"step {ours.step}: confidence at {pos}"


def _check_drafts(ours: SlotStep, branch: dict[int, int], drafts: list[tuple[int, int, float]]) -> None:
    marks = {m.pos: m for m in ours.marks if m.state in ("accepted", "rejected")}
    for pos, token, confidence in drafts:
        where = f"step {ours.step}: draft at {pos}"
        assert marks[pos].token == token and close(marks[pos].confidence, confidence, TOLERANCE), where
    filled = {pos for pos in marks if branch[pos] != MASK}
    assert all(branch[pos] == marks[pos].token for pos in filled)
    theirs = {pos for pos, _, _ in drafts}
    assert len(filled) == len(theirs), f"step {ours.step}: {len(filled)} drafts against {len(theirs)}"
    # The published code itself orders two drafts 1e-7 apart differently in its two modes.
    swapped = [marks[pos].confidence for pos in filled ^ theirs]
    assert not swapped or max(swapped) - min(swapped) < 1e-5, f"step {ours.step}: drafts"


def _branches(seen: PassSeen) -> list[dict[int, int]]:
    """Tokens by position of each branch, in order."""
    out: dict[int, dict[int, int]] = {}
    for pos, token, rank in seen.extra:
        out.setdefault(rank, {})[pos] = token
    return [out[rank] for rank in sorted(out)]
