"""Elastic-Cache: what must hold whatever the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flash_dllm.methods import MethodError, build_method
from flash_dllm.methods.elastic import ElasticCache
from flash_dllm.models.layers import Model

from ..goldens.harness import Setup, golden_model, make_request
from .invariants import FAMILIES, LENGTH, check_former_tenant, check_refill, engine_for, one_layer
from .support import decode, random_prompts

NUMBERS = {"epsilon": 0.5}
OPTIONS: list[dict[str, Any]] = [
    {"window": 8},
    {"window": 8, "drift": 0.97, "track_num": 2},
    {"window": 6, "drift": 0.8, "block_caching": False},
    {"window": 8, "drift": 0.95, "similarity": "keys"},
]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, golden_dir: Path) -> Model:
    return golden_model(golden_dir / request.param)


@pytest.mark.parametrize(("decoding", "numbers"), [("threshold", NUMBERS), ("greedy", {"steps": 12})])
def test_a_drift_that_always_fires_equals_no_cache(
    model: Model, decoding: str, numbers: dict[str, Any]
) -> None:
    texts = random_prompts(17, 9, 30)
    plain = Setup("none", decoding, numbers, {"window": 8}, "window")
    ours = Setup("elastic", decoding, numbers, {"window": 8, "drift": 2.0})
    for a, b in zip(
        decode(model, plain, texts, slots=2),
        decode(model, ours, texts, slots=2),
        strict=True,
    ):
        assert (a.ids, a.nfe, a.passes, a.rows) == (b.ids, b.nfe, b.passes, b.rows)


@pytest.mark.parametrize("options", OPTIONS)
def test_cached_keys_of_one_layer_are_exact(model: Model, options: dict[str, Any]) -> None:
    small, texts = one_layer(model), random_prompts(17, 9)
    plain = Setup("none", "threshold", NUMBERS, {"window": options["window"]}, "window")
    want = decode(small, plain, texts, slots=2)
    ours = decode(small, Setup("elastic", "threshold", NUMBERS, options), texts, slots=2)
    for a, b in zip(want, ours, strict=True):
        assert (a.ids, a.nfe, a.passes) == (b.ids, b.nfe, b.passes)
        assert a.rows > b.rows


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.usefixtures("poisoned")
def test_batches_and_slots(model: Model, options: dict[str, Any]) -> None:
    setup = Setup("elastic", "threshold", NUMBERS, options)
    check_refill(model, setup)
    check_former_tenant(model, setup, ["store.inputs", "store.queries"])


def test_slots_drift_at_layers_of_their_own(model: Model) -> None:
    setup = Setup("elastic", "threshold", NUMBERS, {"window": 8, "drift": 0.9})
    engine = engine_for(model, setup, 2)
    for index, text in enumerate(random_prompts(17, 9)):
        engine.add(make_request(str(index), text, LENGTH, NUMBERS))
    seen, rows = [], torch.zeros(2, dtype=torch.int64)
    policy = engine.method.cache
    assert isinstance(policy, ElasticCache)
    while not engine.idle:
        engine.step()
        layers = torch.stack([mask.sum(1) for mask in policy.seen.layers])
        rows += -(-layers.sum(0) // len(layers))
        seen.append(tuple(policy.seen.first_full))
        for slot, first in enumerate(policy.seen.first_full):
            if layers[0, slot] and first:
                # The layer that finds the drift is not refreshed, those above it are.
                assert layers[:first, slot].max() < [17, 9][slot] + LENGTH
                assert (layers[first:, slot] == [17, 9][slot] + LENGTH).all()
    assert any(a != b for a, b in seen)
    assert engine.totals.rows == rows.sum()


def test_a_stable_attention_never_drifts(model: Model) -> None:
    setup = Setup("elastic", "threshold", NUMBERS, {"window": 8, "drift": 0.0})
    engine = engine_for(model, setup)
    engine.add(make_request("0", random_prompts(17)[0], LENGTH, NUMBERS))
    policy = engine.method.cache
    assert isinstance(policy, ElasticCache)
    engine.step()
    while not engine.idle:
        engine.step()
        assert policy.seen.first_full == [model.config.n_layers]


def test_the_two_similarities_differ(model: Model) -> None:
    first: list[list[float]] = []
    for similarity in ("heads", "keys"):
        setup = Setup("elastic", "threshold", NUMBERS, {"window": 8, "similarity": similarity})
        engine = engine_for(model, setup)
        engine.add(make_request("0", random_prompts(17)[0], LENGTH, NUMBERS))
        engine.step()
        engine.step()
        policy = engine.method.cache
        assert isinstance(policy, ElasticCache)
        assert all(0 < float(s[0]) <= 1.0001 for s in policy.seen.similarity if float(s[0]) == float(s[0]))
        first.append(policy.seen.similarity[0].tolist())
    assert first[0] != first[1]


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="similarity"):
        ElasticCache(similarity="mine")
    with pytest.raises(ValueError, match="track_num"):
        ElasticCache(track_num=0)
    with pytest.raises(MethodError, match="does not run with decoding"):
        build_method("elastic", "verify", family="llada")
