"""The rows of public benchmarks in ``tests/data``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent.parent / "data"
TRAIN_ROWS = 7473
"""Rows of GSM8K's training set."""
FEWSHOT = ((6374, 3610, 957, 61, 742), (7462, 6610, 4769, 286, 5501))
"""Training rows that the harness puts before GSM8K's first two test questions."""


def rows(name: str) -> list[dict[str, Any]]:
    """All rows of a file."""
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def write(path: Path, items: list[dict[str, Any]]) -> Path:
    """Rows as JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return path


def train_set() -> list[dict[str, Any]]:
    """A training set of the right size that holds only the rows that are needed, each at its place."""
    made = [{"question": "", "answer": ""} for _ in range(TRAIN_ROWS)]
    for row in rows("gsm8k-train"):
        made[row["row"]] = {"question": row["question"], "answer": row["answer"]}
    return made


def gsm8k_prompt(index: int) -> str:
    """The five-shot prompt of test question 0 or 1."""
    train = train_set()
    shots = "".join(
        f"Question: {train[i]['question']}\nAnswer: {train[i]['answer']}\n\n" for i in FEWSHOT[index]
    )
    return f"{shots}Question: {rows('gsm8k-test')[index]['question']}\nAnswer:"


MATH = [
    {"problem": "What is $2+3$?", "solution": "We add: $2+3=\\boxed{5}$.", "answer": "5"},
    {"problem": "Halve one third.", "solution": "This is $\\boxed{\\frac16}$.", "answer": "\\frac{1}{6}"},
    {"problem": "How much is it?", "solution": "All in all $\\boxed{12000}$ dollars.", "answer": "12000"},
]
"""Problems in the manner of MATH, written for these tests."""
