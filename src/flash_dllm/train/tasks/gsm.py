"""Word problems of two to six steps, solved with calculator marks `<<a*b=c>>` and a last line `#### N`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from flash_dllm.train.tasks import gsm_kinds as _first
from flash_dllm.train.tasks import gsm_kinds_last as _last
from flash_dllm.train.tasks import gsm_kinds_long as _long
from flash_dllm.train.tasks import gsm_kinds_more as _more
from flash_dllm.train.tasks import words
from flash_dllm.train.tasks.grammar import Draw, capital
from flash_dllm.train.tasks.gsm_frames import MORE
from flash_dllm.train.tasks.gsm_kind import KINDS, Kind, Step
from flash_dllm.train.tasks.sample import Parts

MODULES = (_first, _last, _long, _more)  # importing them registers their kinds, in this order

_FIRST = ("First, ", "To start, ", "At first, ", "To begin, ", "First of all, ", "")
_MIDDLE = ("Then ", "Next, ", "After that, ", "Now ", "And ", "Next we see that ", "")
_LAST = ("So ", "Finally, ", "In the end, ", "Thus ", "That means ", "This shows that ", "")
_CLOSE = ("So", "Therefore", "This means that", "As a result,", "We see that")
_MARK = re.compile(r"<<(\d+)([-+*/])(\d+)=(\d+)>>")
_ANSWER = re.compile(r"#### (\d+)\s*$")


def apply(step: Step) -> int:
    """The value of one step. Division is exact by construction."""
    a, op, b = step
    return {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[op]


def people(d: Draw) -> dict[str, object]:
    """Slots for three people, the first one's pronouns, and a countable noun."""
    n, m, p = d.some(words.NAMES, 3)
    he, his, him = ("she", "her", "her") if words.girl(n) else ("he", "his", "him")
    return {
        "N": n,
        "M": m,
        "P": p,
        "he": he,
        "he_": capital(he),
        "his": his,
        "him": him,
        "u": d.pick(words.THINGS),
    }


def expression(d: Draw, step: Step) -> str:
    """`a*b = <<a*b=c>>c`, with the operands of + and * in either order (a free choice)."""
    a, op, b = step
    if op in "+*" and a != b and d.say((False, True)):
        a, b = b, a
    return f"{a}{op}{b} = <<{a}{op}{b}={apply(step)}>>{apply(step)}"


def solution(d: Draw, kind: Kind, slots: Mapping[str, object], steps: list[Step]) -> str:
    """The worked answer: a line a step, sometimes a closing sentence, and the result."""
    lines = []
    for i, (step, line) in enumerate(zip(steps, kind.lines, strict=True)):
        joint = d.say(_FIRST if i == 0 else _LAST if i == len(steps) - 1 else _MIDDLE)
        lines.append(capital(joint + d.tell(line, {**slots, "E": expression(d, step)})))
    result = apply(steps[-1])
    if d.say((True, False)):
        lines.append(f"{d.say(_CLOSE)} {d.tell(kind.end, {**slots, 'A': result})}.")
    return "\n".join((*lines, f"#### {result}"))


def gsm(d: Draw) -> Parts:
    """One word problem."""
    kind = d.pick(KINDS)
    numbers, steps = kind.numbers(d)
    slots = people(d)
    slots.update(numbers)
    question = d.fill(d.frame(kind.train + MORE[kind.name], kind.held), slots)
    return Parts(question, solution(d, kind, slots, steps), {"answer": apply(steps[-1])}, kind.name)


def check_gsm(data: Mapping[str, object], text: str) -> bool:
    """Whether the text ends with the right `#### N`."""
    match = _ANSWER.search(text)
    return match is not None and int(match[1]) == data["answer"]


def wrong_marks(text: str) -> int:
    """How many calculator marks of the text are arithmetically wrong."""
    return sum(apply((int(a), op, int(b))) != int(c) for a, op, b, c in _MARK.findall(text))
