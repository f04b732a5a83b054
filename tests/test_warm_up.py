"""The warm-up compiles and records what requests would wait for, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_dllm.core.forward import warm
from flash_dllm.core.step import Vocabulary
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.runner import Runner
from flash_dllm.kernels import gated_linear, qkv_rope_write
from flash_dllm.kernels.choice import kernels_of
from flash_dllm.kernels.gated_linear import triton as gated_kernel
from flash_dllm.kernels.qkv_rope_write import streamed
from flash_dllm.llm import LLM
from flash_dllm.methods.presets import PRESETS, build_preset
from tests.interpreter import repair
from tests.test_recorded_caches import cached, run_blocks
from tests.test_runner import FAMILIES, METHODS, Again, drained, engine, facts, models, request, run


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> None:
    """Triton's interpreter multiplies and rounds bfloat16 as a GPU does."""
    repair()


def kernels_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of those that run, from here on."""
    ran: list[str] = []

    def note(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: ran.append(name) or kernel(*args)

    monkeypatch.setattr(gated_kernel, "gated_linear", note("gated", gated_kernel.gated_linear))
    monkeypatch.setattr(streamed, "streamed", note("streamed", streamed.streamed))
    return ran


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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "method", [("none", "threshold"), ("elastic", "threshold"), ("dkv-greedy", "random")]
)
def test_warming_up_what_is_not_recorded_changes_nothing(family: str, method: tuple[str, str]) -> None:
    """It compiles what requests would wait for, what they may ask for included, where no canvas has to be there."""
    model = models(family)
    plain = run_blocks(cached(model, family, (*method, {})), model)
    one = cached(model, family, (*method, {}))
    one.runner = Runner(one.decoder, Again)
    seen, step = set(), one.decoder.step
    one.decoder.step = lambda lanes: (seen.add(tuple(vars(one.decoder.hints).values())), step(lanes))[1]  # type: ignore[assignment,method-assign]
    assert list(one.warm_up()) == []
    assert len(seen) == (4 if method[0] == "none" else 0) and one.runner.tapes == {}
    assert run_blocks(one, model) == plain


@pytest.mark.parametrize("family", FAMILIES)
def test_what_only_many_rows_take_is_compiled_before(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes nothing but a trash place, and nothing is called where the kernels are other ones."""
    ran = kernels_of_many_rows(monkeypatch)
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
    ran = kernels_of_many_rows(monkeypatch)
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **of: compiled.append(of["fn"].name)
    )
    for index in range(40):
        one.add(request(f"r{index}", 35, model))
    drained(one)
    for index, numbers in enumerate(
        ({}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9}, {"suppress": 1})
    ):
        one.add(request(f"s{index}", 3 + index, model, **numbers))
        drained(one)
    assert {"gated", "streamed"} <= set(ran), "the first pass has many rows"
    assert compiled == []


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("decoding", ["threshold", "verify"])
def test_every_preset_warms_up(preset: str, decoding: str) -> None:
    """Some keep numbers of seated canvases on the host, and here is none."""
    model = models("llada")
    vocabulary = Vocabulary(model.config.vocab_size, model.config.mask_id, model.config.eos_ids)

    def answers(warmed: bool) -> dict[str, tuple[Any, ...]]:
        built = build_preset(
            preset, family="llada", eos_id=vocabulary.eos_ids[0], cache=None, decoding=decoding, options={}
        )
        one = Engine(model, built, vocabulary, slots=2, positions=built.cache.positions(120), late=False)
        one.runner = Runner(one.decoder, Again)
        if warmed:
            list(one.warm_up())
        one.add(request("a", 90, model))
        return facts(drained(one))

    assert answers(True) == answers(False)


def test_warming_up_tells_how_far_it_is(capsys: pytest.CaptureFixture[str], bare_folder: Path) -> None:
    llm = LLM(bare_folder, device="cpu", cache="flash", decoding="threshold", max_num_seqs=2)
    llm.warm_up(progress=True)
    assert capsys.readouterr().err == ""
    llm.engine.runner = Runner(llm.engine.decoder, Again)
    llm.warm_up(progress=True)
    assert capsys.readouterr().err.splitlines() == ["recording steps: 1 of 2", "recording steps: 2 of 2"]
