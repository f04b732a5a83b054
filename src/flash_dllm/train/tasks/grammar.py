"""Templates with counted free choices, and the random source that fills them.

A template is text with alternations `[a|b|c]` (one is drawn; an option may repeat to weigh more, or be empty)
and slots `{name}` filled from a mapping. An alternation that ends up in an *answer* is a place where a
decoder cannot know the next words for sure, so the source counts them: that count predicts the forward passes
of parallel decoding.

How free answers are is the knob for how hard parallel decoding is. A part of the places in answers is
*habitual*: the first option is drawn nearly always. Families of free text have no habits.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TypeVar

T = TypeVar("T")

_ALTERNATION = re.compile(r"\[([^\[\]]*)\]")
HABITUAL = 0.6
"""Share of the places in answers that are habitual."""
HABIT = 0.95
"""How often a habitual place takes its first option."""


@cache
def habitual(place: str) -> bool:
    """Whether a place, named by its options, is habitual: a fixed property of the place."""
    return zlib.crc32(place.encode()) % 1000 < 1000 * HABITUAL


@cache
def _compiled(template: str) -> tuple[str | tuple[str, ...], ...]:
    """The template's parts: text, or a tuple of options."""
    pieces = enumerate(_ALTERNATION.split(template))
    return tuple(tuple(piece.split("|")) if i % 2 else piece for i, piece in pieces if i % 2 or piece)


class Draw:
    """One sample's random source. Uses only `random.Random.random`, whose sequence Python promises to keep.

    `heldout` says which half of a template pair is drawn; `habits` whether answers have habitual places;
    `free` counts the answer's free choices.
    """

    def __init__(self, seed: int, heldout: bool, habits: bool = True) -> None:
        self.random = random.Random(seed).random
        self.heldout, self.habits = heldout, habits
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
        """One of the options of the answer; a place that is not habitual counts as a free choice."""
        draw = self.random()
        if self.habits and habitual(repr(options)):
            return options[0 if draw < HABIT else int((draw - HABIT) / (1 - HABIT) * len(options))]
        self.free += max(options.count(option) for option in options) < 0.9 * len(options)
        return options[int(draw * len(options))]

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
        rnd = self.random
        text = "".join([p if type(p) is str else p[int(rnd() * len(p))] for p in _compiled(template)])
        return text.format_map(slots) if "{" in text else text

    def tell(self, template: str, slots: Mapping[str, object]) -> str:
        """Expands an answer template and counts its free choices."""
        text = "".join([p if isinstance(p, str) else self.say(p) for p in _compiled(template)])
        return text.format_map(slots) if "{" in text else text


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]
