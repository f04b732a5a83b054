"""Text with gaps: asked in the prompt, or hidden in the text itself (a canvas). Gaps follow from the rest of
the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from flash_dllm.train.tasks import words
from flash_dllm.train.tasks.grammar import Draw
from flash_dllm.train.tasks.sample import Parts

# A passage marks what a gap may hide with <>; each hidden part can be told from the rest.
Passage = str


def _days(d: Draw) -> Passage:
    i, n = d.below(7), d.pick(words.NAMES)
    one, two, three = (words.DAYS[(i + k) % 7] for k in range(3))
    p, q = d.some(words.PLACES, 2)
    return (
        f"On {one} {n} went to the {p}. The next day was <{two}>, and {n} stayed home. After that came "
        f"<{three}>, "
        f"and {n} went to the {q}."
    )


def _owner(d: Draw) -> Passage:
    a, b = d.some(words.NAMES, 2)
    o, p = d.some(words.OBJECTS, 2)
    c, e = d.some(words.COLORS, 2)
    return (
        f"{a} has a {c} {o} and {b} has a {e} {p}. They meet and compare. The {o} of {a} is <{c}>, while "
        f"the {p} of "
        f"<{b}> is {e}."
    )


def _sum(d: Draw) -> Passage:
    a, b, n, u = d.between(2, 40), d.between(2, 40), d.pick(words.NAMES), d.pick(words.THINGS)
    return (
        f"{n} has {a} {u} and gets {b} more, so {n} has <{a + b}> {u}. If {n} gives back {b}, there are "
        f"<{a}> {u} left."
    )


def _trip(d: Draw) -> Passage:
    n, m = d.some(words.NAMES, 2)
    p, q = d.some(words.PLACES, 2)
    o = d.pick(words.OBJECTS)
    return (
        f"{n} and {m} walked from the {p} to the {q}. At the {q} {m} lost a {o}. They went back to the "
        f"<{p}>, but the "
        f"<{o}> was still at the <{q}>."
    )


def _count(d: Draw) -> Passage:
    a, s = d.between(1, 40), d.between(1, 9)
    v = [a + s * k for k in range(6)]
    return (
        f"The row goes {v[0]}, {v[1]}, {v[2]}, <{v[3]}>, {v[4]}, <{v[5]}>. Each number is <{s}> more "
        f"than the one before."
    )


def _work(d: Draw) -> Passage:
    n, m = d.some(words.NAMES, 2)
    j, k = d.some(words.JOBS, 2)
    c = d.pick(words.CITIES)
    return (
        f"{n} is a {j} in {c}. {m} is a {k}. When people in <{c}> need a {j}, they call <{n}>; for a "
        f"{k} they call <{m}>."
    )


def _price(d: Draw) -> Passage:
    a, b, n = d.between(2, 30), d.between(2, 30), d.pick(words.NAMES)
    g, h = d.some(words.OBJECTS, 2)
    return (
        f"A {g} costs {a} dollars. A {h} costs {b} dollars more, so its price is <{a + b}> dollars. "
        f"{n} takes only the <{g}> and pays <{a}> dollars."
    )


def _friends(d: Draw) -> Passage:
    a, b, c = d.some(words.NAMES, 3)
    p, q = d.some(words.PLACES, 2)
    return (
        f"{a} lives near the {p}. {b} and {c} live near the {q}. To see {b}, {a} goes to the <{q}>, and to "
        f"see <{a}>, the others go to the <{p}>."
    )


_PASSAGES: tuple[Callable[[Draw], Passage], ...] = (_days, _owner, _sum, _trip, _count, _work)
_HELD: tuple[Callable[[Draw], Passage], ...] = (_price, _friends)
_ASK = (
    (
        "Fill in the gaps: {t}",
        "Write what is missing at each ___: {t}",
        "{t}\nWhat belongs in the gaps?",
        "Complete the text. {t}",
    ),
    ("Some words were lost (___). Restore them. {t}",),
)
_GAP = re.compile(r"<([^<>]*)>")


def infill(d: Draw) -> Parts:
    """Half of the samples ask for the missing words in order, half are canvases with hidden spans."""
    make = d.pick(_HELD if d.heldout else _PASSAGES)
    passage = make(d)
    missing = _GAP.findall(passage)
    if d.chance(0.5):
        question = d.fill(d.frame(*_ASK), {"t": _GAP.sub("___", passage)})
        return Parts(question, ", ".join(missing), {"words": missing}, f"gaps{make.__name__}")
    text, gaps = "", []
    for i, piece in enumerate(_GAP.split(passage)):
        if i % 2:
            # The space before a word belongs to its token, so the gap starts there.
            start = len(text) - (text.endswith(" ") and not piece.isdigit())
            gaps.append((start, len(text) + len(piece)))
        text += piece
    return Parts("", text, {"words": missing, "text": text}, f"canvas{make.__name__}", tuple(gaps))


def check_infill(data: Mapping[str, Any], text: str) -> bool:
    """The missing words in order; for a canvas, the whole text as it was."""
    if "text" in data:
        return bool(text.strip() == data["text"])
    return bool([w.strip() for w in text.strip().split(",")] == data["words"])
