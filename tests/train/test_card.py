"""The bundled models' cards say what the committed measurements say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from flash_dllm.train.card import card
from flash_dllm.train.card_text import LABELS, WHAT

ROOT = Path(__file__).parent.parent.parent
RESULTS, WEIGHTS = ROOT / "benchmarks" / "results", ROOT / "src" / "flash_dllm" / "weights"


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content


def text_of(name: str) -> str:
    return (WEIGHTS / name / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", WHAT)
def test_a_card_is_what_its_measurements_give(name: str) -> None:
    assert text_of(name) == card(name, RESULTS, WEIGHTS / name), "run: flash-dllm train cards --results ..."


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
def test_the_numbers_of_each_family_are_in_its_row(name: str) -> None:
    measured = read(f"card-{name}.json")
    rows = re.findall(r"^\| (.+) \|$", text_of(name), re.M)
    by_label: dict[str, list[str]] = {}
    for row in rows:
        label, *cells = row.split(" | ")
        by_label.setdefault(label, cells)
    threshold, greedy = measured["runs"][:2]
    assert threshold["request"]["epsilon"] == 0.9 and "epsilon" not in greedy["request"]
    for family, label in LABELS.items():
        expected = []
        for run in (threshold, greedy):
            entry = run if family == "all" else run["families"][family]
            low, high = entry["interval"]
            tokens = entry.get("tokens_per_forward")
            expected += [str(entry["n"]), f"{entry['accuracy']} ({low}-{high})"]
            expected.append("-" if tokens is None else f"{tokens:.2f}")
        assert by_label[label] == expected, label


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
def test_verdicts_add_up_and_leave_out_what_was_asked_wrongly(name: str) -> None:
    for run in read(f"card-{name}.json")["runs"]:
        verdicts, families = run["verdicts"], run["families"].values()
        assert verdicts.count("-") == 36 and len(verdicts) == 1000
        assert run["right"] == verdicts.count("1") == sum(family["right"] for family in families)
        assert run["n"] == 1000 - 36 == sum(family["n"] for family in families)
        assert run["accuracy"] == round(100 * run["right"] / run["n"], 1)


def test_a_card_says_which_goals_are_missed() -> None:
    llada, dream = text_of("tiny-llada"), text_of("tiny-dream")
    assert llada.count("**missed**") == 3 and "**met**" not in llada
    assert dream.count("**missed**") == 1 and dream.count("**met**") == 2


@pytest.mark.parametrize("name", WHAT)
def test_loss_curves_fall_and_name_no_folder(name: str) -> None:
    path = RESULTS / f"training-{name}.json"
    losses = [line["masked_nll"] for line in read(path.name)["loss"]]
    assert len(losses) > 20 and losses[-1] < 0.2 * losses[0]
    assert not re.search(r"/(tmp|home|root|work)/", path.read_text(encoding="utf-8"))
