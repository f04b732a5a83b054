"""Gold answers are right by every rule, broken ones wrong."""

from __future__ import annotations

import random

import pytest

from flash_dllm.eval.scoring import (
    INVALID,
    boxed,
    flexible_number,
    normalise_answer,
    score_gsm8k,
    score_humaneval,
    score_humaneval_extracted,
    score_math,
    score_mbpp,
    strict_number,
)
from tests.eval.rows import FEWSHOT, MATH, TRAIN_ROWS, rows

BOTH = {"strict-match": True, "flexible-extract": True}
NEITHER = {"strict-match": False, "flexible-extract": False}


@pytest.mark.parametrize("row", rows("gsm8k-test") + rows("gsm8k-train"), ids=lambda r: r["answer"][-6:])
def test_gsm8k(row: dict) -> None:
    gold = row["answer"]
    assert score_gsm8k(gold, gold) == BOTH
    number = gold.rpartition("#### ")[2]
    assert score_gsm8k(f"so #### {number}1", gold) == NEITHER
    assert score_gsm8k("I do not know.", gold) == NEITHER


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("#### 18.", "18.", "18."),
        ("that makes 3 apples...", INVALID, "..."),
        ("x = 3, y", INVALID, "3,"),
        ("#### 5\nQuestion: and 99?", "5", "99"),
        ("#### -1,234", "-1,234", "-1,234"),
        ("costs $1,200.50 in all", INVALID, "$1,200.50"),
        ("first 7", INVALID, "7"),
        ("#### 5 #### 6", "5", "6"),
        ("none", INVALID, INVALID),
        ("", INVALID, INVALID),
    ],
)
def test_gsm8k_filters(text: str, strict: str, flexible: str) -> None:
    assert (strict_number(text), flexible_number(text)) == (strict, flexible)


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("#### 18.", "#### 18", BOTH),
        ("#### 1,234", "so\n#### 1234", BOTH),
        ("= 3, and", "#### 3", {"strict-match": False, "flexible-extract": True}),
        ("3 apples...", "#### 3", NEITHER),
        ("#### 5\nQuestion: 99", "#### 5", {"strict-match": True, "flexible-extract": False}),
        ("#### $70", "#### 70", {"strict-match": False, "flexible-extract": True}),
    ],
)
def test_gsm8k_comparison(text: str, answer: str, right: dict) -> None:
    assert score_gsm8k(text, answer) == right


def test_the_examples_are_drawn_by_the_harness_rule() -> None:
    draw = random.Random(1234)
    assert tuple(tuple(draw.sample(range(TRAIN_ROWS), 5)) for _ in range(2)) == FEWSHOT
    assert sorted(row["row"] for row in rows("gsm8k-train")) == sorted(i for five in FEWSHOT for i in five)


@pytest.mark.parametrize("problem", MATH, ids=lambda p: p["answer"])
def test_math(problem: dict) -> None:
    pytest.importorskip("math_verify")
    solution = problem["solution"]
    right = score_math(
        f"Final Answer: The final answer is ${problem['answer']}$. I hope it is correct.", solution
    )
    assert right["math_verify"]
    assert score_math(solution, solution)["math_verify"]
    for wrong in ("The final answer is $7$.", "I do not know.", ""):
        assert score_math(wrong, solution) == {"math_verify": False, "math_verify_0.4.8": False}


def test_the_old_rule_for_math_rejects_answers_that_it_cannot_read() -> None:
    """A bare interval is no LaTeX to math-verify; with the whole solution as gold it is."""
    pytest.importorskip("math_verify")
    solution = "so $x$ is in $\\boxed{[2,5)}$."
    assert score_math("The final answer is $[2,5)$.", solution) == {
        "math_verify": True,
        "math_verify_0.4.8": False,
    }
    assert score_math("The final answer is $5$.", "It is $\\boxed{5}$.")["math_verify_0.4.8"]


@pytest.mark.parametrize(
    ("solution", "held"),
    [
        ("$\\boxed{5}$", "5"),
        ("$\\boxed{1}$, then $\\boxed{\\frac{a}{b}}$.", "\\frac{a}{b}"),
        ("so $\\boxed 7$ it is", "7"),
        ("\\fbox{x}", "x"),
        ("nothing", ""),
        ("\\boxed{never closed", ""),
    ],
)
def test_what_is_boxed(solution: str, held: str) -> None:
    assert boxed(solution) == held


@pytest.mark.parametrize(
    ("answer", "bare"),
    [
        ("x = 5", "5"),
        ("12,000 dollars", "12000"),
        ("$\\frac12$", "\\frac{1}{2}"),
        ("\\sqrt3", "\\sqrt{3}"),
        ("\\text{east}", "east"),
        ("90^\\circ", "90"),
        ("3 \\text{ cm}", "3"),
        ("(1,2)", "(1,2)"),
    ],
)
def test_normalised_answers(answer: str, bare: str) -> None:
    assert normalise_answer(answer) == bare


@pytest.mark.parametrize("row", rows("humaneval"), ids=lambda r: r["task_id"])
def test_humaneval(row: dict) -> None:
    gold = row["canonical_solution"]
    assert score_humaneval(gold, row)
    assert score_humaneval_extracted(gold, row)
    spoken = f"Sure, here you are:\n```python\n{row['prompt']}{gold}\n```\nIt loops."
    assert not score_humaneval(spoken, row) and score_humaneval_extracted(spoken, row)
    for broken in ("    return None\n", "    pass\n", "", "    import sys; sys.exit(0)\n", "nothing"):
        assert not score_humaneval(broken, row) and not score_humaneval_extracted(broken, row)


@pytest.mark.parametrize("row", rows("mbpp"), ids=lambda r: str(r["task_id"]))
def test_mbpp(row: dict) -> None:
    """Task 367 needs its ``test_setup_code``, which the harness leaves out: 499 of 500 is the most there is."""
    needs_setup = bool(row["test_setup_code"])
    assert score_mbpp(row["code"], row) == (not needs_setup)
    if needs_setup:
        assert score_mbpp(f"{row['code']}\n{row['test_setup_code']}", row)
    assert not score_mbpp("def f(): pass", row)
    assert not score_mbpp(f"{row['code']}\n[BEGIN]", row)
