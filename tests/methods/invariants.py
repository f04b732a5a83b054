"""What every method must hold whatever the weights, for the tests of single methods."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from flash_dllm.engine.engine import Engine
from flash_dllm.engine.observe import SlotStep, slot_steps
from flash_dllm.engine.request import Finished
from flash_dllm.models.layers import Model

from ..goldens.harness import Setup, build_engine, make_request

FAMILIES = ("llada-tiny", "dream-tiny")
LENGTH, POSITIONS = 24, 64


def prompts(*lengths: int) -> list[list[int]]:
    """Prompts of the given lengths, always the same."""
    made = torch.Generator().manual_seed(5)
    return [torch.randint(0, 500, (n,), generator=made).tolist() for n in lengths]


def engine_for(model: Model, setup: Setup, slots: int = 1) -> Engine:
    return build_engine(model, setup, slots=slots, positions=POSITIONS)


def decode(engine: Engine, numbers: dict[str, Any], texts: list[list[int]]) -> list[Finished]:
    """Decode ``texts``, the i-th with i tokens more than the first; the answers in their order."""
    for index, text in enumerate(texts):
        engine.add(make_request(str(index), text, LENGTH + index, numbers))
    ended: dict[str, Finished] = {}
    while not engine.idle:
        ended.update({f.request.id: f for f in engine.step()})
    return [ended[str(index)] for index in range(len(texts))]


def watched(model: Model, setup: Setup, text: list[int]) -> tuple[list[SlotStep], Finished]:
    """Decode ``text`` alone; its steps and how it ended."""
    engine, steps = engine_for(model, setup), []
    engine.observer = lambda e, record: steps.extend(slot_steps(e, record))
    return steps, decode(engine, setup.numbers, [text])[0]


def one_layer(model: Model) -> Model:
    """The model without its upper layers: each key depends on its own token alone, so that cached keys of known
    tokens are exact."""
    return dataclasses.replace(
        model, config=dataclasses.replace(model.config, n_layers=1), layers=model.layers[:1]
    )


def check_refill(model: Model, setup: Setup) -> None:
    """Five requests through two slots answer as they do alone, at the same cost."""
    texts = prompts(17, 4, 30, 9, 21)
    together = decode(engine_for(model, setup, 2), setup.numbers, texts)
    for index, (text, ours) in enumerate(zip(texts, together, strict=True)):
        engine = engine_for(model, setup)
        engine.add(make_request("alone", text, LENGTH + index, setup.numbers))
        ended: list[Finished] = []
        while not engine.idle:
            ended += engine.step()
        assert ours.ids == ended[0].ids
        assert (ours.nfe, ours.rows, ours.passes) == (ended[0].nfe, ended[0].rows, ended[0].passes)


def check_former_tenant(model: Model, setup: Setup, kept: list[str]) -> None:
    """What a longer request left behind is not read: it is replaced by NaN, in the cache and in ``kept``.

    Args:
        kept: attributes of the cache policy that hold tensors, ``a.b`` for one of an attribute.
    """
    longer, shorter = prompts(33, 8)
    fresh = decode(engine_for(model, setup), setup.numbers, [shorter])[0]
    engine = engine_for(model, setup)
    decode(engine, setup.numbers, [longer])
    tensors = [*engine.decoder.ctx.kv.keys, *engine.decoder.ctx.kv.values]
    for path in kept:
        value: Any = engine.method.cache
        for name in path.split("."):
            value = getattr(value, name)
        tensors += value
    with torch.inference_mode():
        for tensor in tensors:
            tensor.fill_(float("nan"))
    again = decode(engine, setup.numbers, [shorter])[0]
    assert again.ids == fresh.ids
    assert again.log_probs == fresh.log_probs
    assert (again.rows, again.nfe) == (fresh.rows, fresh.nfe)
