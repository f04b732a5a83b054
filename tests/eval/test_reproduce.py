"""The paper's protocol as data, and reports that put its numbers beside measured ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flash_dllm.core.method import Method
from flash_dllm.errors import FlashDLLMError
from flash_dllm.eval import published
from flash_dllm.eval.errors import EvalError
from flash_dllm.eval.pages import page
from flash_dllm.eval.plans import PLANS, Cell
from flash_dllm.eval.reproduce import Facts, plan_of, run_plan, write
from flash_dllm.eval.sources import STAND_INS, BundledTasks, engine_args, summary
from flash_dllm.methods import build_method, split_name
from flash_dllm.options import Shape, check_options, numbers_for
from flash_dllm.params import EngineArgs, SamplingParams
from tests.commands import Run

FACTS = Facts("some/LLaDA", "a card", {"dtype": "bfloat16"})
ALL = [(name, cell) for name, make in PLANS.items() for cell in make().cells]


@pytest.mark.parametrize("name", PLANS)
def test_every_cell_is_a_method_that_reads_its_settings(name: str) -> None:
    for cell in PLANS[name]().cells:
        cache, decoding = split_name(cell.method)
        assert decoding is not None
        options = {**cell.options, "guide": Guide()} if decoding == "guided" else cell.options
        method: Method = build_method(cache, decoding, family="llada", **options)
        params = SamplingParams.model_validate({"max_tokens": cell.length, **cell.params})
        check_options(params, method)
        numbers_for(params, method, Shape(cell.length, cell.length), 0)
        assert cell.task in STAND_INS


class Guide:
    """Stands where a left-to-right model would."""

    config = None


def test_cells_have_names_of_their_own() -> None:
    for name in PLANS:
        names = [cell.name for cell in PLANS[name]().cells]
        assert len(set(names)) == len(names), name


def test_the_protocol_of_table_3() -> None:
    cells = {cell.name: cell for cell in PLANS["table1"]().cells}
    assert len(cells) == 64
    mbpp = cells["MBPP-256 / Flash-Verify, Flash-Cache"]
    assert mbpp.options == {"window": 16, "lookahead": 48, "track": 48}
    assert mbpp.params == {"epsilon": 0.9, "gamma": 0.8} and (mbpp.length, mbpp.shots, mbpp.batch) == (
        256,
        3,
        32,
    )
    assert cells["MATH-512 / Flash-Verify, no cache"].params["gamma"] == 0.85
    assert cells["HumanEval-512 / greedy, no cache"].params == {"block_length": 16}


@pytest.mark.parametrize(
    ("task", "length", "method", "accuracy", "rate", "speedup"),
    [
        ("gsm8k", 512, "Flash-Verify, Flash-Cache", 83.02, 210.6, 81.0),
        ("gsm8k", 256, "Elastic-Cache", 81.88, 45.9, 6.9),
        ("math", 512, "confidence, no cache", 35.56, 20.3, 4.1),
        ("humaneval", 256, "Fast-dLLM", 34.75, 18.7, 2.7),
        ("mbpp", 512, "Flash-Verify, Flash-Cache", 39.0, 148.2, 148.2),
        ("mbpp", 256, "greedy, no cache", 38.0, 2.4, 1.0),
    ],
)
def test_published_numbers(
    task: str, length: int, method: str, accuracy: float, rate: float, speedup: float
) -> None:
    figures = published.table1(task, length, method)
    assert (figures.accuracy, figures.tokens_per_second, figures.speedup) == (accuracy, rate, speedup)


def test_published_tables_agree_where_the_paper_does() -> None:
    """Table 2's last rows repeat Table 1; Table 4's ends are the ones that the text names."""
    for method in ("confidence, Flash-Cache", "Flash-Verify, Flash-Cache", "Fast-dLLM", "Elastic-Cache"):
        assert published.TABLE2[method] == published.table1("gsm8k", 512, method)
    ends = [published.table4(*key) for key in ((0.6, 48), (0.85, 96), (1.0, 96))]
    assert [(f.accuracy, f.tokens_per_second) for f in ends] == [
        (80.23, 277.8),
        (83.15, 185.7),
        (83.41, 131.58),
    ]
    five = published.TABLE5["length", "Flash-Verify, Flash-Cache"][512]
    assert five == published.TABLE5["shots", "Flash-Verify, Flash-Cache"][5].__class__(81.73, 186.2, 5.6)
    for method, columns in published.TABLE6.items():
        assert list(columns) == list(published.BATCHES), method
        assert [f.tokens_per_second for f in columns.values()] == sorted(
            f.tokens_per_second for f in columns.values()
        )


def test_the_command_knows_the_plans() -> None:
    from flash_dllm.cli.reproduce import NAMES

    assert tuple(PLANS) == NAMES


def test_only_some_cells() -> None:
    plan = plan_of("table1", "gsm8k-512")
    assert len(plan.cells) == 8 and all(cell.row == "GSM8K-512" for cell in plan.cells)
    with pytest.raises(EvalError, match="'nothing'"):
        plan_of("table1", "nothing")
    with pytest.raises(EvalError, match="fig1"):
        plan_of("fig1", "x")
    with pytest.raises(EvalError, match="table3"):
        plan_of("table3")


class Fake:
    """Measures by a rule; some cells it cannot."""

    label = "stand-in: a fake"

    def __init__(self, broken: str = "\x00") -> None:
        self.broken, self.asked = broken, []

    def measure(self, cell: Cell) -> dict[str, Any]:
        self.asked.append(cell.name)
        if self.broken in cell.name:
            raise FlashDLLMError("it has no such thing")
        rate = 10.0 * (1 + published.METHODS.index(cell.column)) if cell.column in published.METHODS else 1.0
        right = {"accuracy": 50.0, "interval": [40.0, 60.0], "n": 20, "right": 10}
        return {
            "accuracy": right, "tokens_per_second": rate, "tokens_per_step": 2.0, "tokens_per_forward": 1.5,
            "memory_gb": None, "slots": 4, "task": "bundled task gsm",
        }  # fmt: skip


def test_a_report_says_what_differs_and_what_was_not_run() -> None:
    plan = plan_of("table1", "GSM8K-512")
    report = run_plan(plan, Fake(broken="Elastic"), FACTS)
    cells = {cell["column"]: cell for cell in report["cells"]}
    assert cells["Elastic-Cache"]["measured"] is None
    assert cells["Elastic-Cache"]["reason"] == "not run: it has no such thing"
    assert cells["Fast-dLLM"]["measured"]["speedup"] == 4.0
    assert cells["Fast-dLLM"]["published"] == {"accuracy": 80.82, "tokens_per_second": 36.8, "speedup": 14.2}
    assert cells["Fast-dLLM"]["differs"] == ["4 slots, not 32", "bundled task gsm"]
    told = " ".join(report["differs"])
    assert (
        "published LLaDA-1.5" in told and "published NVIDIA A100 80GB" in told and "stand-in: a fake" in told
    )
    same = run_plan(plan, Fake(), Facts("GSAI-ML/LLaDA-1.5", "NVIDIA A100 80GB PCIe", {}))
    assert not [line for line in same["differs"] if line.startswith(("model", "device"))]


def test_the_page_has_each_number_twice() -> None:
    report = run_plan(plan_of("table1", "GSM8K-512"), Fake(broken="Elastic"), FACTS)
    text = page(report)
    row = next(line for line in text.splitlines() if "| Fast-dLLM |" in line)
    assert "| 80.82 | 50.0 (40.0–60.0, n=20) | 36.8 | 40.0 |" in row and "14.2 | 4.0" in row
    assert report["counting"] in text and "wall time" in report["counting"]
    assert "not run: it has no such thing" in next(
        line for line in text.splitlines() if "| Elastic-Cache |" in line
    )
    four = page(run_plan(plan_of("table4", "gamma 0.80 / budget 64"), Fake(), FACTS))
    assert "81.73 ± 0.74" in four and "208.4 ± 2.64" in four


def test_memory_that_does_not_suffice_is_a_result() -> None:
    class Full(Fake):
        def measure(self, cell: Cell) -> dict[str, Any]:
            raise MemoryError

    report = run_plan(plan_of("table6", "batch 32"), Full(), FACTS)
    assert {cell["reason"] for cell in report["cells"]} == {"out of memory"}


def test_another_error_is_not_swallowed() -> None:
    class Broken(Fake):
        def measure(self, cell: Cell) -> dict[str, Any]:
            raise KeyError("a fault of ours")

    with pytest.raises(KeyError):
        run_plan(plan_of("table6", "batch 32"), Broken(), FACTS)


def test_finished_cells_are_kept(tmp_path: Path) -> None:
    plan = plan_of("table6", "batch 1")
    first = Fake(broken="greedy")
    run_plan(plan, first, FACTS, tmp_path)
    again = Fake()
    report = run_plan(plan, again, FACTS, tmp_path)
    assert [name for name in again.asked if "greedy" not in name] == []
    assert all(cell["measured"] for cell in report["cells"])
    other = Fake()
    run_plan(plan, other, Facts("another", "a card", {}), tmp_path)
    assert len(other.asked) == len(plan.cells)
    with (tmp_path / "cells.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"key": "half')
    last = Fake()
    run_plan(plan, last, FACTS, tmp_path)
    assert last.asked == []


def test_reports_are_written(tmp_path: Path) -> None:
    write(run_plan(plan_of("fig7"), Fake(), FACTS), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "fig7.json").read_text(encoding="utf-8"))["plan"] == "fig7"
    assert (tmp_path / "out" / "fig7.md").read_text(encoding="utf-8").startswith("# fig7: ")


def test_slots_are_no_more_than_problems_or_than_allowed() -> None:
    cell = Cell("a", "b", "flash+threshold", {"window": 16}, batch=16)
    assert engine_args(EngineArgs(), cell, None).max_num_seqs == 16
    assert engine_args(EngineArgs(), cell, 3).max_num_seqs == 3
    assert engine_args(EngineArgs(max_num_seqs=8), cell, 100).max_num_seqs == 8
    args = engine_args(EngineArgs(), cell, None)
    assert (args.cache, args.decoding, args.options) == ("flash", "threshold", {"window": 16})


def test_a_guided_method_needs_a_guide() -> None:
    cell = Cell("FlashDLM", "", "freecache+guided")
    with pytest.raises(EvalError, match="--guide"):
        engine_args(EngineArgs(model="GSAI-ML/LLaDA-1.5"), cell, 1)
    bundled = engine_args(EngineArgs(model="flash-dllm/tiny-dream"), cell, 1)
    assert bundled.options == {"guide": "flash-dllm/tiny-guide"}
    mine = EngineArgs(model="GSAI-ML/LLaDA-1.5", options={"guide": "a/guide"})
    assert engine_args(mine, cell, 1).options == {"guide": "a/guide"}


def test_a_groups_tasks_are_added_up() -> None:
    def task(right: int, seconds: float) -> dict[str, Any]:
        counters = {"seconds": seconds, "answer_tokens": 100, "kept_tokens": 90, "nfe": 50, "steps": 25}
        counters |= {"rows": 1, "failed": 0}
        rule = {"math_verify_0.4.8": {"accuracy": float(right), "n": 10, "right": right}}
        return {"published_rule": "math_verify_0.4.8", "rules": rule, "counters": counters}

    from flash_dllm.eval.tasks import GROUPS

    names = GROUPS["minerva_math"]
    group = {"rules": {"math_verify_0.4.8": {"accuracy": 30.0, "n": 70, "right": 21}}}
    report = {"tasks": {name: task(3, 2.0) for name in names}, "groups": {"minerva_math": group}}
    found = summary(report, "minerva_math")
    assert found["accuracy"] == {"accuracy": 30.0, "n": 70, "right": 21, "rule": "math_verify_0.4.8"}
    assert (found["tokens_per_second"], found["tokens_per_step"], found["tokens_per_forward"]) == (
        50.0,
        4.0,
        2.0,
    )


def test_the_bundled_model_stands_in(run: Run, tmp_path: Path) -> None:
    words = (
        "reproduce",
        "fig7",
        "--only",
        "Flash-Verify, Flash-Cache / window 32",
        "--limit",
        "1",
        "--device",
        "cpu",
    )
    done = run(*words, "--output", tmp_path, "--json", "-")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    (cell,) = report["cells"]
    assert cell["measured"]["prompts"] == 1 and cell["measured"]["nfe"] > cell["measured"]["steps"] > 0
    assert "bundled task gsm" in cell["differs"] and report["measured_on"] == BundledTasks.label
    assert (tmp_path / "fig7.md").exists() and (tmp_path / "cells.jsonl").exists()
    shown = run(*words, "--output", tmp_path)
    assert shown.code == 0 and "not the benchmarks" in shown.out


def test_random_weights_stand_for_speed_alone(run: Run) -> None:
    only = ("--only", "Flash-Verify, Flash-Cache / batch 4")
    done = run(
        "reproduce",
        "table6",
        *only,
        "--shape",
        "llada-tiny",
        "--limit",
        "1",
        "--device",
        "cpu",
        "--json",
        "-",
    )
    assert done.code == 0, done.err
    cells = {cell["column"]: cell for cell in json.loads(done.out)["cells"]}
    assert list(cells) == ["batch 4"] and cells["batch 4"]["measured"]["accuracy"] is None
    assert cells["batch 4"]["measured"]["tokens_per_step"] == pytest.approx(5.7)
    assert cells["batch 4"]["differs"] == ["1 slots, not 4", "random prompts"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("table3",), "there are table1"),
        (("table1", "--only", "nothing"), "nothing"),
        (("table1", "--hub", "--data-dir", "x"), "one of --data-dir, --hub and --shape"),
        (("table6", "--shape", "huge", "--only", "batch 1"), "huge"),
        (("table1", "--limit", "0"), "limit"),
    ],
)
def test_bad_input_is_named(run: Run, words: tuple[str, ...], said: str) -> None:
    done = run("reproduce", *words)
    assert done.code == 2 and said in done.err


def test_cells_that_time_did_not_allow_are_named_and_come_later(tmp_path: Path) -> None:
    plan = plan_of("table6", "batch 1")
    none = Fake()
    report = run_plan(plan, none, FACTS, tmp_path, seconds=0)
    assert none.asked == [] and {c["reason"] for c in report["cells"]} == {"not run: no time was left for it"}
    assert all(cell["measured"] for cell in run_plan(plan, Fake(), FACTS, tmp_path)["cells"])
    assert all(cell["measured"] for cell in run_plan(plan, none, FACTS, tmp_path, seconds=0)["cells"])
