"""Code out of an answer."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_dllm.eval.extraction import extract, fenced, longest_valid, needed

PROMPT = 'import math\n\n\ndef area(r):\n    """Area of a circle.\n    """\n'
BODY = "    return math.pi * r * r\n"
WHOLE = PROMPT + BODY


def value(source: str) -> float:
    """What the extracted function gives for 2."""
    names: dict = {}
    exec(source, names)
    return float(names["area"](2))


@pytest.mark.parametrize(
    "text",
    [
        BODY,
        f"Here it is:\n```python\n{WHOLE}```\nIt multiplies.",
        f"```python\n{WHOLE}",
        "```python\ndef square(x):\n    return x * x\n\ndef area(r):\n    return math.pi * square(r)\n```",
        f"{BODY}\n\nprint(area(1)\nand so on: (",
        f"{BODY}\n\ndef other(:\n    pass\n",
        f"{BODY}\nif __name__ == '__main__':\n    raise SystemExit\n",
        f"{BODY}```\nThat was it.",
    ],
)
def test_the_asked_function_is_found(text: str) -> None:
    assert value(extract(PROMPT, text, "area")) == pytest.approx(12.566, abs=1e-3)


def test_what_the_function_does_not_need_is_left_out() -> None:
    found = extract(PROMPT, f"{BODY}\n\ndef unused():\n    return area(1)\n\nprint(unused())\n", "area")
    assert "unused" not in found and "import math" in found


def test_names_that_it_needs_are_kept_whatever_binds_them() -> None:
    source = (
        "A: int = 1\nB = C = A\n\n@decorate\ndef f():\n    return B + D()\n\nclass D:\n    pass\n\n"
        "def decorate(g): return g\n"
    )
    assert needed(source, "f") == source.replace("\n\n", "\n").strip()


def test_what_the_prompt_defines_is_kept_for_the_tests() -> None:
    prompt = "def encode(x):\n    return x + 1\n\n\ndef decode(x):\n    pass\n"
    assert "def encode" in extract(prompt, "    return x - 1\n", "decode")


def test_without_the_function_everything_stays() -> None:
    assert needed("x = 1\ny = 2", "f") == "x = 1\ny = 2"
    assert needed("def f(:", "f") == "def f(:"


def test_the_longest_run_counts_lines_with_something_on_them() -> None:
    assert longest_valid("a = 1\n)\nb = 2\nc = 3") == "b = 2\nc = 3"
    assert longest_valid("x = '''never closed\ny = 1") == "y = 1"
    assert longest_valid("f(1,\n2\nx = 3") == "2\nx = 3"
    assert longest_valid("(((") == ""


@given(
    st.lists(
        st.sampled_from(["a = 1", "    b", "(", ")", "'''", "def f():", "return", "", "x = (1,"]), max_size=9
    )
)
def test_a_run_parses_and_none_is_longer(lines: list[str]) -> None:
    def size(run: list[str]) -> int:
        return sum(bool(line.strip()) for line in run)

    def parses(run: list[str]) -> bool:
        try:
            ast.parse("\n".join(run))
        except SyntaxError:
            return False
        return True

    found = longest_valid("\n".join(lines)).splitlines()
    assert parses(found)
    runs = (lines[i:j] for i in range(len(lines)) for j in range(i, len(lines) + 1))
    assert size(found) == max((size(run) for run in runs if parses(run)), default=0)


def test_a_fence_need_not_be_closed_or_opened() -> None:
    assert fenced("a ```python\nb\n``` c") == "b\n"
    assert fenced("b\n``` c") == "b\n"
    assert fenced("b") == "b"
