"""Flash-Cache, Flash-Verify and branch decoding: what must hold whatever the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flash_dllm.core.step import StepRecord
from flash_dllm.core.types import MASKED
from flash_dllm.methods import MethodError, build_method
from flash_dllm.models.layers import Model

from ..goldens.harness import Setup, build_engine, golden_model, make_request
from .support import decode, ids, poison, random_prompts

MODELS = ("llada-tiny", "llada-tiny-gqa", "dream-tiny")
SMALL = {"track": 8, "lookahead": 8, "window": 8}
LOW = {"epsilon": 0.6, "gamma": 0.5}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, golden_dir: Path) -> Model:
    return golden_model(golden_dir / request.param)


def plain(numbers: dict[str, Any] | None = None, window: int = 8) -> Setup:
    return Setup("none", "threshold", numbers or LOW, {"window": window}, "window")


@pytest.mark.parametrize("options", [{"track": -1}, {"track": 200, "lookahead": 200}])
def test_a_budget_for_everything_equals_no_cache(model: Model, options: dict[str, Any]) -> None:
    prompts = random_prompts(9, 21, 14)
    flash = Setup("flash", "threshold", LOW, {"window": 8, **options})
    assert ids(decode(model, flash, prompts, slots=2)) == ids(decode(model, plain(), prompts))


@pytest.mark.parametrize("decoding", ["verify", "branch"])
@pytest.mark.parametrize("cache", ["none", "flash"])
def test_gamma_above_one_is_threshold_decoding(model: Model, cache: str, decoding: str) -> None:
    prompts = random_prompts(9, 17)
    small = {"window": 8} if cache == "none" else SMALL
    numbers = {"epsilon": 0.6, "gamma": 1.5}
    ours = decode(model, Setup(cache, decoding, numbers, small), prompts, slots=2)
    theirs = decode(model, Setup(cache, "threshold", numbers, small, "window"), prompts)
    assert ids(ours) == ids(theirs)
    assert all(a.by_verify == 0 for a in ours)
    assert [a.steps for a in ours] == [a.steps for a in theirs]


CASES = [
    ("flash", "threshold", SMALL),
    ("flash", "greedy", SMALL),
    ("flash", "threshold", {**SMALL, "track_by": "recent", "refresh_every": 5}),
    ("flash", "threshold", {**SMALL, "track_by": "random", "refresh_on_drift": 0.05}),
    ("flash", "verify", {**SMALL, "search": 4, "verify_rows": 12}),
    ("flash", "verify", {**SMALL, "search": 4, "views": "leak-free", "pin": "verified"}),
    ("flash", "verify", {**SMALL, "search": 4, "views": "branch"}),
    ("flash", "branch", {**SMALL, "branches": 3}),
    ("none", "verify", {"window": 8, "search": 4}),
    ("none", "verify", {"window": 8, "search": 4, "views": "leak-free"}),
    ("none", "branch", {"window": 8, "branches": 2}),
    ("dual", "verify", {"search": 4}),
    ("prefix", "verify", {"search": 4, "views": "leak-free"}),
]


@pytest.mark.parametrize(("cache", "decoding", "options"), CASES)
def test_refilled_slots_give_what_one_at_a_time_gives(
    model: Model, cache: str, decoding: str, options: dict[str, Any]
) -> None:
    prompts = random_prompts(9, 21, 14, 6, 11)
    numbers = [
        {"epsilon": e, "gamma": g} for e, g in ((0.6, 0.5), (0.9, 0.4), (0.5, 0.8), (0.7, 0.3), (0.6, 0.6))
    ]
    setup = Setup(cache, decoding, {"block_length": 8}, options)
    batch = decode(model, setup, prompts, slots=3, numbers=numbers)
    alone = [
        decode(model, setup, [prompt], 24 + i, numbers=[numbers[i]])[0] for i, prompt in enumerate(prompts)
    ]
    assert ids(batch) == ids(alone)
    assert [a.nfe for a in batch] == [a.nfe for a in alone]
    assert [a.rows for a in batch] == [a.rows for a in alone]


def test_nothing_of_a_former_tenant_is_seen(model: Model) -> None:
    setup = Setup("flash", "branch", LOW, {**SMALL, "branches": 3})
    first, second = random_prompts(21, 9)
    engine = build_engine(model, setup, slots=1, positions=48)
    decode(model, setup, [first], engine=engine)
    poison(engine)
    engine.state.score.fill_(float("nan"))
    again = decode(model, setup, [second], engine=engine)
    assert ids(again) == ids(decode(model, setup, [second]))


def test_rows_of_a_step_are_the_budget(model: Model) -> None:
    records: list[StepRecord] = []
    setup = Setup("flash", "threshold", {"epsilon": 1.0}, SMALL)
    decode(model, setup, random_prompts(30), 32, records=records)
    shifted = 8 if model.config.shift else 0
    steady = [int(r.passes[0].recomputed[0]) for r in records[1:8]]
    assert all(24 <= rows <= 24 + shifted for rows in steady)


def test_fresh_commits_are_recomputed_first(golden_dir: Path) -> None:
    model = golden_model(golden_dir / "llada-tiny")
    setup = Setup("flash", "threshold", {"epsilon": 0.6}, {**SMALL, "track": 4})
    engine = build_engine(model, setup, slots=1, positions=64)
    engine.add(make_request("a", random_prompts(20)[0], 32, setup.numbers))
    engine.step()
    while not engine.idle:
        state = engine.state
        before = set(state.fresh[0].nonzero().flatten().tolist())
        seen: list[StepRecord] = []
        engine.observer = lambda _, record, seen=seen: seen.append(record)
        engine.step()
        rows = seen[0].passes[0].rows
        assert rows is not None
        recomputed = set(rows.pos[rows.valid].tolist())
        # More fresh commits than the budget: the rest is carried over.
        assert len(before & recomputed) == min(4, len(before))
        if not engine.idle:
            assert set(state.fresh[0].nonzero().flatten().tolist()) >= before - recomputed


def test_product_rule_accepts_a_prefix_of_the_paper_rule() -> None:
    from hypothesis import given
    from hypothesis import strategies as st

    from flash_dllm.core.method import Search, Second
    from flash_dllm.core.state import State
    from flash_dllm.methods.verify import accept_prefix

    chances = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8)

    @given(chances, st.lists(st.booleans(), min_size=8, max_size=8), st.floats(0.501, 1.0))
    def check(probs: list[float], same: list[bool], gamma: float) -> None:
        k = len(probs)
        prob = torch.tensor([probs])
        # Above one half the draft is the argmax; below, it may or may not be.
        agrees = torch.tensor([[p > 0.5 or s for p, s in zip(probs, same[:k], strict=True)]])
        draft = torch.arange(k)[None]
        search = Search(draft, draft, torch.ones(1, k, dtype=torch.bool))
        second = Second(torch.where(agrees, draft, draft + 100), prob, prob)
        state = State(1, 16)
        state.num["gamma"][0] = gamma
        product = accept_prefix(state, search, second)
        state.num["rule"][0] = 1
        paper = accept_prefix(state, search, second)
        assert bool((product <= paper).all())
        assert product[0].tolist() == sorted(product[0].tolist(), reverse=True)

    check()


def test_branch_accepts_only_its_own_branchs_argmax_by_the_paper_rule(model: Model) -> None:
    records: list[StepRecord] = []
    setup = Setup("none", "branch", {"epsilon": 0.9, "gamma": 0.3, "rule": 1}, {"window": 8, "branches": 4})
    decode(model, setup, random_prompts(9, 15), slots=2, records=records)
    accepted = 0
    for record in records:
        assert record.search is not None and record.second is not None and record.accepted is not None
        flags = record.accepted
        accepted += int(flags.sum())
        assert torch.equal(record.second.token[flags], record.search.token[flags])
        assert bool((record.second.prob_draft[flags] >= 0.3).all())
    assert accepted > 0


def test_every_step_commits_and_never_twice(model: Model) -> None:
    setup = Setup("flash", "verify", LOW, {**SMALL, "search": 4})
    engine = build_engine(model, setup, slots=2, positions=64)
    for index, prompt in enumerate(random_prompts(9, 21, 12)):
        engine.add(make_request(str(index), prompt, 24, setup.numbers))
    known: dict[str, dict[int, int]] = {}
    while not engine.idle:
        engine.step()
        for slot in engine.scheduler.busy:
            request = engine.scheduler.seated[slot]
            assert request is not None
            done = (engine.state.committed_at[slot] < MASKED).nonzero().flatten().tolist()
            now = {p: int(engine.state.ids[slot, p]) for p in done}
            before = known.get(request.id, {})
            assert len(now) > len(before)
            assert before.items() <= now.items()
            known[request.id] = now


@pytest.mark.parametrize(
    ("decoding", "options", "named"),
    [
        ("threshold", {"track": -2}, "track=-2"),
        ("threshold", {"track_by": "luck"}, "track_by='luck'"),
        ("threshold", {"search": 4}, "search"),
        ("verify", {"views": "open"}, "views='open'"),
        ("verify", {"search": 40}, "search=40"),
        ("verify", {"verify_rows": 4}, "verify_rows=4"),
        ("branch", {"branches": 0}, "branches=0"),
        ("origin", {}, "origin"),
    ],
)
def test_wrong_options_are_named(decoding: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises((MethodError, ValueError), match=named):
        build_method("flash", decoding, family="llada", **options)
