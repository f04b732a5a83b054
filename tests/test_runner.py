"""Recorded steps and late reading give what plain steps give; on the CPU a tape runs its step again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_dllm.bench.plans import METHODS as METHODS_PLAN
from flash_dllm.core.forward import warm
from flash_dllm.core.state import Canvas
from flash_dllm.core.step import StepRecord, Vocabulary
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.request import Finished, Request
from flash_dllm.engine.runner import BUCKETS, Runner, bucket
from flash_dllm.kernels import gated_linear, qkv_rope_write
from flash_dllm.kernels.choice import kernels_of
from flash_dllm.kernels.gated_linear import triton as gated_kernel
from flash_dllm.kernels.qkv_rope_write import streamed
from flash_dllm.llm import LLM
from flash_dllm.methods import MethodError, build_method
from flash_dllm.models import ModelError
from flash_dllm.models.config import SHAPES
from flash_dllm.models.layers import Model, random_model
from tests.interpreter import repair

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
        one.runner = Runner(one.decoder, Again)
        assert one.runner.records
        assert facts(run(one, model)) == plain
        assert one.runner.played > 10 and one.runner.eager > 3
        assert set(one.runner.tapes) and all(key.slots in (1, 2, 3) for key in one.runner.tapes)


@pytest.mark.parametrize("family", ["llada", pytest.param("dream", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted({case.method for case in METHODS_PLAN.cases} - {"none+guided"}))
def test_late_reading_changes_nothing(name: str, family: str) -> None:
    """Whatever the method: at the end of a batch it runs a step in which every slot is done already."""
    model = models(family)
    mask = model.config.mask_id
    assert mask is not None
    cache, decoding = name.split("+")
    try:
        built = [build_method(cache, decoding, family=family) for _ in range(2)]
    except MethodError as error:
        pytest.skip(str(error))
    plain, late = (
        facts(run(
            Engine(model, method, Vocabulary(model.config.vocab_size, mask), slots=3, positions=48, late=late),
            model,
        ))
        for method, late in zip(built, (False, True), strict=True)
    )  # fmt: skip
    assert plain == late and len(plain) == 7


def test_steps_of_other_modes_are_recorded_apart() -> None:
    model = models("llada")
    one = engine(model, "llada", METHODS[0])
    one.runner = Runner(one.decoder, Again)
    plain = facts(run(engine(model, "llada", METHODS[0]), model, temperature=0.8))
    run(one, model)
    before = len(one.runner.tapes)
    assert facts(run(one, model, temperature=0.8)) == plain
    assert len(one.runner.tapes) > before


def test_warm_up_records_every_bucket_and_changes_nothing() -> None:
    model = models("llada")
    one = engine(model, "llada", METHODS[3], slots=6)
    one.runner = Runner(one.decoder, Again)
    assert list(one.warm_up()) == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert {key.slots for key in one.runner.tapes} == {1, 2, 4, 6}
    tapes = dict(one.runner.tapes)
    plain = facts(run(engine(model, "llada", METHODS[3], slots=6), model))
    assert facts(run(one, model)) == plain
    assert one.runner.tapes == tapes
    one.add(request("late", 9, model))
    one.step()
    with pytest.raises(RuntimeError, match="warmed up"):
        list(one.warm_up())


SMALL = {"search": 2, "verify_rows": 8}
CACHED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dual-threshold": ("dual", "threshold", {}),
    "dual-factor": ("dual", "factor", {}),
    "dual-verify": ("dual", "verify", SMALL),
    "dual-as-released": ("dual", "threshold", {"schedule": "blocks-as-released"}),
    "prefix-threshold": ("prefix", "threshold", {}),
    "prefix-verify": ("prefix", "verify", SMALL),
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
    done: dict[str, Finished] = {}
    while not one.idle:
        done |= {f.request.id: f for f in one.step()}
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
        one.runner = Runner(one.decoder, Again)
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "method", [("none", "threshold"), ("elastic", "threshold"), ("dkv-greedy", "random")]
)
def test_warming_up_what_is_not_recorded_changes_nothing(family: str, method: tuple[str, str]) -> None:
    """It compiles what requests would wait for, what they may ask for included."""
    model = models(family)
    plain = run_blocks(cached(model, family, (*method, {})), model)
    one = cached(model, family, (*method, {}))
    one.runner = Runner(one.decoder, Again)
    seen, step = set(), one.decoder.step
    one.decoder.step = lambda lanes: (seen.add(tuple(vars(one.decoder.hints).values())), step(lanes))[1]  # type: ignore[assignment,method-assign]
    assert list(one.warm_up()) == []
    assert len(seen) == 4 and one.runner.tapes == {}
    assert run_blocks(one, model) == plain


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


@pytest.mark.parametrize("family", FAMILIES)
def test_what_only_many_rows_take_is_compiled_before(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes nothing but a trash place, and nothing is called where the kernels are other ones."""
    ran: list[str] = []

    def note(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: ran.append(name) or kernel(*args)

    monkeypatch.setattr(gated_kernel, "gated_linear", note("gated", gated_kernel.gated_linear))
    monkeypatch.setattr(streamed, "streamed", note("streamed", streamed.streamed))
    for op in (gated_linear, qkv_rope_write):
        monkeypatch.setattr(op, "streams_tiles", lambda *matrices: True)
    model = models(family).to(dtype=torch.bfloat16)
    for kernels, expected in (
        ("triton", ["streamed", "gated"]),
        ("invariant", []),
        ("ref", []),
        ("auto", []),
    ):
        one = engine(model, family, METHODS[0], kernels=kernels_of(kernels))
        kv = one.decoder.ctx.kv
        for tensor in (*kv.keys, *kv.values):
            tensor.fill_(2.0)
        with torch.inference_mode():
            warm(one.decoder.ctx)
        assert ran == expected, kernels
        ran.clear()
        for tensor in (*kv.keys, *kv.values):
            assert (tensor[1:] == 2).all() and (tensor[0, 1:] == 2).all()


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS[:5], ids=lambda m: "-".join(map(str, (m[1], *m[2].values()))))
def test_nothing_is_compiled_after_the_warm_up(
    method: tuple[str, str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request is as fast as later ones, in passes of many rows, too."""
    triton = pytest.importorskip("triton")
    for op in (gated_linear, qkv_rope_write):
        monkeypatch.setattr(op, "full_waves", lambda *numbers: True)
    model = models("llada").to("cuda", torch.bfloat16)
    one = engine(model, "llada", method, slots=32)
    list(one.warm_up())
    ran: list[str] = []

    def note(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: ran.append(name) or kernel(*args)

    monkeypatch.setattr(gated_kernel, "gated_linear", note("gated", gated_kernel.gated_linear))
    monkeypatch.setattr(streamed, "streamed", note("streamed", streamed.streamed))
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **of: compiled.append(of["fn"].name)
    )
    for index in range(40):
        one.add(request(f"r{index}", 35, model))
    for index, numbers in enumerate(
        ({}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9}, {"suppress": 1})
    ):
        while not one.idle:
            one.step()
        one.add(request(f"s{index}", 3 + index, model, **numbers))
    while not one.idle:
        one.step()
    assert {"gated", "streamed"} <= set(ran), "the first pass has many rows"
    assert compiled == []


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
            done: dict[str, Finished] = {}
            while not one.idle:
                done |= {f.request.id: f for f in one.step()}
            answers.append(facts(done))
        assert answers[0] == answers[1] and len(answers[0]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_invariant_kernels_give_a_request_the_same_bits_in_any_batch(family: str) -> None:
    model = models(family).to(dtype=torch.bfloat16)

    def answers(names: tuple[int, ...], slots: int) -> dict[str, tuple[Any, ...]]:
        one = engine(model, family, METHODS[3], slots=slots, kernels=kernels_of("invariant"))
        for index in names:
            one.add(request(f"r{index}", (4, 6, 3)[index], model))
        done: dict[str, Finished] = {}
        while not one.idle:
            done |= {f.request.id: f for f in one.step()}
        return {name: (f.ids, f.log_probs) for name, f in done.items()}

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


def test_warming_up_tells_how_far_it_is(capsys: pytest.CaptureFixture[str], bare_folder: Path) -> None:
    llm = LLM(bare_folder, device="cpu", cache="flash", decoding="threshold", max_num_seqs=2)
    llm.warm_up(progress=True)
    assert capsys.readouterr().err == ""
    llm.engine.runner = Runner(llm.engine.decoder, Again)
    llm.warm_up(progress=True)
    assert capsys.readouterr().err.splitlines() == ["recording steps: 1 of 2", "recording steps: 2 of 2"]


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
