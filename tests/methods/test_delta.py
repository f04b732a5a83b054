"""The delta loop and its methods: what must hold whatever the weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_dllm.core.delta import DeltaPolicy
from flash_dllm.core.method import Blocks, Verifier
from flash_dllm.core.state import State
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.request import Finished, RequestError
from flash_dllm.methods import MethodError, assemble
from flash_dllm.methods.dllm_cache import DLLMCache
from flash_dllm.methods.dynamic_dllm import Adaptive, DynamicCache
from flash_dllm.methods.fast_dllm import Threshold
from flash_dllm.models.layers import Model

from ..goldens.harness import Setup, build_engine, golden_model, make_request

FAMILIES = ("llada-tiny", "dream-tiny")
LENGTH, POSITIONS = 24, 64
GREEDY = {"steps": LENGTH, "block_length": 8}
PLAIN = {"llada-tiny": [("greedy", GREEDY), ("threshold", {"epsilon": 0.5, "block_length": 8})]}
PLAIN["dream-tiny"] = [("entropy", {"steps": 12}), ("threshold", {"epsilon": 0.5, "block_length": 8})]

EVERYTHING: list[tuple[str, dict[str, Any]]] = [
    ("dllm-cache", {"kp": 1, "kr": 1}),
    ("dllm-cache", {"kp": 1, "kr": 3, "rho": 1.0}),
    ("dynamic", {"kp": 1, "kr": 1}),
    ("dynamic", {"kp": 1, "kr": 3, "window_size": 1000}),
    ("dynamic", {"kp": 1, "kr": 3, "window_size": 4, "layer_budget": 1000}),
    ("dynamic", {"kp": 1, "kr": 3, "window_size": 4, "layer_budget": 1000, "compare": "input"}),
]
SOME: list[tuple[str, str, dict[str, Any]]] = [
    ("dllm-cache", "greedy", {"kp": 5, "kr": 3, "rho": 0.25}),
    ("dllm-cache", "threshold", {"kp": 4, "kr": 2, "rho": 0.0}),
    ("dynamic", "greedy", {"kp": 7, "kr": 4, "window_size": 5, "layer_budget": 2}),
    ("dynamic", "greedy", {"window_size": 4, "layer_budget": 4, "budget": "paper", "compare": "input"}),
    ("none", "adaptive", {"mode": 1, "alpha": 0.02, "beta": 0.05}),
    ("dynamic", "adaptive", {"mode": 2, "alpha": 0.02, "beta": 0.05, "window_size": 8, "layer_budget": 1}),
]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, golden_dir: Path) -> Model:
    return golden_model(golden_dir / request.param)


def prompts(*lengths: int) -> list[list[int]]:
    made = torch.Generator().manual_seed(5)
    return [torch.randint(0, 500, (n,), generator=made).tolist() for n in lengths]


def decode(engine: Engine, numbers: dict[str, Any], texts: list[list[int]]) -> list[Finished]:
    """Decode ``texts``, the i-th with i tokens more than the first; the answers in their order."""
    for index, text in enumerate(texts):
        engine.add(make_request(str(index), text, LENGTH + index, numbers))
    ended: dict[str, Finished] = {}
    while not engine.idle:
        ended.update({f.request.id: f for f in engine.step()})
    return [ended[str(index)] for index in range(len(texts))]


def engine_for(model: Model, setup: Setup, slots: int = 1) -> Engine:
    return build_engine(model, setup, slots=slots, positions=POSITIONS)


def setups(model: Model) -> Iterator[Setup]:
    for cache, decoding, options in SOME:
        numbers = {**GREEDY, "epsilon": 0.6}
        if model.config.shift and decoding == "greedy":
            decoding, numbers = "maskgit_plus", {"steps": 12}
        yield Setup(cache, decoding, numbers, options)


@pytest.mark.parametrize(("cache", "options"), EVERYTHING)
def test_refreshing_everything_equals_no_cache(model: Model, cache: str, options: dict[str, Any]) -> None:
    name = "dream-tiny" if model.config.shift else "llada-tiny"
    texts = prompts(17, 9)
    for decoding, numbers in PLAIN[name]:
        plain = decode(engine_for(model, Setup("none", decoding, numbers), 2), numbers, texts)
        ours = decode(engine_for(model, Setup(cache, decoding, numbers, options), 2), numbers, texts)
        for a, b in zip(plain, ours, strict=True):
            assert a.ids == b.ids
            assert (a.nfe, a.passes, a.rows) == (b.nfe, b.passes, b.rows)


@pytest.mark.parametrize("case", range(len(SOME)))
def test_a_batch_with_refill_equals_one_at_a_time(model: Model, case: int) -> None:
    setup = list(setups(model))[case]
    texts = prompts(17, 4, 30, 9, 21)
    together = decode(engine_for(model, setup, 2), setup.numbers, texts)
    for index, (text, ours) in enumerate(zip(texts, together, strict=True)):
        engine = engine_for(model, setup)
        engine.add(make_request("alone", text, LENGTH + index, setup.numbers))
        while not engine.idle:
            ended = engine.step()
        assert ours.ids == ended[0].ids
        assert (ours.nfe, ours.rows, ours.passes) == (ended[0].nfe, ended[0].rows, ended[0].passes)


@pytest.mark.parametrize("case", range(len(SOME)))
@pytest.mark.usefixtures("poisoned")
def test_nothing_of_a_former_tenant_is_read(model: Model, case: int) -> None:
    setup = list(setups(model))[case]
    longer, shorter = prompts(33, 8)
    fresh = decode(engine_for(model, setup), setup.numbers, [shorter])[0]
    engine = engine_for(model, setup)
    decode(engine, setup.numbers, [longer])
    with torch.inference_mode():
        for tensor in kept(engine):
            tensor.fill_(float("nan"))
    again = decode(engine, setup.numbers, [shorter])[0]
    assert again.ids == fresh.ids
    assert again.log_probs == fresh.log_probs
    assert again.rows == fresh.rows


def kept(engine: Engine) -> list[torch.Tensor]:
    """Everything that outlives a pass beside the state."""
    policy, rule, kv = engine.method.cache, engine.method.rule, engine.decoder.ctx.kv
    tensors = [*kv.keys, *kv.values]
    if isinstance(policy, DeltaPolicy) and policy.store is not None:
        tensors += [*policy.store.attn, *policy.store.ffn, *policy.store.inputs]
    if isinstance(policy, DynamicCache) and policy.moved is not None:
        tensors.append(policy.moved)
    if isinstance(rule, Adaptive) and rule.tau is not None and rule.seen is not None:
        tensors += [rule.tau, rule.seen]
    return tensors


def test_rows_recomputed_are_counted(model: Model) -> None:
    options = {"kp": 1000, "kr": 1000, "rho": 0.25}
    numbers = {"epsilon": 0.6, "block_length": 8}
    (text,) = prompts(20)
    ended = decode(engine_for(model, Setup("dllm-cache", "threshold", numbers, options)), numbers, [text])[0]
    layers, total = model.config.n_layers, len(text) + LENGTH
    some = int(0.25 * (LENGTH + model.config.shift))
    a_step = -(-(total + (layers - 1) * some) // layers)
    assert ended.nfe > 1
    assert ended.rows == total + (ended.nfe - 1) * a_step


@pytest.mark.parametrize(("split", "from_row"), [("predicted", 19), ("row", 20)])
def test_the_row_that_predicts_the_first_answer_token(golden_dir: Path, split: str, from_row: int) -> None:
    model = golden_model(golden_dir / "dream-tiny")
    numbers = {"steps": 12}
    setup = Setup("dllm-cache", "entropy", numbers, {"kp": 1000, "kr": 1, "split": split})
    engine, seen = engine_for(model, setup), []
    engine.observer = lambda e, record: seen.append(record.passes[0].layers)
    decode(engine, numbers, prompts(20))
    for layers in seen[1:]:
        assert layers[0][0].nonzero().flatten().tolist() == list(range(20 + LENGTH))
        assert layers[1][0].nonzero().flatten().tolist() == list(range(from_row, 20 + LENGTH))


@pytest.mark.parametrize("compare", ["value", "input"])
def test_rows_that_did_not_change_have_not_moved(golden_dir: Path, compare: str) -> None:
    # With steps = length, Dream's first step commits nothing, so the second pass sees the same canvas.
    model = golden_model(golden_dir / "dream-tiny")
    numbers = {"steps": LENGTH}
    engine = engine_for(model, Setup("dynamic", "entropy", numbers, {"compare": compare, "window_size": 4}))
    engine.add(make_request("0", prompts(20)[0], LENGTH, numbers))
    moved = []
    for _ in range(3):
        engine.step()
        policy = engine.method.cache
        assert isinstance(policy, DynamicCache) and policy.moved is not None
        moved.append(policy.moved[1:].abs().max())
    assert moved[1] < 1e-5 < 1e-3 < moved[2]


def test_the_budget_of_a_layer() -> None:
    state, later = State(2, 8), [5, 5]
    assert DynamicCache(layer_budget=3).budgets(state, 4, later) == [[24, 24]] * 4
    assert DynamicCache(layer_budget=3).budgets(state, 4, None) == [[24, 24]] * 4
    paper = DynamicCache(layer_budget=4, budget="paper")
    assert paper.budgets(state, 3, later) == [[4, 4]] * 3
    paper.moved = torch.tensor([[0.0, 0.0], [0.25, 0.25], [0.25, 0.75]])
    assert paper.budgets(state, 3, later) == [[0, 0], [4, 2], [4, 6]]
    for policy in (DynamicCache(layer_budget=4), paper):
        assert policy.budgets(state, 3, [1, 1]) == [[4, 4]] * 3


def test_adaptive_with_constant_thresholds_is_threshold(model: Model) -> None:
    numbers = {"epsilon": 0.5, "block_length": 8}
    texts = prompts(17, 9)
    plain = decode(engine_for(model, Setup("none", "threshold", numbers), 2), numbers, texts)
    for options in ({"mode": 0}, {"mode": 2, "alpha": 0.0, "beta": 0.0}):
        ours = decode(engine_for(model, Setup("none", "adaptive", numbers, options), 2), numbers, texts)
        assert [f.ids for f in ours] == [f.ids for f in plain]
        assert [f.nfe for f in ours] == [f.nfe for f in plain]


def test_what_is_refused(golden_dir: Path) -> None:
    with pytest.raises(MethodError, match="'dllm-cache' does not run with decoding 'verifier'"):
        assemble(DLLMCache(), Blocks(), Threshold(), Verifier())
    engine = engine_for(golden_model(golden_dir / "llada-tiny"), Setup("dynamic", "greedy"), 2)
    with pytest.raises(RequestError, match="cfg_scale"):
        engine.add(make_request("0", prompts(5)[0], LENGTH, {**GREEDY, "cfg_scale": 1.0}))
    for wrong in ({"kp": 0}, {"rho": 1.5}, {"split": "mine"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            DLLMCache(**wrong)  # type: ignore[arg-type]
    for wrong in ({"budget": "mine"}, {"compare": "x"}, {"window_size": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            DynamicCache(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mode"):
        Adaptive(mode=3)
