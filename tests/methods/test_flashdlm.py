"""FreeCache and guided diffusion: what must hold whatever the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_dllm.engine.engine import Engine
from flash_dllm.engine.request import Finished
from flash_dllm.methods import MethodError, build_method
from flash_dllm.methods.flashdlm import STRATEGIES, Guided
from flash_dllm.methods.guide import vocabulary_map
from flash_dllm.models.layers import Model, random_model
from flash_dllm.models.reference import forward

from ..goldens.dkv import as_guide
from ..goldens.harness import MASK, Setup, golden_model, make_request
from .invariants import (
    FAMILIES,
    LENGTH,
    check_former_tenant,
    check_refill,
    engine_for,
    one_layer,
    watched,
)  # fmt: skip
from .support import decode, random_prompts

NUMBERS = {"epsilon": 0.5, "block_length": 8}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, golden_dir: Path) -> Model:
    return golden_model(golden_dir / request.param)


@pytest.fixture
def guide(golden_dir: Path) -> Model:
    return as_guide(golden_model(golden_dir / "dream-tiny"))


def same(model: Model, ours: Setup, plain: Setup, texts: list[list[int]], rows: bool) -> None:
    want = decode(model, plain, texts, slots=2)
    for a, b in zip(decode(model, ours, texts, slots=2), want, strict=True):
        assert (a.ids, a.nfe, a.passes) == (b.ids, b.nfe, b.passes)
        assert a.rows == b.rows if rows else a.rows < b.rows


@pytest.mark.parametrize("freeze", ["last-step", "unmasked", "prompt"])
def test_freecache_with_one_block_and_no_prompt_equals_no_cache(model: Model, freeze: str) -> None:
    numbers, texts = {"epsilon": 0.5, "block_length": 64}, random_prompts(0, 0)
    if model.config.shift and freeze != "prompt":
        texts = random_prompts(1, 1)
    ours = Setup("freecache", "threshold", numbers, {"freeze": freeze})
    same(model, ours, Setup("none", "threshold", numbers), texts, rows=True)


def test_keys_frozen_unmasked_are_exact_in_one_layer(model: Model) -> None:
    small, texts = one_layer(model), random_prompts(17, 9, 30)
    plain = Setup("none", "threshold", NUMBERS)
    same(small, Setup("freecache", "threshold", NUMBERS, {"freeze": "unmasked"}), plain, texts, rows=False)
    same(small, Setup("freecache", "threshold", NUMBERS, {"freeze": "prompt"}), plain, texts, rows=False)
    # As released the last tokens of a block stay behind as masks, which shows.
    ours = decode(small, Setup("freecache", "threshold", NUMBERS), texts)
    want = decode(small, plain, texts)
    assert [f.log_probs for f in ours] != [f.log_probs for f in want]


@pytest.mark.parametrize("freeze", ["last-step", "unmasked"])
def test_rows_of_a_freecache_step(model: Model, freeze: str) -> None:
    (text,) = random_prompts(17)
    numbers = {"steps": 24, "block_length": 8}
    steps, ended = watched(model, Setup("freecache", "greedy", numbers, {"freeze": freeze}), text)
    shift = int(model.config.shift)
    for index, step in enumerate(steps):
        block = index // 8 - (freeze == "unmasked" and index % 8 == 0 and index > 0)
        start = 0 if index == 0 else 17 + 8 * block - shift
        assert step.passes[0].positions == list(range(start, 17 + LENGTH))
        assert not step.passes[0].extra
    assert (ended.nfe, ended.rows) == (24, sum(len(s.passes[0].positions) for s in steps))


@pytest.mark.parametrize("freeze", ["last-step", "unmasked", "prompt"])
@pytest.mark.usefixtures("poisoned")
def test_freecache_in_batches_and_slots(model: Model, freeze: str) -> None:
    setup = Setup("freecache", "threshold", NUMBERS, {"freeze": freeze})
    check_refill(model, setup)
    check_former_tenant(model, setup, [])


def guided(guide: Model, cache: str = "none", numbers: dict[str, Any] | None = None, **options: Any) -> Setup:
    return Setup(cache, "guided", numbers or {}, {"guide": guide, "chunk": 8, **options})


def argmaxes(model: Model, ids: list[int]) -> list[int]:
    """What ``model`` predicts at each position of ``ids``; MASK excepted."""
    logits = forward(model, torch.tensor([ids]))[0]
    logits[:, MASK] = -torch.inf
    best: list[int] = logits.argmax(-1).tolist()
    return [best[0], *best[:-1]] if model.config.shift or model.config.causal else best


def test_a_guide_that_accepts_everything(model: Model, guide: Model) -> None:
    (text,) = random_prompts(17)
    setup = guided(guide, strategy="dynamic_threshold", accept_threshold=-1.0)
    ended = decode(model, setup, [text])[0]
    assert ended.ids[17:] == argmaxes(model, text + [MASK] * LENGTH)[17:]
    # One pass over the prompt, then one for each chunk.
    assert (ended.nfe, ended.notes["guide_passes"]) == (1, 1 + LENGTH // 8)


def test_a_guide_that_accepts_nothing_judges_one_token_a_step(model: Model, guide: Model) -> None:
    (text,) = random_prompts(17)
    setup = guided(guide, strategy="dynamic_threshold", accept_threshold=2.0)
    ended = decode(model, setup, [text])[0]
    ids = text + [MASK] * LENGTH
    for pos in range(17, len(ids)):
        ids[pos] = argmaxes(model, ids)[pos]
    assert ended.ids == ids
    assert (ended.nfe, ended.notes["guide_passes"]) == (LENGTH, 1 + LENGTH)


@pytest.mark.parametrize("cache", ["none", "freecache", "dkv-decode"])
@pytest.mark.parametrize("chunk", [3, 32])
def test_a_deterministic_guide_that_corrects_writes_its_own_text(
    model: Model, guide: Model, cache: str, chunk: int
) -> None:
    (text,) = random_prompts(17)
    setup = guided(guide, cache, variant="correct", chunk=chunk)
    ended = decode(model, setup, [text])[0]
    ids = text + [MASK] * LENGTH
    for pos in range(17, len(ids)):
        ids[pos] = argmaxes(guide, ids)[pos]
    assert ended.ids == ids
    assert ended.nfe <= LENGTH and ended.notes["guide_passes"] > ended.nfe


def test_a_canvas_with_given_text_between_its_masks(model: Model, guide: Model) -> None:
    (text,) = random_prompts(40)
    masked = [i in (5, 6, 7, 20, 21, 39) for i in range(40)]
    for first_masked in (False, True):
        holes = [first_masked, *masked[1:]]
        want = [MASK if hole else t for t, hole in zip(text, holes, strict=True)]
        canvas = replace(make_request("x", text, 0 + 1, {}).canvas, ids=list(want), masked=holes)
        engine = engine_for(model, guided(guide, variant="correct", chunk=4))
        engine.add(replace(make_request("x", text, 1, {}), canvas=canvas))
        ended: list[Finished] = []
        while not engine.idle:
            ended += engine.step()
        for pos in [i for i, hole in enumerate(holes) if hole]:
            want[pos] = ended[0].ids[0] if pos == 0 else argmaxes(guide, want)[pos]
        assert ended[0].ids == want


def test_nothing_behind_a_drafted_stop_is_read(golden_dir: Path, guide: Model) -> None:
    model, (text,) = golden_model(golden_dir / "llada-tiny"), random_prompts(17)
    setup = guided(guide, strategy="dynamic_threshold", accept_threshold=-1.0, chunk=4)
    free = decode(model, setup, [text])[0]
    stop = free.ids[17 + 5]
    engine = engine_for(model, setup)
    request = make_request("x", text, LENGTH, {"stop_at_eos": True})
    engine.add(replace(request, canvas=replace(request.canvas, stop_ids=(stop,))))
    (ended,) = engine.step()
    end = free.ids.index(stop, 17)
    assert (ended.reason, ended.end, ended.ids[: end + 1]) == ("stop", end, free.ids[: end + 1])
    assert ended.notes["guide_passes"] == 1 + (end - 17) // 4 + 1
    assert set(ended.ids[end + 1 :]) == {MASK}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("variant", ["judge", "correct"])
@pytest.mark.usefixtures("poisoned")
def test_guided_in_batches_and_slots(model: Model, guide: Model, strategy: str, variant: str) -> None:
    numbers = {"seed": 3}
    setup = guided(guide, "freecache", numbers, strategy=strategy, variant=variant, freeze="prompt")
    check_refill(model, setup, notes=True)


def poison_guide(engine: Engine) -> None:
    rule = engine.method.rule
    assert isinstance(rule, Guided)
    kv = rule.guide.ctx.kv
    with torch.inference_mode():
        for tensor in (*kv.keys, *kv.values, *engine.decoder.ctx.kv.keys, *engine.decoder.ctx.kv.values):
            tensor.fill_(float("nan"))


@pytest.mark.parametrize("variant", ["judge", "correct"])
@pytest.mark.usefixtures("poisoned")
def test_the_guide_forgets_the_former_tenant(model: Model, guide: Model, variant: str) -> None:
    longer, shorter = random_prompts(33, 8)
    setup = guided(guide, variant=variant, strategy="topk", accept_top_k=60)
    fresh = decode(model, setup, [shorter])[0]
    engine = engine_for(model, setup)
    decode(model, setup, [longer], engine=engine)
    poison_guide(engine)
    again = decode(model, setup, [shorter], engine=engine)[0]
    assert (again.ids, again.log_probs, again.nfe) == (fresh.ids, fresh.log_probs, fresh.nfe)
    assert again.notes == fresh.notes


def test_a_guide_with_another_vocabulary(model: Model, guide: Model) -> None:
    texts = random_prompts(17, 9)
    want = decode(model, guided(guide, variant="correct"), texts)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(0))
    config = replace(guide.config, vocab_size=600, n_tokens=600)
    extra = random_model(replace(guide.config, vocab_size=88), seed=1)
    # Id i of the diffusion model is order[i] of the guide; 88 ids of the guide mean nothing to the former.
    embed, head = torch.empty_like(guide.embed), torch.empty_like(guide.head)
    embed[order], head[order] = guide.embed, guide.head
    head, embed = torch.cat([head, extra.head * 0]), torch.cat([embed, extra.embed])
    other = replace(guide, config=config, embed=embed, head=head)
    with pytest.raises(MethodError, match="600 rows, the diffusion model's 512"):
        engine_for(model, guided(other))
    setup = guided(other, variant="correct", guide_map=order)
    assert [f.ids for f in decode(model, setup, texts)] == [f.ids for f in want]
    lost = order.clone()
    lost[want[0].ids[17]] = -1
    setup = guided(other, variant="correct", guide_map=lost)
    assert want[0].ids[17] not in decode(model, setup, texts)[0].ids[17:]


def test_vocabulary_map() -> None:
    assert vocabulary_map({"a": 0, "b": 2, "c": 1}, {"b": 7, "a": 3}, 4).tolist() == [3, -1, 7, -1]
    with pytest.raises(MethodError, match="shares no token"):
        vocabulary_map({"a": 0}, {"b": 0}, 1)


def test_refusals(model: Model, guide: Model) -> None:
    family = model.config.family
    for decoding, options, message in (
        ("guided", {}, "needs a guide"),
        ("guided", {"guide": guide, "strategy": "luck"}, "unknown strategy 'luck'"),
        ("guided", {"guide": guide, "variant": "x"}, "unknown variant 'x'"),
        ("guided", {"guide": guide, "chunk": 0}, "chunk = 0"),
        ("threshold", {"freeze": "soon"}, "unknown freeze 'soon'"),
    ):
        with pytest.raises(MethodError, match=message):
            build_method("freecache", decoding, family=family, **options)
    with pytest.raises(MethodError, match="not causal"):
        engine_for(model, guided(model))
    short = replace(guide, config=replace(guide.config, max_positions=32))
    with pytest.raises(MethodError, match="reads 32 positions"):
        engine_for(model, guided(short))
    with pytest.raises(MethodError, match="guide_map: needs 512"):
        engine_for(model, guided(guide, guide_map=torch.zeros(3, dtype=torch.int64)))
    method = build_method("none", "guided", family=family, guide=guide)
    assert not method.graphable
