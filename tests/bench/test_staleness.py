"""The staleness meter: zero where everything is recomputed, exact where the drift is put there by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_dllm.bench.exact import exact_pass, mean_attention
from flash_dllm.bench.staleness import KINDS, Meter, rank_correlation, watch
from flash_dllm.bench.synthetic import Setting, engine_for, request, weights
from flash_dllm.bench.timing import BenchError
from flash_dllm.core.method import CachePolicy
from flash_dllm.engine.engine import Engine
from flash_dllm.models.config import SHAPES
from flash_dllm.models.layers import random_model
from flash_dllm.models.reference import forward, shift_logits
from tests.commands import Run

CPU = torch.device("cpu")
ROUNDING = 2e-5
"""Relative difference of float32 results that differ in the order of their sums only."""


def engine(method: str, shape: str = "llada-tiny", slots: int = 2, **options: Any) -> Engine:
    return engine_for(Setting(shape, method, options), weights(shape, torch.float32, CPU), slots, 48)


def measured(made: Engine, count: int = 3, shape: str = "llada-tiny", **more: Any) -> dict[str, Any]:
    meter = Meter(made, **more)
    config = Setting(shape, "none+threshold").config
    asked = [
        request(config, str(i), 12 + i, 10 + 2 * i, 20, random.Random(i), epsilon=0.6) for i in range(count)
    ]
    watch(made, asked, meter)
    return meter.report()


@pytest.mark.parametrize("shape", ["llada-tiny-gqa", "dream-tiny"])
def test_the_exact_pass_is_the_plain_forward(shape: str) -> None:
    model = random_model(SHAPES[shape], torch.float32)
    ids = torch.randint(0, 500, (40,), generator=torch.Generator().manual_seed(0))
    reads = torch.tensor([3, 17, 38])
    seen: list[torch.Tensor] = []
    logits = forward(model, ids[None], watch=lambda layer, paid: seen.append(paid[0]))[0]
    found = exact_pass(model, ids, reads)
    assert torch.allclose(found.hidden @ model.head.T, logits[reads], atol=1e-3)
    for layer, paid in enumerate(seen):
        assert torch.allclose(found.attention[layer], paid[:, reads].mean((0, 1)), atol=1e-5)
    assert torch.allclose(found.attention.sum(1), torch.ones(len(seen)), atol=1e-5)
    assert shift_logits(logits).shape == logits.shape


def test_mean_attention_of_a_hand_made_case() -> None:
    q = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    keys = torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]])
    assert torch.allclose(mean_attention(q, keys), torch.tensor([0.5, 0.5]))


@pytest.mark.parametrize(
    ("method", "options"),
    [("none+threshold", {}), ("none+verify", {"window": 8, "search": 4}), ("flash+threshold", {"track": -1})],
)
@pytest.mark.parametrize("shape", ["llada-tiny", "dream-tiny"])
def test_what_recomputes_everything_does_not_drift(method: str, options: dict[str, Any], shape: str) -> None:
    report = measured(engine(method, shape, **options), shape=shape)
    assert report["passes"] > 5
    for row in report["by_layer"]:
        assert row["key_drift"] < ROUNDING and row["value_drift"] < ROUNDING
    assert report["total_variation"]["p99"] < 1e-4 and report["argmax_changed"] == 0
    assert report["capture"] == [] and [row["age"] for row in report["by_age"]] == [0]


def test_a_small_budget_drifts() -> None:
    report = measured(engine("flash+threshold", lookahead=0, track=2, window=4))
    # The first layer's keys depend on a row's own token alone: only rows that hold a new token can differ there.
    assert report["by_layer"][-1]["value_drift"] > 0.01
    kept = sum(row["value_drift"] for row in report["kept_by_layer"])
    fresh = sum(row["value_drift"] for row in report["recomputed_by_layer"])
    assert kept > fresh
    assert report["total_variation"]["mean"] > 1e-4
    ages = [row["value_drift"] for row in report["by_age"]]
    assert ages[0] < ages[-1]
    by = {(c["rows"], c["criterion"]): c["share"] for c in report["capture"]}
    for budget in (8, 32):
        assert all(
            by[budget, "best"] >= by[budget, name] - 1e-6 for name in ("attention", "recent", "random")
        )
    assert {row["kind"] for row in report["by_kind"]} <= set(KINDS)
    assert all(len(report[n]) == 4 for n in ("by_layer", "kept_by_layer", "recomputed_by_layer"))
    assert sum(row["attention_share"] for row in report["by_kind"]) == pytest.approx(1, abs=1e-3)


class Bent(CachePolicy):
    """Recomputes everything, then makes one position's value in one layer half as long again."""

    def __init__(self, layer: int, position: int) -> None:
        self.layer, self.position = layer, position

    def always_sweeps(self) -> bool:
        return True

    def run(self, ctx: Any, state: Any, lanes: Any, cand: Any, plan: Any) -> Any:
        out = super().run(ctx, state, lanes, cand, plan)
        ctx.kv.values[self.layer][:, ctx.kv.base + self.position] *= 1.5
        return out


def test_a_drift_put_there_by_hand_is_found() -> None:
    made = engine("none+threshold", slots=1)
    made.method.cache = Bent(2, 5)
    report = measured(made, count=1)
    total = 12 + 20
    for row in report["by_layer"]:
        expected = 0.5 / total if row["layer"] == 2 else 0.0
        assert row["value_drift"] == pytest.approx(expected, abs=ROUNDING)
        assert row["key_drift"] < ROUNDING
    # Position 5 lies in the prompt; nothing that was read has seen the change.
    kinds = {row["kind"]: row["value_drift"] for row in report["by_kind"]}
    assert kinds["prompt"] == pytest.approx(0.5 / (12 * 4), rel=1e-3)
    assert kinds["committed"] < ROUNDING and kinds["candidate"] < ROUNDING
    assert report["total_variation"]["p99"] < 1e-4
    # All the weighted drift sits in one row: the best choice finds it whatever the budget.
    best = [c["share"] for c in report["capture"] if c["criterion"] == "best"]
    assert best == [pytest.approx(1, abs=0.01)] * 2
    place = 5 * 20 // total
    bins = {row["place"]: row["value_drift"] for row in report["by_place"]}
    assert bins[place] > 0.01 and all(v < ROUNDING for p, v in bins.items() if p != place)


class Late(CachePolicy):
    """Recomputes everything in the first pass and nothing but the candidates' rows after it."""

    name = "late"

    def due(self, state: Any) -> Any:
        return state.step < 0

    def always_sweeps(self) -> bool:
        return False

    def rows(self, state: Any, lanes: Any, cand: Any, kv: Any) -> Any:
        from flash_dllm.core.rows import run_rows

        return [run_rows(state, kv.base, lanes, cand.pos, cand.valid)]


def test_a_row_that_is_never_recomputed_keeps_the_first_layers_key_of_mask() -> None:
    """In layer 0 keys depend on the token alone: a committed row that stays stale holds exactly MASK's value."""
    made = engine("none+threshold", slots=1)
    made.method.cache = Late()
    meter = Meter(made)
    config = SHAPES["llada-tiny"]
    assert config.mask_id is not None
    made.add(request(config, "0", 6, 20, 20, random.Random(1)))
    for _ in range(4):
        made.step()
    model, state = made.model, made.state
    committed = int(((state.committed_at[0] == 0) & (state.order >= 6)).nonzero()[0])
    ids = state.ids[0, :26]
    masked = ids.clone()
    masked[committed] = config.mask_id
    reads = torch.tensor([25])
    now, then = (exact_pass(model, t, reads).values[0, committed].flatten() for t in (ids, masked))
    expected = float((now - then).norm() / now.norm())
    row = made.decoder.ctx.kv.values[0][0, made.decoder.ctx.kv.base + committed].flatten()
    assert float((row - now).norm() / now.norm()) == pytest.approx(expected, rel=1e-4)
    drift = meter._drifts(exact_pass(model, ids, reads), 0, 26)[1]
    assert float(drift[0, committed]) == pytest.approx(expected, rel=1e-4)
    assert float(drift[0, :6].max()) < ROUNDING


def test_rank_correlation() -> None:
    a = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert rank_correlation(a, a.square()) == pytest.approx(1.0)
    assert rank_correlation(a, -a) == pytest.approx(-1.0)
    assert rank_correlation(a, torch.ones(4)) is None
    assert rank_correlation(a[:2], a[:2]) is None


def test_measuring_every_other_step_and_nothing_at_all() -> None:
    often = measured(engine("flash+threshold", lookahead=0, track=4))
    seldom = measured(engine("flash+threshold", lookahead=0, track=4), every=2)
    assert often["passes"] > seldom["passes"] > 0
    assert all(row["step"] % 2 == 0 for row in seldom["by_step"])
    with pytest.raises(BenchError, match="no pass"):
        Meter(engine("none+threshold")).report()


@pytest.mark.parametrize(
    "method",
    ["dual+threshold", "dllm-cache+threshold", "elastic+threshold", "flash+branch", "dkv-decode+threshold"],
)
def test_any_policy_can_be_watched(method: str) -> None:
    report = measured(engine(method))
    assert report["passes"] > 3 and len(report["by_layer"]) == 4
    json.dumps(report)


def test_command(run: Run, tmp_path: Path) -> None:
    file, picture = tmp_path / "s.json", tmp_path / "s.svg"
    outcome = run(
        "analyze", "staleness", "--device", "cpu", "--problems", "1", "-t", "24", "--policy", "none",
        "--policy", "flash+threshold track=4 lookahead=0", "--json", file, "--plot", picture,
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    none, flash = json.loads(file.read_text())["policies"]
    assert none["total_variation"]["p99"] < 1e-4 < flash["total_variation"]["p99"]
    assert flash["options"] == {"track": 4, "lookahead": 0} and "track=4" in outcome.out
    assert picture.stat().st_size < 100_000
    outcome = run("analyze", "staleness", "--policy", "flash colour=1", "--problems", "1", "--device", "cpu")
    assert outcome.code == 2 and "colour" in outcome.err
    outcome = run("analyze", "staleness", "--budgets", "many", "--problems", "1", "--device", "cpu")
    assert outcome.code == 2 and "many" in outcome.err
