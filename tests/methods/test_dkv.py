"""dKV-Cache: what must hold whatever the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from flash_dllm.core.noise import CounterNoise
from flash_dllm.engine.engine import Engine
from flash_dllm.methods import MethodError, build_method
from flash_dllm.models.layers import Model

from ..goldens.harness import Setup, build_engine, golden_model
from .invariants import (
    FAMILIES,
    LENGTH,
    POSITIONS,
    check_former_tenant,
    check_refill,
    one_layer,
    watched,
)  # fmt: skip
from .support import decode, random_prompts

GREEDY = {"steps": 12, "block_length": 8}
PLAIN = {"llada": ("greedy", GREEDY), "dream": ("entropy", {"steps": 12})}
SETUPS: list[tuple[str, dict[str, Any]]] = [
    ("dkv-decode", {"refresh": 3}),
    ("dkv-decode", {"refresh": 4, "shift_type": "un_right"}),
    ("dkv-prefill", {}),
    ("dkv-pd", {"refresh": 3}),
]


class FixedOrder(CounterNoise):
    """The same number for a position in every step."""

    def per_position(self, pos: Tensor, valid: Tensor) -> Tensor:
        return ((pos * 37 + 11) % 64).float() / 64


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, golden_dir: Path) -> Model:
    return golden_model(golden_dir / request.param)


def setup_of(model: Model, cache: str, options: dict[str, Any]) -> Setup:
    decoding, numbers = PLAIN[model.config.family]
    return Setup(cache, decoding, numbers, options)


def same(model: Model, ours: Setup, plain: Setup, texts: list[list[int]], rows: bool) -> None:
    def engine(setup: Setup) -> Engine:
        return build_engine(model, setup, slots=2, positions=POSITIONS, noise=FixedOrder())

    want = decode(model, plain, texts, engine=engine(plain))
    for a, b in zip(decode(model, ours, texts, engine=engine(ours)), want, strict=True):
        assert (a.ids, a.nfe, a.passes) == (b.ids, b.nfe, b.passes)
        assert a.rows == b.rows if rows else a.rows < b.rows


@pytest.mark.parametrize("cache", ["dkv-decode", "dkv-pd"])
@pytest.mark.parametrize("shift_type", ["un", "un_right"])
def test_refreshed_every_step_equals_no_cache(model: Model, cache: str, shift_type: str) -> None:
    # The prompt of pd is never refreshed; one token before a shifted model's answer holds nothing back.
    lengths = (17, 9, 30) if cache == "dkv-decode" else (0, 0)
    if model.config.shift and cache == "dkv-pd":
        lengths = (1, 1)
    options = {"refresh": 1, "shift_type": shift_type}
    same(
        model,
        setup_of(model, cache, options),
        setup_of(model, "none", {}),
        random_prompts(*lengths),
        rows=True,
    )


def test_decode_runs_with_thresholds_and_windows(model: Model) -> None:
    numbers = {"epsilon": 0.5, "block_length": 8}
    for schedule in ("blocks", "window"):
        ours = Setup("dkv-decode", "threshold", numbers, {"refresh": 1}, schedule)
        same(model, ours, Setup("none", "threshold", numbers, {}, schedule), random_prompts(17, 9), rows=True)


@pytest.mark.parametrize("cache", ["dkv-decode", "dkv-pd", "dkv-prefill"])
def test_cached_keys_of_one_layer_are_exact(model: Model, cache: str) -> None:
    # un freezes rows whose own token is still MASK.
    options = {"shift_type": "un_right"} if cache != "dkv-prefill" else {}
    small = one_layer(model)
    same(
        small, setup_of(model, cache, options), setup_of(model, "none", {}), random_prompts(17, 9), rows=False
    )


@pytest.mark.parametrize(("refresh", "window", "rows"), [(1, 4, True), (2, 0, False), (5, 3, False)])
def test_greedy_in_one_layer_is_random_in_the_same_order(
    model: Model, refresh: int, window: int, rows: bool
) -> None:
    ours = Setup("dkv-greedy", "random", GREEDY, {"refresh": refresh, "window": window})
    same(one_layer(model), ours, Setup("none", "random", GREEDY), random_prompts(17, 9, 30), rows)
    if refresh == 1:
        same(model, ours, Setup("none", "random", GREEDY), random_prompts(17, 9, 30), rows)


def test_rows_of_a_step(golden_dir: Path) -> None:
    model, (text,) = golden_model(golden_dir / "llada-tiny"), random_prompts(17)
    ours = Setup("dkv-greedy", "random", {"steps": 24, "block_length": 24}, {"refresh": 24, "window": 2})
    steps, ended = watched(model, ours, text)
    counts = [len(s.passes[0].positions) for s in steps]
    assert counts[0] == 17 + LENGTH and ended.rows == sum(counts)
    assert counts[1:-2] == [4] * (LENGTH - 3), "two decoded, two masks beside the new one"
    decoded = [s.commits()[0].pos for s in steps]
    for index in range(1, LENGTH):
        assert {decoded[index - 1], decoded[index]} <= set(steps[index].passes[0].positions)
    ours = Setup("dkv-decode", "greedy", {"steps": 24, "block_length": 24}, {"refresh": 100})
    counts = [len(s.passes[0].positions) for s in watched(model, ours, text)[0]]
    assert counts == [41, 41] + [LENGTH - i + 1 for i in range(2, LENGTH)]


@pytest.mark.parametrize(("cache", "options"), SETUPS)
@pytest.mark.usefixtures("poisoned")
def test_batches_and_slots(model: Model, cache: str, options: dict[str, Any]) -> None:
    setup = setup_of(model, cache, options)
    check_refill(model, setup)
    check_former_tenant(model, setup, [])


@pytest.mark.usefixtures("poisoned")
def test_batches_and_slots_of_greedy(model: Model) -> None:
    setup = Setup("dkv-greedy", "random", {**GREEDY, "seed": 3}, {"refresh": 3, "window": 2})
    check_refill(model, setup)
    check_former_tenant(model, setup, ["_turn"])


def test_order_of_greedy_follows_the_seed(model: Model) -> None:
    setup = Setup("dkv-greedy", "random", GREEDY)
    texts = random_prompts(17)
    first, second, again = (decode(model, setup, texts, numbers=[{"seed": s}])[0].passes for s in (1, 2, 1))
    assert first == again != second


def test_refusals() -> None:
    for cache, decoding, options, message in (
        ("dkv-greedy", "greedy", {}, "runs with random"),
        ("dkv-decode", "greedy", {"refresh": 0}, "at least 1"),
        ("dkv-greedy", "random", {"window": -1}, "window = -1"),
        ("dkv-decode", "greedy", {"shift_type": "right"}, "known: un, un_right"),
        ("dkv-prefill", "greedy", {"refresh": 2}, "refresh"),
    ):
        with pytest.raises(MethodError, match=message):
            build_method(cache, decoding, family="llada", **options)
    assert build_method("dkv-decode", "greedy", family="llada").cache.refresh == 8  # type: ignore[attr-defined]
    assert build_method("dkv-decode", "entropy", family="dream").cache.refresh == 4  # type: ignore[attr-defined]
