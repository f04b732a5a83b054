"""Arithmetic, list operations and unit conversion: short answers with one right value."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from flash_dllm.train.tasks import words
from flash_dllm.train.tasks.grammar import Draw
from flash_dllm.train.tasks.sample import Parts

_SAY = "[The answer is|The result is|It is|That is|This gives|We get|You get] {r}."

_OPERATIONS = {
    "+": (
        (
            "What is {a} + {b}?",
            "Add {a} and {b}.",
            "{a} + {b} = ?",
            "How much is {a} plus {b}?",
            "Compute {a} + {b}.",
            "Find the sum of {a} and {b}.",
        ),
        ("What do you get if you add {b} to {a}?", "Sum: {a} and {b}."),
    ),
    "-": (
        (
            "What is {a} - {b}?",
            "Subtract {b} from {a}.",
            "{a} - {b} = ?",
            "How much is {a} minus {b}?",
            "Compute {a} - {b}.",
            "Find the difference of {a} and {b}.",
        ),
        ("What do you get if you take {b} away from {a}?", "Difference: {a} and {b}."),
    ),
    "*": (
        (
            "What is {a} * {b}?",
            "Multiply {a} by {b}.",
            "{a} * {b} = ?",
            "How much is {a} times {b}?",
            "Compute {a} * {b}.",
            "Find the product of {a} and {b}.",
        ),
        ("What do you get if you multiply {b} and {a}?", "Product: {a} and {b}."),
    ),
    "/": (
        (
            "What is {a} / {b}?",
            "Divide {a} by {b}.",
            "{a} / {b} = ?",
            "How much is {a} divided by {b}?",
            "Compute {a} / {b}.",
        ),
        ("What do you get if you split {a} into {b} equal parts?", "Quotient: {a} and {b}."),
    ),
}


def operands(d: Draw, op: str) -> tuple[int, int, int]:
    """Two operands and the result, in the ranges that the word problems use."""
    if op == "+":
        a, b = (
            (d.between(2, 99), d.between(2, 99)) if d.chance(0.5) else (d.between(2, 400), d.between(2, 200))
        )
        return a, b, a + b
    if op == "-":
        b, r = (
            (d.between(1, 90), d.between(1, 90)) if d.chance(0.5) else (d.between(1, 250), d.between(1, 250))
        )
        return b + r, b, r
    small = d.between(2, 12)
    other = d.between(2, 20) if d.chance(0.6) else d.between(2, 90)
    if d.chance(0.15):
        other = 10 * d.between(2, 60)
    if op == "/":
        return small * other, small, other
    return (small, other, small * other) if d.chance(0.5) else (other, small, small * other)


def arith(d: Draw) -> Parts:
    """One operation, or two in a row shown step by step."""
    op = d.pick("+-*/")
    a, b, r = operands(d, op)
    if d.chance(0.25) and not d.heldout:
        c = d.between(2, 60)
        slots = {"a": a, "b": b, "c": c, "op": op}
        question = d.fill("[What is|Compute|Find] ({a} {op} {b}) + {c}[?|, please.]", slots)
        text = d.tell(
            f"[First|Step one:|We have] {a} {op} {b} = {r}. [Then|Step two:|So] {r} + {c} = {r + c}.", {}
        )
        return Parts(question, text, {"answer": r + c}, "arith-two")
    question = d.fill(d.frame(*_OPERATIONS[op]), {"a": a, "b": b})
    text = d.tell(_SAY, {"r": f"{a} {op} {b} = {r}"} if d.say((0, 1)) else {"r": r})
    return Parts(question, text, {"answer": r}, f"arith{op}")


def check_last_number(data: Mapping[str, object], text: str) -> bool:
    """Whether the last number of the text is the answer."""
    numbers = re.findall(r"\d+", text)
    return bool(numbers) and int(numbers[-1]) == data["answer"]


_LISTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[list[int]], object]]] = {
    "sort": (
        ("Sort these numbers: {l}", "Put these numbers in order: {l}", "Sort {l} from small to large."),
        ("Arrange {l} so that they go up.",),
        lambda v: sorted(v),
    ),
    "down": (
        ("Sort from large to small: {l}", "Put {l} in falling order.", "Sort {l} backwards."),
        ("Arrange {l} so that they go down.",),
        lambda v: sorted(v, reverse=True),
    ),
    "reverse": (
        ("Reverse this list: {l}", "Write {l} in reverse.", "Turn the list {l} around."),
        ("Say the list {l} from its end to its start.",),
        lambda v: v[::-1],
    ),
    "max": (
        ("What is the largest number of {l}?", "Find the biggest number: {l}", "Which is the largest: {l}?"),
        ("Name the top value among {l}.",),
        lambda v: max(v),
    ),
    "min": (
        (
            "What is the smallest number of {l}?",
            "Find the smallest number: {l}",
            "Which is the smallest: {l}?",
        ),
        ("Name the lowest value among {l}.",),
        lambda v: min(v),
    ),
    "count": (
        ("How many numbers are in {l}?", "Count the numbers: {l}", "How long is the list {l}?"),
        ("Give the length of {l}.",),
        lambda v: len(v),
    ),
    "even": (
        ("Which numbers are even: {l}?", "List the even numbers of {l}.", "Keep only even numbers: {l}"),
        ("Drop every odd number from {l}.",),
        lambda v: [x for x in v if x % 2 == 0] or [0],
    ),
    "first": (
        ("What is the first number of {l}?", "Give the first item: {l}"),
        ("With which number does {l} begin?",),
        lambda v: v[0],
    ),
    "last": (
        ("What is the last number of {l}?", "Give the last item: {l}"),
        ("With which number does {l} end?",),
        lambda v: v[-1],
    ),
    "sum": (
        ("Add up these numbers: {l}", "What is the sum of {l}?", "Find the total of {l}."),
        ("How much do {l} make together?",),
        lambda v: sum(v),
    ),
}
_LIST_SAY = (
    "[The answer is|The result is|Here it is:|It is|That is|You get] {r}.",
    "[For|With] these numbers [the answer is|it is|I get|we get] {r}.",
)


def listing(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def lists(d: Draw) -> Parts:
    """An operation on a list of numbers, or on a list of words."""
    if d.chance(0.3):
        return word_lists(d)
    name = d.pick(tuple(_LISTS))
    train, held, op = _LISTS[name]
    top = 20 if name == "sum" else 99
    values = [d.between(1, top) for _ in range(d.between(3, 4 if name == "sum" else 7))]
    if name == "even" and all(x % 2 for x in values):
        values[0] += 1
    result = listing(op(values))
    question = d.fill(d.frame(train, held), {"l": listing(values)})
    return Parts(question, d.tell(d.say(_LIST_SAY), {"r": result}), {"answer": result}, f"list-{name}")


def word_lists(d: Draw) -> Parts:
    """Sorting, reversing or picking from a list of words."""
    values = d.some(words.WORDS, d.between(3, 5))
    name, train, held, result = d.pick(
        (
            (
                "words-sort",
                ("Sort these words: {l}", "Put these words in order from a to z: {l}"),
                ("Arrange {l} as in a dictionary.",),
                sorted(values),
            ),
            (
                "words-reverse",
                ("Reverse the list of words: {l}", "Write these words in reverse order: {l}"),
                ("Say the words {l} from the last to the first.",),
                values[::-1],
            ),
            (
                "words-last",
                ("What is the last word of {l}?", "Give the last word: {l}"),
                ("Which word ends the list {l}?",),
                values[-1:],
            ),
            (
                "words-count",
                ("How many words are in this list: {l}?", "Count these words: {l}"),
                ("Give the number of words: {l}",),
                [str(len(values))],
            ),
        )
    )
    answer = ", ".join(result)
    question = d.fill(d.frame(train, held), {"l": ", ".join(values)})
    return Parts(question, d.tell(d.say(_LIST_SAY), {"r": answer}), {"answer": answer}, name)


def check_ending(data: Mapping[str, object], text: str) -> bool:
    """Whether the text ends with the answer and a full stop, after a space."""
    return text.strip().endswith(f" {data['answer']}.")


_UNITS = (
    ("meters", "centimeters", 100),
    ("kilometers", "meters", 1000),
    ("kilograms", "grams", 1000),
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("days", "hours", 24),
    ("weeks", "days", 7),
    ("years", "months", 12),
    ("liters", "milliliters", 1000),
    ("feet", "inches", 12),
    ("dollars", "cents", 100),
    ("centimeters", "millimeters", 10),
    ("dozens", "pieces", 12),
    ("yards", "feet", 3),
)
_TO = (
    (
        "How many {s} are {n} {b}?",
        "Convert {n} {b} to {s}.",
        "Change {n} {b} into {s}.",
        "{n} {b} are how many {s}?",
    ),
    ("Express {n} {b} in {s}.",),
)


def convert(d: Draw) -> Parts:
    """Unit conversion both ways, and comparing two amounts in different units."""
    big, small, factor = d.pick(_UNITS)
    n = d.between(2, 12)
    if d.chance(0.3):
        return compare_units(d, big, small, factor, n)
    if d.chance(0.5):
        question = d.fill(d.frame(*_TO), {"n": n, "b": big, "s": small})
        work, result, unit = f"{n} * {factor} = {n * factor}", n * factor, small
    else:
        question = d.fill(d.frame(*_TO), {"n": n * factor, "b": small, "s": big})
        work, result, unit = f"{n * factor} / {factor} = {n}", n, big
    text = d.tell(
        "[We compute|We have|We take|First,] {w}. [So it is|That is|The answer is|It makes] {r} {u}.",
        {"w": work, "r": result, "u": unit},
    )
    return Parts(question, text, {"answer": f"{result} {unit}"}, "convert")


def compare_units(d: Draw, big: str, small: str, factor: int, n: int) -> Parts:
    """Which of two amounts is more. The answer repeats both numbers side by side before it names the larger
    one.
    """
    left = n * factor
    off = d.between(1, factor * 2)
    right = left + off if d.chance(0.5) or off >= left else left - off
    first, second = f"{n} {big}", f"{right} {small}"
    question = d.fill(
        d.frame(
            ("Which is more, {x} or {y}?", "Is {x} or {y} more?", "What is the larger amount: {x} or {y}?"),
            ("Compare {x} with {y} and name the bigger one.",),
        ),
        {"x": first, "y": second} if d.chance(0.5) else {"x": second, "y": first},
    )
    sign, winner = (">", first) if left > right else ("<", second)
    text = d.tell(
        "[We have|We compare|We see] {n} * {f} = {l}, [and|then] {l} {g} {r}. [So|Thus|Therefore] the larger "
        "[one|amount] is {w}.",
        {"n": n, "f": factor, "l": left, "r": right, "g": sign, "w": winner},
    )
    return Parts(question, text, {"answer": winner}, "compare")
