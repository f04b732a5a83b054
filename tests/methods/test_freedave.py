"""FreeDave: lossless whatever the weights, the walk against a slow twin, batches and counters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flash_dllm.methods import MethodError, build_method
from flash_dllm.methods.freedave import furthest
from flash_dllm.models.layers import Model

from ..goldens.harness import Setup, golden_model, make_request
from .invariants import FAMILIES, LENGTH, check_former_tenant, check_refill, engine_for, watched
from .support import decode, ids, random_prompts

CACHES = ("prefix", "dual")
SCHEDULES = ("blocks", "blocks-dream-as-released")


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, golden_dir: Path) -> Model:
    return golden_model(golden_dir / request.param)


def one_token(cache: str, schedule: str, block: int = 8) -> Setup:
    """The decoder that FreeDave equals: one token a step."""
    numbers = {"steps": 10_000, "block_length": block}
    return Setup(cache, "greedy", numbers, schedule=schedule)


def freedave(
    cache: str, schedule: str, numbers: dict[str, Any] | None = None, draft_steps: int | None = None
) -> Setup:
    numbers = {"block_length": 8, **(numbers or {})}
    return Setup(cache, "freedave", numbers, {"draft_steps": draft_steps}, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("cache", CACHES)
def test_equals_one_token_a_step_in_fewer_passes(model: Model, cache: str, schedule: str) -> None:
    texts = random_prompts(17, 9, 30)
    plain_setup = one_token(cache, schedule)
    plain = decode(model, plain_setup, texts, slots=2)
    for draft_steps in (1, 3, None):
        setup = freedave(cache, schedule, draft_steps=draft_steps)
        ours = decode(model, setup, texts, slots=2)
        assert ids(ours) == ids(plain)
    assert sum(f.nfe for f in ours) < sum(f.nfe for f in plain)


@pytest.mark.parametrize("block", [1, 2, 5, 100])
def test_blocks_of_every_size(model: Model, block: int) -> None:
    for schedule in SCHEDULES:
        plain_setup = one_token("dual", schedule, block)
        setup = freedave("dual", schedule, {"block_length": block})
        plain = decode(model, plain_setup, random_prompts(9, 14), slots=2)
        ours = decode(model, setup, random_prompts(9, 14), slots=2)
        assert ids(ours) == ids(plain)


@pytest.mark.parametrize("cache", CACHES)
def test_nothing_behind_a_stop_token_is_decoded(model: Model, cache: str) -> None:
    # Any token can be made a stop token; those of the plain answer come soon enough.
    text = random_prompts(17)[0]
    plain_setup, setup = one_token(cache, "blocks"), freedave(cache, "blocks")
    answer = decode(model, plain_setup, [text])[0].ids[len(text) :]
    for stop in sorted(set(answer))[:6]:
        ended = []
        for each in (plain_setup, setup):
            request = make_request("0", text, LENGTH, {**each.numbers, "stop_at_eos": True})
            object.__setattr__(request.canvas, "stop_ids", (stop,))
            engine = engine_for(model, each)
            engine.add(request)
            while not engine.idle:
                ended += engine.step()
        plain, ours = ended
        assert (ours.ids, ours.end, ours.reason) == (plain.ids, plain.end, plain.reason)


@pytest.mark.parametrize("numbers", [{}, {"epsilon": 0.5}])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.usefixtures("poisoned")
def test_batches_and_slots(model: Model, cache: str, numbers: dict[str, Any]) -> None:
    setup = freedave(cache, "blocks", numbers)
    check_refill(model, setup)
    check_former_tenant(model, setup, [])


def test_an_epsilon_commits_as_many_as_threshold_or_more(model: Model) -> None:
    numbers = {"epsilon": 0.5, "block_length": 8}
    setup = freedave("dual", "blocks", numbers)
    threshold = decode(model, Setup("dual", "threshold", numbers), random_prompts(17, 9), slots=2)
    static = decode(model, freedave("dual", "blocks"), random_prompts(17, 9), slots=2)
    ours = decode(model, setup, random_prompts(17, 9), slots=2)
    blocks = [3, 4]
    assert all(a.nfe <= b.nfe + extra for a, b, extra in zip(ours, threshold, blocks, strict=True))
    assert sum(f.nfe for f in ours) < sum(f.nfe for f in static)


def test_rows_and_branches_are_counted(model: Model) -> None:
    for cache in CACHES:
        steps, ended = watched(model, freedave(cache, "blocks", draft_steps=3), random_prompts(20)[0])
        rows = 0
        for step in steps:
            seen = step.passes[0]
            rows += len(seen.positions) + len(seen.extra)
            assert bool(seen.positions) != bool(seen.extra)
            assert seen.full or len({rank for *_, rank in seen.extra}) <= 3
        assert (ended.rows, ended.nfe) == (rows, len(steps))


def walk_slowly(fits: list[list[bool]]) -> int:
    best = 0
    while True:
        further = [j for j in range(best + 1, len(fits)) if fits[best][j]]
        if not further:
            return best
        best = max(further)


@pytest.mark.parametrize("branches", [1, 2, 4, 8])
def test_the_walk_equals_its_slow_twin(branches: int) -> None:
    made = torch.Generator().manual_seed(branches)
    fits = torch.rand(200, branches, branches, generator=made) < 0.4
    assert furthest(fits).tolist() == [walk_slowly(f) for f in fits.tolist()]


def test_what_is_refused() -> None:
    with pytest.raises(MethodError, match="does not run over cache 'none'"):
        build_method("none", "freedave", family="llada")
    with pytest.raises(ValueError, match="draft_steps"):
        build_method("dual", "freedave", family="llada", draft_steps=-1)
