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
from .support import decode, poison, random_prompts

FAMILIES = ("llada-tiny", "dream-tiny")
LENGTH, POSITIONS = 24, 64


def engine_for(model: Model, setup: Setup, slots: int = 1) -> Engine:
    """An engine whose keys and values are NaN until they are written."""
    engine = build_engine(model, setup, slots=slots, positions=POSITIONS)
    poison(engine)
    return engine


def watched(model: Model, setup: Setup, text: list[int]) -> tuple[list[SlotStep], Finished]:
    """Decode ``text`` alone; its steps and how it ended."""
    engine = engine_for(model, setup)
    steps: list[SlotStep] = []
    engine.observer = lambda e, record: steps.extend(slot_steps(e, record))
    return steps, decode(model, setup, [text], engine=engine)[0]


def one_layer(model: Model) -> Model:
    """The model's first layer alone: a key depends on its own token and nothing else, so the cached keys of
    known tokens are exact."""
    return dataclasses.replace(
        model, config=dataclasses.replace(model.config, n_layers=1), layers=model.layers[:1]
    )


def check_refill(model: Model, setup: Setup, notes: bool = False) -> None:
    """Five requests through two slots answer as they do alone, at the same cost and, if asked, with the same notes."""
    texts = random_prompts(17, 4, 30, 9, 21)
    together = decode(model, setup, texts, slots=2)
    for index, (text, ours) in enumerate(zip(texts, together, strict=True)):
        engine = engine_for(model, setup)
        engine.add(make_request("alone", text, LENGTH + index, setup.numbers))
        ended: list[Finished] = []
        while not engine.idle:
            ended += engine.step()
        assert ours.ids == ended[0].ids
        assert (ours.nfe, ours.rows, ours.passes) == (ended[0].nfe, ended[0].rows, ended[0].passes)
        assert not notes or ours.notes == ended[0].notes


def check_former_tenant(model: Model, setup: Setup, kept: list[str]) -> None:
    """What a longer request left behind is not read: NaN replaces it, in the cache and in ``kept``.

    Args:
        kept: attributes of the cache policy that hold lists of tensors, ``a.b`` for one of an attribute.
    """
    longer, shorter = random_prompts(33, 8)
    fresh = decode(model, setup, [shorter], engine=engine_for(model, setup))[0]
    engine = engine_for(model, setup)
    decode(model, setup, [longer], engine=engine)
    with torch.inference_mode():
        poison(engine)
        for path in kept:
            value: Any = engine.method.cache
            for name in path.split("."):
                value = getattr(value, name)
            for tensor in value:
                tensor.fill_(float("nan"))
    again = decode(model, setup, [shorter], engine=engine)[0]
    assert again.ids == fresh.ids
    assert again.log_probs == fresh.log_probs
    assert (again.rows, again.nfe) == (fresh.rows, fresh.nfe)
