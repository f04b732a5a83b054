"""Kinds of word problems: how each draws its numbers, how it is asked, and how each step is explained.

A kind's function returns `(slots, steps)`: extra slots for the templates, and one `(a, op, b)` for each line
of the solution. Lines say the step's expression as `{E}` (`a*b = <<a*b=c>>c`); the last step's result is the
answer. Names, pronouns and nouns (`N he his him M u v`) are drawn by `gsm.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flash_dllm.train.tasks.grammar import Draw

Step = tuple[int, str, int]
Numbers = tuple[dict[str, object], list[Step]]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of word problem. `train` and `held` are ways to ask, `lines` one template a step."""

    name: str
    numbers: Callable[[Draw], Numbers]
    train: tuple[str, ...]
    held: tuple[str, ...]
    lines: tuple[str, ...]
    end: str


KINDS: list[Kind] = []


def kind(
    *, train: tuple[str, ...], held: tuple[str, ...], lines: tuple[str, ...], end: str
) -> Callable[[Callable[[Draw], Numbers]], Callable[[Draw], Numbers]]:
    """Registers the decorated number source as a kind of word problem."""

    def register(numbers: Callable[[Draw], Numbers]) -> Callable[[Draw], Numbers]:
        KINDS.append(Kind(numbers.__name__, numbers, train, held, lines, end))
        return numbers

    return register
