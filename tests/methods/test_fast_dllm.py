"""Fast-dLLM: the quota rule, block caches on both families, and the released schedule for Dream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flash_dllm.core.method import Method
from flash_dllm.core.noise import CounterNoise
from flash_dllm.core.state import Canvas, State
from flash_dllm.core.step import Vocabulary
from flash_dllm.core.types import Candidates, Draft
from flash_dllm.engine.engine import Engine
from flash_dllm.methods import MethodError, build_method
from flash_dllm.methods.fast_dllm import DualCache, PrefixCache, Quota
from flash_dllm.models.layers import Model

from ..goldens.harness import EOS, MASK, VOCAB, Setup, golden_model
from .invariants import FAMILIES, LENGTH, POSITIONS, check_former_tenant, check_refill, one_layer, watched
from .support import decode, random_prompts

THRESHOLD = {"epsilon": 0.5, "block_length": 8}
RULES: list[tuple[str, dict[str, Any], str | None]] = [
    ("threshold", THRESHOLD, None),
    ("greedy", {"steps": LENGTH, "block_length": 8}, None),
    ("quota", {"steps": 6, "epsilon": 0.4, "block_length": 8}, "blocks"),
    ("entropy", {"steps": 12, "block_length": 8}, "blocks"),
]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, golden_dir: Path) -> Model:
    return golden_model(golden_dir / request.param)


class _AlwaysPrefix(PrefixCache):
    def due(self, state: State) -> torch.Tensor | None:
        return torch.ones_like(state.running)


class _AlwaysDual(DualCache):
    due = _AlwaysPrefix.due


def with_cache(model: Model, method: Method, cache: PrefixCache | DualCache) -> Engine:
    method.cache = cache
    return Engine(model, method, Vocabulary(VOCAB, MASK, (EOS,)), slots=2, positions=POSITIONS)


@pytest.mark.parametrize(("decoding", "numbers", "schedule"), RULES)
def test_refreshing_every_step_equals_no_cache(
    model: Model, decoding: str, numbers: dict[str, Any], schedule: str | None
) -> None:
    texts = random_prompts(17, 9)
    setup = Setup("none", decoding, numbers, schedule=schedule)
    plain = decode(model, setup, texts, slots=2)
    for cache in (_AlwaysPrefix(), _AlwaysDual()):
        method = build_method("dual", decoding, family=model.config.family, schedule=schedule)
        ours = decode(model, setup, texts, engine=with_cache(model, method, cache))
        for a, b in zip(plain, ours, strict=True):
            assert (a.ids, a.nfe, a.passes, a.rows) == (b.ids, b.nfe, b.passes, b.rows)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize(("decoding", "numbers", "schedule"), RULES)
def test_cached_keys_of_one_layer_are_exact(
    model: Model, cache: str, decoding: str, numbers: dict[str, Any], schedule: str | None
) -> None:
    # Dream reads a block's first position at the row before it, which these passes have as a reader only.
    small, texts = one_layer(model), random_prompts(17, 9)
    plain = decode(small, Setup("none", decoding, numbers, schedule=schedule), texts, slots=2)
    ours = decode(small, Setup(cache, decoding, numbers, schedule=schedule), texts, slots=2)
    for a, b in zip(plain, ours, strict=True):
        assert (a.ids, a.nfe, a.passes) == (b.ids, b.nfe, b.passes)
        assert a.rows > b.rows


@pytest.mark.parametrize("schedule", ["blocks", "blocks-dream-as-released"])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.usefixtures("poisoned")
def test_batches_and_slots(model: Model, cache: str, schedule: str) -> None:
    setup = Setup(cache, "threshold", THRESHOLD, schedule=schedule)
    check_refill(model, setup)
    check_former_tenant(model, setup, [])


def test_rows_are_counted(model: Model) -> None:
    (text,) = random_prompts(20)
    for cache, some in (("prefix", lambda start: 20 + LENGTH - start), ("dual", lambda start: 8)):
        steps, ended = watched(model, Setup(cache, "threshold", THRESHOLD), text)
        rows = 0
        for step in steps:
            seen = step.passes[0]
            rows += len(seen.positions) + len(seen.extra)
            if not seen.full:
                start = seen.positions[0]
                assert seen.positions == list(range(start, start + some(start)))
        assert ended.rows == rows
        assert ended.nfe == len(steps)


def test_the_whole_pass_of_the_code_for_dream_commits_the_first_position(model: Model) -> None:
    setup = Setup("dual", "threshold", THRESHOLD, schedule="blocks-dream-as-released")
    steps, _ = watched(model, setup, random_prompts(20)[0])
    whole = [step for step in steps if step.passes[0].full]
    assert [[m.pos for m in step.commits()] for step in whole] == [[20], [28], [36]]
    assert all(not step.passes[0].extra for step in steps)


def quota_slowly(steps: int, confidence: list[list[float]], epsilon: float) -> list[list[int]]:
    """The published bookkeeping: what a step could not use is left over for the next."""
    masked, left_over, out = set(range(len(confidence[0]))), 0, []
    for index, row in enumerate(confidence):
        budget = (len(row) // steps if index < steps else 0) + left_over
        best = sorted(masked, key=lambda j: (-row[j], j))[: max(budget, 1)]
        taken = [j for rank, j in enumerate(best) if rank == 0 or row[j] >= epsilon]
        left_over = budget - len(taken)
        masked -= set(taken)
        out.append(sorted(taken))
    return out


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("steps", [4, 6, 12, 24])
def test_quota_equals_its_slow_twin(seed: int, steps: int) -> None:
    state, schedule = State(1, LENGTH), build_method("none", "quota", family="dream").schedule
    state.load(0, Canvas([MASK] * LENGTH, [True] * LENGTH, numbers={"steps": steps, "epsilon": 0.7}))
    made = torch.Generator().manual_seed(seed)
    table, taken = torch.rand(64, LENGTH, generator=made), []
    for row in table:
        cand = schedule.candidates(state, LENGTH)
        if not cand.valid.any():
            break
        draft = Draft(torch.zeros_like(cand.pos), row[None], row[None])
        take = Quota().commit(state, Candidates(cand.pos, cand.valid), draft, CounterNoise())
        taken.append(cand.pos[take].tolist())
        state.commit(cand.pos, draft.token, draft.prob, take)
        state.end_step(schedule.done(state))
    assert taken == quota_slowly(steps, table[: len(taken)].tolist(), 0.7)


def test_what_is_refused() -> None:
    with pytest.raises(MethodError, match="does not run on schedule 'window'"):
        build_method("dual", "threshold", family="dream", schedule="window")
    with pytest.raises(MethodError, match="none in common"):
        build_method("dual", "branch", family="llada")
