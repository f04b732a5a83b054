"""A decoding step makes few small operations beside the model's layers: on a GPU each is a launch of its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flash_dllm.bench.synthetic import Setting, engine_for, request, weights
from flash_dllm.core.constants import where
from flash_dllm.core.step import StepRecord
from flash_dllm.engine.runner import Runner

from .launches import LaunchCounter

SHAPE = "llada-tiny"
METHODS: list[tuple[str, dict[str, Any], tuple[int, int, int]]] = [
    ("flash+threshold", {}, (112, 115, 123)), ("flash+verify", {}, (226, 230, 249)),
    ("flash+branch", {"branches": 4}, (218, 222, 232)),
]  # fmt: skip
"""Method, options, and the most launches of a steady step for each of :data:`SLOTS`."""
SLOTS = [(1, 1), (8, 8), (8, 1)]
"""Slots and how many of them are busy."""


class Counted:
    """Stands in for a CUDA graph: every step is counted."""

    def __init__(self, step: Callable[[], StepRecord], counter: LaunchCounter) -> None:
        self.step, self.counter = step, counter

    def play(self) -> StepRecord:
        self.counter.by_line.clear()
        with self.counter:
            return self.step()

    def drop(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("case", range(len(SLOTS)), ids=[f"{busy}-of-{slots}" for slots, busy in SLOTS])
@pytest.mark.parametrize(("name", "options", "most"), METHODS)
def test_a_steady_step_launches_little_beside_the_layers(
    name: str, options: dict[str, Any], most: tuple[int, int, int], case: int
) -> None:
    slots, busy = SLOTS[case]
    setting, counter, made = Setting(SHAPE, name, options), LaunchCounter(), random.Random(1)
    model = weights(SHAPE, torch.float32, torch.device("cpu"))
    engine = engine_for(setting, model, slots, 228)
    engine.runner = Runner(engine.decoder, lambda step: Counted(step, counter))
    for index in range(busy):
        engine.add(request(setting.config, str(index), 100, 128, 128, made))
    counts = []
    for _ in range(6):
        engine.step()
        counts.append(counter.total)
    assert engine.runner.played == 4
    # It does not hang on the data, and nothing is made anew.
    assert len(set(counts[2:])) == 1
    lines = [f"{n:4} {line}" for line, n in counter.by_line.most_common()]
    assert 50 < counts[-1] <= most[case], "\n".join(lines)


def test_what_counts() -> None:
    x, take = torch.arange(6.0).view(2, 3), torch.tensor([True, False, True])

    def count(op: Callable[[], Any]) -> int:
        with torch.inference_mode(), LaunchCounter() as counter:
            op()
        return counter.total

    where(take, x, 2.0)
    assert count(lambda: x.t()[1:].unsqueeze(0).expand(4, -1, -1)) == 0
    # A number among the operands is filled into a tensor first, unless it is kept.
    assert count(lambda: torch.where(take, x, 2.0)) == 2 and count(lambda: where(take, x, 2.0)) == 1
    assert count(lambda: take.sum()) == 2 and count(lambda: x.sum()) == 1
    assert count(lambda: x.long().float() + 1) == 3
    assert count(lambda: x.masked_fill(take, 0.0)) == 2 and count(lambda: x.t().reshape(-1)) == 1
