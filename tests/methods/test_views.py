"""The views of verification, against a dense masked forward written from their definitions, and the leak.

The dense forward knows nothing of ranks, places or caches: it runs all rows of the pass through the layers with a
visibility matrix made by a rule for each pair of row kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from flash_dllm.core.step import StepRecord
from flash_dllm.kernels.qkv_rope_write import rotate
from flash_dllm.kernels.rms_norm import rms_norm
from flash_dllm.kernels.silu_mul import silu_mul
from flash_dllm.methods import verify
from flash_dllm.methods.verify import VIEWS
from flash_dllm.models.layers import Model, rope_tables

from ..goldens.harness import MASK, Setup, build_engine, golden_model, make_request
from .support import random_prompts

WINDOW, SEARCH = 8, 4


@dataclass(frozen=True)
class Row:
    """A row of the dense forward: ``kind`` is canvas, draft, mask, copy or reader; ``k`` counts drafts from 0."""

    pos: int
    token: int
    kind: str
    k: int = -1


def dense(model: Model, rows: list[Row], sees: Callable[[Row, Row], bool]) -> torch.Tensor:
    """Probabilities [N, V] of every row when row i attends to the rows that it sees."""
    config = model.config
    pos = torch.tensor([r.pos for r in rows])
    mask = torch.tensor([[sees(a, b) for b in rows] for a in rows])
    cos, sin = rope_tables(config, 256)
    x = F.embedding(torch.tensor([r.token for r in rows]), model.embed)
    heads, kv = config.n_heads, config.n_kv_heads
    for layer in model.layers:
        h, _ = rms_norm(x, layer.attn_norm, config.rms_eps)
        packed = F.linear(h, layer.wqkv, layer.bqkv).unflatten(-1, (-1, config.head_dim))
        turned = rotate(packed[:, : heads + kv], cos[pos], sin[pos], config.rope_fp32)
        q, k, v = turned[:, :heads], turned[:, heads:], packed[:, heads + kv :]
        k, v = (t.repeat_interleave(heads // kv, 1) for t in (k, v))
        logits = torch.einsum("ihd,jhd->hij", q, k) / config.head_dim**0.5
        weights = logits.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + F.linear(torch.einsum("hij,jhd->ihd", weights, v).flatten(1), layer.wo)
        h, _ = rms_norm(x, layer.ffn_norm, config.rms_eps)
        x = x + F.linear(silu_mul(F.linear(h, layer.w_gate_up)), layer.w_down)
    h, _ = rms_norm(x, model.norm, config.rms_eps)
    return F.linear(h, model.head).softmax(-1)


def mask_view(
    model: Model, views: str, canvas: list[int], drafts: list[tuple[int, int]], k: int
) -> torch.Tensor:
    """The distribution by which draft k is judged, from the definition of the view."""
    place = {pos: i for i, (pos, _) in enumerate(drafts)}
    window = sorted(place) if views != "branch" else _window(canvas, drafts)
    rows = [Row(pos, token, "canvas") for pos, token in enumerate(canvas)]
    if views == "branch":
        for r in range(len(drafts)):
            filled = dict(drafts[:r])
            rows += [Row(pos, filled.get(pos, canvas[pos]), "copy", r) for pos in window]
    else:
        rows += [Row(pos, token, "draft", i) for i, (pos, token) in enumerate(drafts)]
        rows += [Row(pos, MASK, "mask", i) for i, (pos, _) in enumerate(drafts)]
    target = drafts[k][0]
    if model.config.shift:
        at = max(target - 1, 0)
        seen = dict(drafts[:k]).get(at, MASK if at in place else canvas[at])
        rows.append(Row(at, seen, "reader", k))
        judge = len(rows) - 1
    else:
        kind = "copy" if views == "branch" else "mask"
        judge = next(i for i, r in enumerate(rows) if (r.kind, r.pos, r.k) == (kind, target, k))

    def sees(a: Row, b: Row) -> bool:
        if b.kind == "reader":
            return False
        if views == "branch":
            if a.kind == "canvas":
                return b.kind == "canvas"
            return b.k == a.k if b.kind == "copy" else b.pos not in window
        rank = {"canvas": -1, "mask": a.k, "reader": a.k, "draft": a.k + 0.5}[a.kind]
        if b.kind == "draft":
            return b.k < rank
        if views == "paper":
            if b.kind == "mask":
                return b.k >= rank
            return b.pos not in place
        # The original of a later draft stands for it; a draft row, one rank on, has the next draft's mask row instead.
        level = a.k + 1 if a.kind == "draft" else a.k
        if b.kind == "mask":
            return a.kind != "canvas" and b.k == level
        return b.pos not in place or place[b.pos] > level

    return dense(model, rows, sees)[judge]


def _window(canvas: list[int], drafts: list[tuple[int, int]]) -> list[int]:
    masks = [pos for pos, token in enumerate(canvas) if token == MASK]
    return sorted({*masks[:WINDOW], *(pos for pos, _ in drafts)})


@pytest.fixture(params=["llada-tiny", "llada-tiny-gqa", "dream-tiny"])
def model(request: pytest.FixtureRequest, golden_dir: Path) -> Model:
    return golden_model(golden_dir / request.param)


def first_step(
    model: Model, views: str, monkeypatch: pytest.MonkeyPatch, change: int | None = None
) -> StepRecord:
    """One step without commits by confidence but one; draft ``change`` replaced by another token."""
    plain = verify.most_confident

    def altered(*args, **kwargs):  # type: ignore[no-untyped-def]
        search = plain(*args, **kwargs)
        if change is not None:
            search.token[0, change] = (search.token[0, change] + 7) % 500
        return search

    monkeypatch.setattr(verify, "most_confident", altered)
    setup = Setup(
        "none", "verify", {"epsilon": 1.0, "gamma": 1.5}, {"window": WINDOW, "search": SEARCH, "views": views}
    )
    engine = build_engine(model, setup, slots=1, positions=64)
    records: list[StepRecord] = []
    engine.observer = lambda _, record: records.append(record)
    engine.add(make_request("a", random_prompts(15)[0], 20, setup.numbers))
    engine.step()
    return records[0]


@pytest.mark.parametrize("views", VIEWS)
def test_views_equal_a_dense_masked_forward(
    model: Model, views: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = first_step(model, views, monkeypatch)
    assert record.search is not None and record.second is not None
    prompt = random_prompts(15)[0]
    canvas = prompt + [MASK] * 20
    taken = record.take[0]
    for pos, token in zip(
        record.cand.pos[0][taken].tolist(), record.draft.token[0][taken].tolist(), strict=True
    ):
        canvas[pos] = token
    drafts = list(zip(record.search.pos[0].tolist(), record.search.token[0].tolist(), strict=True))
    if views == "branch":
        # The copies hold every candidate of the step, the commit included.
        monkeypatch.setattr(
            f"{__name__}._window",
            lambda canvas, drafts: sorted(record.cand.pos[0][record.cand.valid[0]].tolist()),
        )
    for k, (_, token) in enumerate(drafts):
        expected = mask_view(model, views, canvas, drafts, k)
        assert float(record.second.prob_draft[0, k]) == pytest.approx(float(expected[token]), abs=2e-5)
        assert float(record.second.prob[0, k]) == pytest.approx(float(expected[:MASK].max()), abs=2e-5)


def judged_by(record: StepRecord) -> list[float]:
    assert record.second is not None
    return record.second.prob[0].tolist()


@pytest.mark.parametrize("views", VIEWS)
@pytest.mark.parametrize("k", range(SEARCH - 1))
def test_only_the_papers_view_sees_its_own_draft(
    model: Model, views: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = judged_by(first_step(model, views, monkeypatch))
    after = judged_by(first_step(model, views, monkeypatch, change=k))
    moved = [abs(a - b) > 1e-6 for a, b in zip(before, after, strict=True)]
    if views == "paper":
        assert moved[k], "the mask view of a draft that is not the last reads it through later mask rows"
    else:
        assert not any(moved[: k + 1])


def test_the_leak_needs_a_second_layer(golden_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = golden_model(golden_dir / "llada-tiny")
    model = replace(deep, config=replace(deep.config, n_layers=1), layers=deep.layers[:1])
    for k in range(SEARCH - 1):
        before = judged_by(first_step(model, "paper", monkeypatch))
        after = judged_by(first_step(model, "paper", monkeypatch, change=k))
        assert after[: k + 1] == pytest.approx(before[: k + 1], abs=1e-7)
