"""Decoding a few prompts on a golden model, for the invariant tests of methods."""

from __future__ import annotations

import math
from typing import Any

import torch

from flash_dllm.core.step import StepRecord
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.request import Finished
from flash_dllm.models.layers import Model

from ..goldens.harness import Setup, build_engine, make_request


def random_prompts(*lengths: int, seed: int = 5) -> list[list[int]]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 500, (n,), generator=made).tolist() for n in lengths]


def poison(engine: Engine) -> None:
    """Fill every key and value with NaN: whoever reads a place that this run did not write shows it."""
    for tensor in (*engine.decoder.ctx.kv.keys, *engine.decoder.ctx.kv.values):
        tensor.fill_(math.nan)


def decode(
    model: Model,
    setup: Setup,
    prompts: list[list[int]],
    length: int = 24,
    *,
    slots: int = 1,
    engine: Engine | None = None,
    numbers: list[dict[str, Any]] | None = None,
    records: list[StepRecord] | None = None,
) -> list[Finished]:
    """Decode ``prompts``; the i-th answer has i tokens more than the first. Answers in the prompts' order."""
    if engine is None:
        engine = build_engine(
            model, setup, slots=slots, positions=max(map(len, prompts)) + length + len(prompts)
        )
        poison(engine)
    if records is not None:
        engine.observer = lambda _, record: records.append(record)
    for index, prompt in enumerate(prompts):
        own = numbers[index] if numbers else {}
        engine.add(make_request(str(index), prompt, length + index, {**setup.numbers, **own}))
    ended: dict[str, Finished] = {}
    while not engine.idle:
        ended.update({f.request.id: f for f in engine.step()})
    return [ended[str(index)] for index in range(len(prompts))]


def ids(answers: list[Finished]) -> list[list[int]]:
    assert all(a.error is None for a in answers)
    return [a.ids for a in answers]
