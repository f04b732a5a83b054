"""The bundled models' cards say what the committed measurements say."""

from __future__ import annotations

import json
import re
import shutil
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from flash_dllm.bench.results_tables import cards
from flash_dllm.train.card import card
from flash_dllm.train.card_text import GOALS, LABELS, PARALLEL, WHAT
from tests.checkpoints import write_checkpoint

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


def rows_of(text: str) -> dict[str, list[list[str]]]:
    """By their first cell the other cells of a text's table rows, in order."""
    found: dict[str, list[list[str]]] = {}
    for row in re.findall(r"^\| (.+) \|$", text, re.M):
        label, *cells = row.split(" | ")
        found.setdefault(label, []).append(cells)
    return found


def cells_of(run: dict[str, Any], family: str) -> list[str]:
    entry = run if family == "all" else run["families"][family]
    low, high = entry["interval"]
    tokens = entry.get("tokens_per_forward")
    shown = "-" if tokens is None else f"{tokens:.2f}"
    return [str(entry["n"]), f"{entry['accuracy']} ({low}-{high})", shown]


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
def test_the_numbers_of_each_family_are_in_its_row(name: str) -> None:
    rows = rows_of(text_of(name))
    threshold, greedy = read(f"card-{name}.json")["runs"][:2]
    assert threshold["request"]["epsilon"] == 0.9 and "epsilon" not in greedy["request"]
    for family, label in LABELS.items():
        assert rows[label][0] == cells_of(threshold, family) + cells_of(greedy, family), label


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
def test_verdicts_add_up(name: str) -> None:
    measured = read(f"card-{name}.json")
    assert len(measured["runs"]) == 8 and not measured["not_run"]
    for run in measured["runs"]:
        verdicts, families = run["verdicts"], run["families"].values()
        assert set(verdicts) <= set("01") and len(verdicts) == 1000
        assert run["right"] == verdicts.count("1") == sum(family["right"] for family in families)
        assert run["n"] == 1000 == sum(family["n"] for family in families)
        assert run["accuracy"] == round(100 * run["right"] / run["n"], 1)


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
def test_a_card_says_which_goals_are_missed(name: str) -> None:
    threshold, greedy = read(f"card-{name}.json")["runs"][:2]
    everything, problems = greedy["accuracy"], greedy["families"]["gsm"]["accuracy"]
    tokens = threshold["families"]["gsm"]["tokens_per_forward"]
    met = [everything >= GOALS["all"][0], problems >= GOALS["gsm"][0], PARALLEL[0] <= tokens <= PARALLEL[1]]
    goals = text_of(name).split("### Goals")[1].split("###")[0]
    verdicts = re.findall(
        r"\*\*(met|missed)[\w ,]*\*\*", goals.replace("missed, but the least is reached", "missed")
    )
    assert [verdict == "met" for verdict in verdicts] == met


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of results: what the script writes today of a random model, as if it were tiny-llada.

    Its accuracies, which are mostly 0, are replaced so that no two are equal.
    """
    folder = tmp_path_factory.mktemp("results")
    size = {"vocab_size": 2048, "embedding_size": 2048, "max_sequence_length": 1024}
    model = write_checkpoint(folder / "model", **size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(WEIGHTS / "tiny-llada" / name, model / name)
    out = folder / "card-tiny-llada.json"
    words = ["card", out, "--model", model, "--limit", 1, "--slots", 11, "--dtype", "float32"]
    spec = spec_from_file_location("decoders", ROOT / "benchmarks" / "decoders.py")
    assert spec is not None and spec.loader is not None
    script = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["decoders.py", *map(str, words)])
        spec.loader.exec_module(script)
        patch.setattr(script, "LENGTH", 32)
        script.main()
    measured = json.loads(out.read_text(encoding="utf-8"))
    for number, run in enumerate(measured["runs"]):
        for part, entry in enumerate([run, *run["families"].values()]):
            entry["accuracy"] = 10 * number + part / 10
    out.write_text(json.dumps(measured), encoding="utf-8")
    shutil.copy(RESULTS / "training-tiny-llada.json", folder)
    return folder


def test_a_card_shows_all_that_the_script_writes(fresh: Path) -> None:
    measured = json.loads((fresh / "card-tiny-llada.json").read_text(encoding="utf-8"))
    assert len(measured["runs"]) == 8 and not measured["not_run"]
    text = card("tiny-llada", fresh, WEIGHTS / "tiny-llada")
    assert f"{measured['date']}, {measured['device_name']}, float32, blocks of 32, answers of 32" in text
    assert "benchmarks/decoders.py card OUT.json --model" in text and str(fresh / "card") not in text
    rows, runs = rows_of(text), measured["runs"]
    for family, label in LABELS.items():
        expected = [
            cells_of(a, family) + cells_of(b, family) for a, b in zip(runs[::2], runs[1::2], strict=True)
        ]
        assert rows[label][:4] == expected, label
    heldout = runs[4]
    assert (heldout["problems"], heldout["request"]["epsilon"]) == ("heldout", 0.9)
    assert f"has not seen {heldout['accuracy']} % of its answers are right (threshold 0.9)" in text
    assert "not run" not in text
    (told,) = (line for line in cards(fresh, fresh) if line.startswith("[card-"))
    assert f"float32 on {measured['device_name']}, {measured['date']}" in told


def test_a_card_names_what_was_not_run_and_refuses_what_failed(fresh: Path, tmp_path: Path) -> None:
    measured = json.loads((fresh / "card-tiny-llada.json").read_text(encoding="utf-8"))
    shutil.copy(fresh / "training-tiny-llada.json", tmp_path)
    late = ["heldout", "none", "threshold", {}, {"block_length": 32, "epsilon": 0.5}]
    changed = measured | {"runs": measured["runs"][:7], "not_run": [late]}
    (tmp_path / "card-tiny-llada.json").write_text(json.dumps(changed))
    text = card("tiny-llada", tmp_path, WEIGHTS / "tiny-llada")
    # The trainer has not measured it either.
    assert "not run for lack of time: new templates, threshold 0.5.\n" in text
    failed = {"method": "none+greedy", "options": {}, "request": {}, "failed_with": "RuntimeError('no')"}
    changed = measured | {"runs": [*measured["runs"][:7], failed]}
    (tmp_path / "card-tiny-llada.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="greedy: failed with RuntimeError"):
        card("tiny-llada", tmp_path, WEIGHTS / "tiny-llada")


def test_a_card_has_every_stage_and_every_table_of_the_trainer() -> None:
    training = read("training-tiny-llada.json")
    text = card("tiny-llada", RESULTS, WEIGHTS / "tiny-llada")
    assert training["note"] in text
    rows = rows_of(text)
    assert [stage["stage"] for stage in training["stages"]] == ["A", "B", "C"]
    for stage in training["stages"]:
        (cells,) = rows[stage["stage"]]
        assert cells[0] == f"{stage['steps']:,}" and cells[-1] == f"`{stage['command']}`"
    (key,) = training["tables"]
    assert key == "test b32 0.9"
    table = training["tables"][key]
    for family, label in LABELS.items():
        assert rows[label][-1] == cells_of({**table["all"], "families": table}, family), label
    own = text.split("### The trainer's own evaluation")[1]
    assert "new templates" not in own.split("## Examples")[0]


@pytest.mark.parametrize("name", WHAT)
def test_loss_curves_fall_and_name_no_folder(name: str) -> None:
    path = RESULTS / f"training-{name}.json"
    losses = [line["masked_nll"] for line in read(path.name)["loss"]]
    assert len(losses) > 20 and losses[-1] < 0.2 * losses[0]
    assert not re.search(r"/(tmp|home|root|work)/", path.read_text(encoding="utf-8"))
