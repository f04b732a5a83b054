"""Small Python functions, checked by running them against tests, and JSON extraction."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

from flash_dllm.train.tasks import words
from flash_dllm.train.tasks.grammar import Draw
from flash_dllm.train.tasks.sample import Parts

# What is asked, ways to write the body over `x` (a number), `xs` (a list) or `s` (a text), and what it
# computes.
_TASKS: tuple[tuple[str, str, tuple[str, ...], Callable[[Any, int], Any]], ...] = (
    ("returns {v} plus {k}", "x", ("return {v} + {k}", "return {k} + {v}"), lambda x, k: x + k),
    ("returns {v} times {k}", "x", ("return {v} * {k}", "return {k} * {v}"), lambda x, k: x * k),
    (
        "returns {v} minus {k}",
        "x",
        ("return {v} - {k}", "result = {v} - {k}\n    return result"),
        lambda x, k: x - k,
    ),
    ("returns the square of {v}", "x", ("return {v} * {v}", "return {v} ** 2"), lambda x, k: x * x),
    ("tells if {v} is even", "x", ("return {v} % 2 == 0", "return not {v} % 2"), lambda x, k: x % 2 == 0),
    ("tells if {v} is larger than {k}", "x", ("return {v} > {k}", "return {k} < {v}"), lambda x, k: x > k),
    (
        "tells if {v} can be divided by {k}",
        "x",
        ("return {v} % {k} == 0", "return not {v} % {k}"),
        lambda x, k: x % k == 0,
    ),
    (
        "returns the larger of {v} and {k}",
        "x",
        ("return max({v}, {k})", "return {v} if {v} > {k} else {k}"),
        lambda x, k: max(x, k),
    ),
    (
        "returns the sum of {v}",
        "xs",
        ("return sum({v})", "total = 0\n    for n in {v}:\n        total += n\n    return total"),
        lambda xs, k: sum(xs),
    ),
    (
        "returns the largest number of {v}",
        "xs",
        ("return max({v})", "return sorted({v})[-1]"),
        lambda xs, k: max(xs),
    ),
    (
        "returns the smallest number of {v}",
        "xs",
        ("return min({v})", "return sorted({v})[0]"),
        lambda xs, k: min(xs),
    ),
    (
        "returns {v} in reverse",
        "xs",
        ("return {v}[::-1]", "return list(reversed({v}))"),
        lambda xs, k: xs[::-1],
    ),
    (
        "adds {k} to every number of {v}",
        "xs",
        (
            "return [n + {k} for n in {v}]",
            "result = []\n    for n in {v}:\n        result.append(n + {k})\n    return result",
        ),
        lambda xs, k: [x + k for x in xs],
    ),
    (
        "multiplies every number of {v} by {k}",
        "xs",
        ("return [n * {k} for n in {v}]", "return [{k} * n for n in {v}]"),
        lambda xs, k: [x * k for x in xs],
    ),
    (
        "keeps the numbers of {v} larger than {k}",
        "xs",
        (
            "return [n for n in {v} if n > {k}]",
            "result = []\n    for n in "
            "{v}:\n        if n > {k}:\n            result.append(n)\n    return result",
        ),
        lambda xs, k: [x for x in xs if x > k],
    ),
    (
        "counts the numbers of {v} larger than {k}",
        "xs",
        ("return sum(n > {k} for n in {v})", "return len([n for n in {v} if n > {k}])"),
        lambda xs, k: sum(x > k for x in xs),
    ),
    (
        "returns the first {k} items of {v}",
        "xs",
        ("return {v}[:{k}]", "result = {v}[:{k}]\n    return result"),
        lambda xs, k: xs[:k],
    ),
    (
        "counts how often {k} is in {v}",
        "xs",
        ("return {v}.count({k})", "return sum(n == {k} for n in {v})"),
        lambda xs, k: xs.count(k),
    ),
    (
        "returns the length of {v}",
        "s",
        ("return len({v})", "return sum(1 for c in {v})"),
        lambda s, k: len(s),
    ),
    (
        "returns {v} in upper case",
        "s",
        ("return {v}.upper()", "result = {v}.upper()\n    return result"),
        lambda s, k: s.upper(),
    ),
    (
        "returns {v} backwards",
        "s",
        ("return {v}[::-1]", "return ''.join(reversed({v}))"),
        lambda s, k: s[::-1],
    ),
    ("repeats {v} {k} times", "s", ("return {v} * {k}", "return {k} * {v}"), lambda s, k: s * k),
    (
        "splits {v} into words",
        "s",
        ("return {v}.split()", "words = {v}.split()\n    return words"),
        lambda s, k: s.split(),
    ),
)
_NAMES = ("solve", "run", "compute", "task", "work", "answer", "func", "calc", "apply", "process")
_ARGS = {
    "x": ("x", "n", "a", "value", "number"),
    "xs": ("xs", "items", "values", "numbers", "data"),
    "s": ("s", "text", "word", "line", "name"),
}
_INPUTS: dict[str, tuple[Any, ...]] = {
    "x": (0, 3, 7, 12, 20),
    "xs": ([3, 1, 2], [5, 9, 4, 4, 7], [10, 2, 8, 1], [6]),
    "s": ("abc", "red fox", "a b c"),
}
_ASK = (
    (
        "Write a Python function {f}({v}) that {t}.",
        "Write a function {f} in Python that {t}. Its argument is {v}.",
        "I need Python code: {f}({v}) {t}.",
        "Define {f}({v}), which {t}.",
    ),
    ("In Python, how do I write {f}({v}) so that it {t}?",),
)
_BUILTINS = {
    f.__name__: f for f in (sum, max, min, len, sorted, reversed, list, range, str, int, enumerate, abs)
}


def code(d: Draw) -> Parts:
    """One function; `def` line, sometimes a docstring, and one of the equivalent bodies."""
    i = d.below(len(_TASKS))
    task, kind, bodies, _ = _TASKS[i]
    k, f, v = d.between(2, 12), d.pick(_NAMES), d.pick(_ARGS[kind])
    slots = {"k": k, "v": v}
    what = task.format_map(slots)
    question = d.fill(d.frame(*_ASK), {"f": f, "v": v, "t": what})
    note = f'    """{what[0].upper() + what[1:]}."""\n' if d.say((False, True)) else ""
    text = f"def {f}({v}):\n{note}    {d.say(bodies).format_map(slots)}"
    return Parts(question, text, {"task": i, "k": k, "name": f}, f"code-{i}")


def check_code(data: Mapping[str, Any], text: str) -> bool:
    """Runs the function on fixed inputs with a few builtins and at most 2,000 lines of execution."""
    _, kind, _, want = _TASKS[data["task"]]
    if "import" in text or "__" in text:
        return False
    space: dict[str, Any] = {"__builtins__": _BUILTINS}
    try:
        _limited(lambda: exec(compile(text, "answer", "exec"), space))
        function = space[data["name"]]
        cases: Sequence[Any] = _INPUTS[kind]
        return all(_limited(partial(function, x)) == want(x, data["k"]) for x in cases)
    except Exception:
        return False


def _limited(call: Callable[[], Any], lines: int = 2000) -> Any:
    """The call's value; RuntimeError once it has executed more than `lines` lines (a loop that does not
    end).
    """
    left = [lines]

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("the answer runs for too long")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return call()
    finally:
        sys.settrace(before)


_RECORDS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "person",
        (
            "{name} from {city} is {age} years old and a {job}.",
            "{name}, {age}, works as a {job} in {city}.",
            "The {job} {name} lives in {city} and is {age} years old.",
            "{name} comes from {city}. {he} is {age} and works as a {job}.",
        ),
        ("In {city} you can meet {name}: {age} years, {job}.",),
    ),
    (
        "order",
        (
            "{name} orders {count} {color} {item} for {price} dollars.",
            "An order from {name}: {count} {color} {item}, {price} dollars.",
            "{name} buys {count} {color} {item} and pays {price} dollars.",
            "For {price} dollars {name} gets {count} {color} {item}.",
        ),
        ("{price} dollars were paid by {name}, who took {count} {item} in {color}.",),
    ),
    (
        "event",
        (
            "The {event} is on {day} at {time} in {city}.",
            "On {day} at {time} there is a {event} in {city}.",
            "Come to {city} for the {event} on {day} at {time}.",
            "{city} has a {event} at {time} on {day}.",
        ),
        ("{day}, {time} o'clock: the {event} begins in {city}.",),
    ),
)
_KEYS = {
    "person": ("name", "age", "job", "city"),
    "order": ("name", "count", "color", "item", "price"),
    "event": ("event", "day", "time", "city"),
}


def extract(d: Draw) -> Parts:
    """A sentence and the keys to extract, answered with one JSON object on one line."""
    kind, train, held = d.pick(_RECORDS)
    name = d.pick(words.NAMES)
    values: dict[str, object] = {
        "name": name,
        "age": d.between(18, 90),
        "job": d.pick(words.JOBS),
        "city": d.pick(words.CITIES),
        "count": d.between(2, 60),
        "color": d.pick(words.COLORS),
        "item": d.pick(words.GOODS),
        "price": d.between(5, 200),
        "day": d.pick(words.DAYS),
        "time": d.between(1, 12),
        "event": d.pick(("concert", "party", "game", "dance", "race", "dinner")),
    }
    sentence = d.fill(d.frame(train, held), {**values, "he": "She" if words.girl(name) else "He"})
    keys = d.some(_KEYS[kind], d.between(2, len(_KEYS[kind])))
    ask = d.frame(
        (
            "Extract {k} as JSON: {s}",
            "Give {k} as JSON. {s}",
            "{s} Write a JSON object with {k}.",
            "Return JSON with the keys {k}. {s}",
        ),
        ("Turn this into a JSON record ({k}): {s}",),
    )
    question = d.fill(ask, {"k": ", ".join(keys), "s": sentence})
    result = {key: values[key] for key in keys}
    return Parts(question, json.dumps(result), {"json": result}, f"json-{kind}")


def check_json(data: Mapping[str, Any], text: str) -> bool:
    """Whether the text is a JSON object equal to the expected one."""
    try:
        return bool(json.loads(text) == data["json"])
    except ValueError:
        return False
