"""Templates with counted free choices, and the random source that fills them.

A template is text with alternations `[a|b|c]` (one is drawn; an option may repeat to weigh more, or be empty)
and slots `{name}` filled from a mapping. Every alternation that ends up in an *answer* is a place where a
decoder cannot know the next words for sure, so the source counts them: that count predicts the forward passes
of parallel decoding.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TypeVar

T = TypeVar("T")

_ALTERNATION = re.compile(r"\[([^\[\]]*)\]")


@cache
def _compiled(template: str) -> tuple[tuple[str | tuple[str, ...], ...], int]:
    """The template's parts (text, or a tuple of options) and how many alternations are uncertain."""
    parts: list[str | tuple[str, ...]] = []
    free = 0
    for i, piece in enumerate(_ALTERNATION.split(template)):
        if i % 2 == 0:
            if piece:
                parts.append(piece)
            continue
        options = tuple(piece.split("|"))
        parts.append(options)
        likeliest = max(options.count(option) for option in options) / len(options)
        free += likeliest < 0.9
    return tuple(parts), free


class Draw:
    """One sample's random source. Uses only `random.Random.random`, whose sequence Python promises to keep.

    `heldout` says which half of a template pair is drawn; `free` counts the answer's free choices.
    """

    def __init__(self, seed: int, heldout: bool) -> None:
        self.random = random.Random(seed).random
        self.heldout = heldout
        self.free = 0

    def below(self, n: int) -> int:
        """An integer in [0, n)."""
        return int(self.random() * n)

    def between(self, low: int, high: int) -> int:
        """An integer in [low, high], both ends included."""
        return low + int(self.random() * (high - low + 1))

    def pick(self, options: Sequence[T]) -> T:
        """One of the options, not counted (prompt side)."""
        return options[int(self.random() * len(options))]

    def say(self, options: Sequence[T]) -> T:
        """One of the options, counted as a free choice of the answer."""
        self.free += 1
        return options[int(self.random() * len(options))]

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """`count` different options in random order."""
        pool = list(options)
        for i in range(count):
            j = i + int(self.random() * (len(pool) - i))
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:count]

    def frame(self, train: Sequence[str], held: Sequence[str]) -> str:
        """A prompt template of the half this sample may use."""
        options = held if self.heldout else train
        return options[int(self.random() * len(options))]

    def fill(self, template: str, slots: Mapping[str, object]) -> str:
        """Expands a prompt template."""
        parts, _ = _compiled(template)
        rnd = self.random
        text = "".join([p if type(p) is str else p[int(rnd() * len(p))] for p in parts])
        return text.format_map(slots) if "{" in text else text

    def tell(self, template: str, slots: Mapping[str, object]) -> str:
        """Expands an answer template and counts its free choices."""
        self.free += _compiled(template)[1]
        return self.fill(template, slots)


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]
