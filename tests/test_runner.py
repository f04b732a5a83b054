"""Recorded steps and late reading give what plain steps give; on the CPU a tape runs its step again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_dllm.bench.plans import METHODS as METHODS_PLAN
from flash_dllm.core.state import Canvas
from flash_dllm.core.step import StepRecord, Vocabulary
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.request import Finished, Request
from flash_dllm.engine.runner import BUCKETS, Runner, bucket
from flash_dllm.kernels.choice import kernels_of
from flash_dllm.llm import LLM
from flash_dllm.methods import MethodError, build_method
from flash_dllm.models import ModelError
from flash_dllm.models.config import SHAPES
from flash_dllm.models.layers import Model, random_model
from tests.interpreter import repair
from tests.tapes import Replayed

FAMILIES = {"llada": "llada-tiny-gqa", "dream": "dream-tiny"}
METHODS = [
    ("flash", "threshold", {}), ("flash", "greedy", {}), ("flash", "branch", {"branches": 2}),
    ("flash", "verify", {}), ("flash", "verify", {"views": "leak-free"}), ("flash", "verify", {"views": "branch"}),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> None:
    """Triton's interpreter multiplies and rounds bfloat16 as a GPU does."""
    repair()


class Again:
    """Stands in for a CUDA graph where there is none: the same step with the same host numbers."""

    def __init__(self, step: Callable[[], StepRecord]) -> None:
        self.play, self.dropped = step, False

    def drop(self) -> None:
        self.dropped = True


def models(family: str) -> Model:
    return random_model(SHAPES[FAMILIES[family]], seed=5)


def engine(
    model: Model, family: str, method: tuple[str, str, dict[str, Any]], slots: int = 3, **options: Any
) -> Engine:
    cache, decoding, extra = method
    small = {"window": 4, "lookahead": 4, "track": 6}
    if decoding == "verify":
        small |= {"search": 2, "verify_rows": 8}
    built = build_method(cache, decoding, family=family, **{**small, **extra})
    mask = model.config.mask_id
    assert mask is not None
    vocabulary = Vocabulary(model.config.vocab_size, mask, model.config.eos_ids)
    return Engine(model, built, vocabulary, slots=slots, positions=48, **options)


def request(name: str, length: int, model: Model, **numbers: float) -> Request:
    mask = model.config.mask_id
    assert mask is not None
    made = torch.Generator().manual_seed(length)
    given = torch.randint(3, 400, (8 + length % 5,), generator=made).tolist()
    ids = given + [mask] * length
    masked = [False] * len(given) + [True] * length
    return Request(
        name, Canvas(ids, masked, model.config.eos_ids[:1], {"epsilon": 0.4, "steps": length, **numbers})
    )


def run(one: Engine, model: Model, **numbers: float) -> dict[str, Finished]:
    for index, length in enumerate((20, 9, 30, 14, 5, 26, 11)):
        one.add(request(f"r{index}", length, model, seed=index, **numbers))
    return drained(one)


def drained(one: Engine) -> dict[str, Finished]:
    """All answers, by request."""
    done: dict[str, Finished] = {}
    while not one.idle:
        done |= {f.request.id: f for f in one.step()}
    return done


def facts(done: dict[str, Finished]) -> dict[str, tuple[Any, ...]]:
    return {
        name: (f.ids, f.end, f.reason, f.steps, f.nfe, f.rows, f.by_confidence, f.by_verify)
        for name, f in done.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS, ids=lambda m: "-".join(map(str, (m[1], *m[2].values()))))
def test_recorded_and_late_steps_change_nothing(family: str, method: tuple[str, str, dict[str, Any]]) -> None:
    model = models(family)
    plain = facts(run(engine(model, family, method), model))
    assert len(plain) == 7
    for late in (False, True):
        one = engine(model, family, method, late=late)
        one.runner = Runner(one.decoder, Replayed)
        assert one.runner.records
        assert facts(run(one, model)) == plain
        assert one.runner.played > 10 and one.runner.eager > 3
        assert set(one.runner.tapes) and all(key.slots in (1, 2, 3) for key in one.runner.tapes)


@pytest.mark.parametrize("family", ["llada", pytest.param("dream", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted({case.method for case in METHODS_PLAN.cases} - {"none+guided"}))
def test_late_reading_of_warmed_recorded_steps_changes_nothing(name: str, family: str) -> None:
    """Whatever the method: at the end of a batch it runs a step in which every slot is done already."""
    model = models(family)
    mask = model.config.mask_id
    assert mask is not None
    cache, decoding = name.split("+")
    seen = []
    for late in (False, True):
        try:
            built = build_method(cache, decoding, family=family)
        except MethodError as error:
            pytest.skip(str(error))
        vocabulary = Vocabulary(model.config.vocab_size, mask)
        one = Engine(model, built, vocabulary, slots=3, positions=48, late=late)
        if late:
            one.runner = Runner(one.decoder, Again)
            list(one.warm_up())
        seen.append(facts(run(one, model)))
    assert seen[0] == seen[1] and len(seen[0]) == 7


def test_steps_of_other_modes_are_recorded_apart() -> None:
    model = models("llada")
    one = engine(model, "llada", METHODS[0])
    one.runner = Runner(one.decoder, Again)
    plain = facts(run(engine(model, "llada", METHODS[0]), model, temperature=0.8))
    run(one, model)
    before = len(one.runner.tapes)
    assert facts(run(one, model, temperature=0.8)) == plain
    assert len(one.runner.tapes) > before


def test_buckets() -> None:
    assert [bucket(n, 40) for n in (1, 3, 9, 13, 17, 21, 25, 33, 40)] == [1, 4, 12, 16, 20, 24, 28, 40, 40]
    assert bucket(300, 4096) == 512 and BUCKETS[-1] == 256


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_decide_as_the_definitions_do(family: str) -> None:
    """Whole requests through Triton (its interpreter on the CPU), in float32, token for token."""
    model = models(family)
    for method in (METHODS[0], METHODS[3]):
        answers = []
        for impl in ("ref", "triton"):
            one = engine(model, family, method, slots=2, kernels=kernels_of(impl))
            for index, length in enumerate((5, 2)):
                one.add(request(f"r{index}", length, model))
            answers.append(facts(drained(one)))
        assert answers[0] == answers[1] and len(answers[0]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_invariant_kernels_give_a_request_the_same_bits_in_any_batch(family: str) -> None:
    model = models(family).to(dtype=torch.bfloat16)

    def answers(names: tuple[int, ...], slots: int) -> dict[str, tuple[Any, ...]]:
        one = engine(model, family, METHODS[3], slots=slots, kernels=kernels_of("invariant"))
        for index in names:
            one.add(request(f"r{index}", (4, 6, 3)[index], model))
        return {name: (f.ids, f.log_probs) for name, f in drained(one).items()}

    together = answers((0, 1, 2), 3)
    assert {**answers((0,), 1), **answers((1,), 2)} == {name: together[name] for name in ("r0", "r1")}


@pytest.mark.parametrize(("options", "named"), [
    ({"deterministic": True}, "deterministic=True needs a CUDA GPU"),
    ({"kernels": "triton"}, "kernels='triton' needs a CUDA GPU"),
])  # fmt: skip
def test_kernels_that_this_device_lacks_are_refused(
    options: dict[str, Any], named: str, bare_folder: Path
) -> None:
    with pytest.raises(ModelError, match=named):
        LLM(bare_folder, device="cpu", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS, ids=lambda m: "-".join(map(str, (m[1], *m[2].values()))))
def test_cuda_graphs_change_nothing(family: str, method: tuple[str, str, dict[str, Any]]) -> None:
    model = models(family).to("cuda")
    plain = facts(run(engine(model, family, method, enforce_eager=True, late=False), model))
    one = engine(model, family, method)
    list(one.warm_up())
    assert facts(run(one, model)) == plain
    assert one.runner.played > 10
    # All at once, so that the holes stay and canvases move down.
    wide = engine(model, family, method, slots=7)
    moves, move = [], wide.decoder.move
    wide.decoder.move = lambda *pair: (moves.append(pair), move(*pair))  # type: ignore[assignment,func-returns-value]
    list(wide.warm_up())
    assert facts(run(wide, model)) == plain and moves


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", [*METHODS, ("none", "verify", None), ("none", "threshold", None)], ids=str)
def test_a_pass_in_parts_is_the_same_pass(family: str, method: tuple[str, str, dict[str, Any]]) -> None:
    model = models(family)

    def answers(slab: int) -> dict[str, tuple[Any, ...]]:
        if method[2] is None:
            built = build_method(*method[:2], family=family)
            one = Engine(model, built, Vocabulary(512, 511, model.config.eos_ids), slots=3, positions=48)
        else:
            one = engine(model, family, method)
        one.decoder.ctx.slab = slab
        return facts(run(one, model))

    plain = answers(10**6)
    assert answers(60) == plain and answers(1) == plain
