"""Caches whose sweeps follow from the canvases play recorded steps in between; row counts are bounds there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flash_dllm.core.step import StepRecord, Vocabulary
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.runner import Runner
from flash_dllm.methods import build_method
from flash_dllm.models.layers import Model
from tests.tapes import Replayed
from tests.test_runner import FAMILIES, Again, drained, engine, facts, models, request

SMALL = {"search": 2, "verify_rows": 8}
CACHED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dual-threshold": ("dual", "threshold", {}),
    "dual-factor": ("dual", "factor", {}),
    "dual-verify": ("dual", "verify", SMALL),
    "dual-as-released": ("dual", "threshold", {"schedule": "blocks-as-released"}),
    "prefix-threshold": ("prefix", "threshold", {}),
    "prefix-verify": ("prefix", "verify", SMALL),
    "freecache": ("freecache", "threshold", {}),
    "freecache-unmasked": ("freecache", "threshold", {"freeze": "unmasked"}),
    "dkv-decode": ("dkv-decode", "threshold", {"schedule": "blocks"}),
    "dkv-prefill": ("dkv-prefill", "threshold", {"schedule": "blocks"}),
    "dkv-pd": ("dkv-pd", "threshold", {"schedule": "blocks", "refresh": 3}),
    "dllm-cache": ("dllm-cache", "threshold", {"kp": 6, "kr": 4, "rho": 0.3}),
    "dllm-cache-idle": ("dllm-cache", "threshold", {"rho": 0.0}),
    "dynamic": ("dynamic", "threshold", {"kp": 9, "kr": 5, "window_size": 5, "layer_budget": 2}),
    "dynamic-inputs": ("dynamic", "threshold", {"window_size": 4, "layer_budget": 1, "compare": "input"}),
}


def cached(model: Model, family: str, method: tuple[str, str, dict[str, Any]], **how: Any) -> Engine:
    cache, decoding, options = method
    built = build_method(cache, decoding, family=family, **options)
    return Engine(
        model, built, Vocabulary(model.config.vocab_size, model.config.mask_id), slots=2, positions=48, **how
    )


def run_blocks(one: Engine, model: Model) -> dict[str, tuple[Any, ...]]:
    """Slots enter blocks at different steps, so whether one is due changes; blocks of several lengths in one batch."""
    for index, length in enumerate((20, 9, 30, 14, 5, 26, 11)):
        numbers = {"block_length": (8, 12, 5)[index % 3], "epsilon": 1.0, "seed": index}
        one.add(request(f"r{index}", length, model, **numbers))
    done = drained(one)
    assert len(done) == 7
    return facts(done)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", CACHED.values(), ids=CACHED)
def test_what_can_be_asked_before_a_step_is_recorded(
    family: str, method: tuple[str, str, dict[str, Any]]
) -> None:
    """Between sweeps and refreshes; row counts and lengths are bounds there, the true ones are on the device."""
    model = models(family)
    plain = run_blocks(cached(model, family, method, late=False), model)
    for late in (False, True):
        one = cached(model, family, method, late=late)
        one.runner = Runner(one.decoder, Replayed)
        if late:
            list(one.warm_up())
        assert run_blocks(one, model) == plain
        assert one.runner.records and one.runner.played > 5 and one.runner.eager > 3


def test_few_recorded_steps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that played last; the others are freed, and recorded again when they come up."""
    model, made = models("llada"), []

    def record(step: Callable[[], StepRecord]) -> Again:
        made.append(Again(step))
        return made[-1]

    monkeypatch.setattr("flash_dllm.engine.runner.PAD", 1)
    method = CACHED["prefix-threshold"]
    plain = run_blocks(cached(model, "llada", method, late=False), model)
    every = cached(model, "llada", method)
    every.runner = Runner(every.decoder, Again)
    assert run_blocks(every, model) == plain and len(every.runner.tapes) > 3
    monkeypatch.setattr("flash_dllm.engine.runner.GRAPHS", 3)
    one = cached(model, "llada", method)
    one.runner = Runner(one.decoder, record)
    for _ in range(3):
        assert run_blocks(one, model) == plain
    kept = list(one.runner.tapes.values())
    assert 1 <= len(kept) <= 3 < len(made)
    assert {id(tape) for tape in made if not tape.dropped} == {id(tape) for tape in kept}


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", CACHED.values(), ids=CACHED)
def test_cuda_graphs_change_nothing_of_a_cache_that_is_asked(
    family: str, method: tuple[str, str, dict[str, Any]]
) -> None:
    model = models(family).to("cuda")
    plain = run_blocks(cached(model, family, method, enforce_eager=True, late=False), model)
    for warmed in (False, True):
        one = cached(model, family, method)
        if warmed:
            list(one.warm_up())
        assert run_blocks(one, model) == plain
        assert one.runner.played > 5


def test_a_method_that_sweeps_is_not_recorded() -> None:
    model = models("llada")
    for cache, decoding, options in (
        ("none", "threshold", {}),
        ("elastic", "threshold", {}),
        ("dkv-greedy", "random", {}),
        ("dynamic", "threshold", {"budget": "paper"}),
        ("dllm-cache", "adaptive", {}),
    ):
        built = build_method(cache, decoding, family="llada", **options)
        one = Engine(model, built, Vocabulary(512, 511), positions=48)
        assert not Runner(one.decoder, Again).records
    assert not engine(model, "llada", ("flash", "threshold", {"track": -1})).runner.records
