"""Closed facts."""

from __future__ import annotations

from collections.abc import Mapping

from flash_dllm.train.tasks import words
from flash_dllm.train.tasks.grammar import Draw
from flash_dllm.train.tasks.sample import Parts

_CAPITALS = dict(
    zip(
        [
            "France",
            "England",
            "Italy",
            "Germany",
            "Spain",
            "Norway",
            "Japan",
            "Egypt",
            "Peru",
            "Greece",
            "Austria",
            "Ireland",
            "Portugal",
            "India",
            "Russia",
            "China",
            "Cuba",
            "Kenya",
            "Poland",
            "Sweden",
            "Hungary",
            "Finland",
            "Canada",
            "Denmark",
        ],
        [
            "Paris",
            "London",
            "Rome",
            "Berlin",
            "Madrid",
            "Oslo",
            "Tokyo",
            "Cairo",
            "Lima",
            "Athens",
            "Vienna",
            "Dublin",
            "Lisbon",
            "Delhi",
            "Moscow",
            "Beijing",
            "Havana",
            "Nairobi",
            "Warsaw",
            "Stockholm",
            "Budapest",
            "Helsinki",
            "Ottawa",
            "Copenhagen",
        ],
        strict=True,
    )
)
_OPPOSITES = dict(
    zip(
        [
            "hot",
            "big",
            "fast",
            "old",
            "up",
            "light",
            "happy",
            "open",
            "full",
            "hard",
            "early",
            "wet",
            "rich",
            "loud",
            "strong",
            "long",
            "high",
            "near",
            "clean",
            "left",
        ],
        [
            "cold",
            "small",
            "slow",
            "young",
            "down",
            "dark",
            "sad",
            "closed",
            "empty",
            "soft",
            "late",
            "dry",
            "poor",
            "quiet",
            "weak",
            "short",
            "low",
            "far",
            "dirty",
            "right",
        ],
        strict=True,
    )
)
_YOUNG = dict(
    zip(
        ["dog", "cat", "cow", "hen", "horse", "sheep", "goat", "bear", "duck", "frog"],
        ["puppy", "kitten", "calf", "chick", "foal", "lamb", "kid", "cub", "duckling", "tadpole"],
        strict=True,
    )
)
_COUNTS = {
    "days in a week": "7",
    "months in a year": "12",
    "minutes in an hour": "60",
    "seconds in a minute": "60",
    "hours in a day": "24",
    "legs of a spider": "8",
    "legs of an insect": "6",
    "sides of a square": "4",
    "sides of a triangle": "3",
    "cents in a dollar": "100",
    "letters in the alphabet": "26",
}
_RELATIONS: tuple[tuple[str, Mapping[str, str], tuple[str, ...], tuple[str, ...], str], ...] = (
    (
        "capital",
        _CAPITALS,
        (
            "What is the capital of {x}?",
            "Name the capital of {x}.",
            "Which city is the capital of {x}?",
            "Tell me the capital of {x}.",
            "Do you know the capital of {x}?",
            "The capital of {x} is which city?",
        ),
        ("Which city governs {x}?",),
        "[The capital of {x} is|It is|That is|The answer is] {y}.",
    ),
    (
        "opposite",
        _OPPOSITES,
        (
            "What is the opposite of {x}?",
            "Give the opposite of {x}.",
            "Name the opposite of the word {x}.",
            "Which word is the opposite of {x}?",
            "Tell me the opposite of {x}.",
        ),
        ("Which word means the contrary of {x}?",),
        "[The opposite of {x} is|It is|That is|The answer is] {y}.",
    ),
    (
        "young",
        _YOUNG,
        (
            "What is a young {x} called?",
            "How do we call a young {x}?",
            "Name the young of a {x}.",
            "What do you call a baby {x}?",
        ),
        ("Which word stands for the child of a {x}?",),
        "[A young {x} is called a|It is a|We call it a|We say] {y}.",
    ),
    (
        "count",
        _COUNTS,
        (
            "What is the number of {x}?",
            "Tell me the number of {x}.",
            "Give the number of {x}.",
            "Do you know the number of {x}?",
        ),
        ("Please count the {x}.",),
        "[The number is|It is|There are|The answer is] {y}.",
    ),
    (
        "day",
        dict(zip(words.DAYS, words.DAYS[1:] + words.DAYS[:1], strict=True)),
        (
            "Which day comes after {x}?",
            "What day is after {x}?",
            "Name the day after {x}.",
            "What follows {x}?",
        ),
        ("If today is {x}, what is tomorrow?",),
        "[The day after {x} is|It is|That is|The answer is] {y}.",
    ),
    (
        "month",
        dict(zip(words.MONTHS, words.MONTHS[1:] + words.MONTHS[:1], strict=True)),
        (
            "Which month comes after {x}?",
            "What month is after {x}?",
            "Name the month after {x}.",
            "What follows {x}?",
        ),
        ("When {x} is over, which month begins?",),
        "[The month after {x} is|It is|That is|The answer is] {y}.",
    ),
)


def fact(d: Draw) -> Parts:
    """A closed list of facts. Test questions are pairs of fact and wording that training never shows."""
    name, table, train, held, say = d.pick(_RELATIONS)
    x = d.pick(tuple(table))
    question = d.fill(d.frame(train, held), {"x": x})
    if d.chance(0.3):
        question = d.pick(("Please answer: ", "A question: ", "Quick question. ")) + question
    return Parts(question, d.tell(say, {"x": x, "y": table[x]}), {"has": [table[x]]}, f"fact-{name}")
