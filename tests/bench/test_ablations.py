"""Ablation plans: disjoint sets, units once, resuming, sharing and the tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flash_dllm.bench import ablations
from flash_dllm.bench.ablations import Share, Unit, collect, done_units, problem_set, run, units
from flash_dllm.bench.plans import METHODS, PLANS, Case, Plan, PlanError, find
from flash_dllm.bench.results import verdict
from flash_dllm.llm import LLM
from flash_dllm.methods import build_method, split_name
from flash_dllm.params import METHOD_FIELDS, SamplingParams
from tests.commands import Run

A = Case("a", "none+threshold", {"schedule": "window"})
B = Case("b", "flash+threshold", {"lookahead": 4, "track": 8})
PLAN = Plan("test", "Which?", (A, B), ("arith",))


@pytest.mark.parametrize("plan", [*PLANS.values(), METHODS], ids=lambda plan: plan.name)
def test_every_setting_of_every_plan_exists(plan: Plan) -> None:
    for case in plan.cases:
        cache, decoding = split_name(case.method)
        assert decoding
        if decoding != "guided":
            method = build_method(cache, decoding, family="dream", **case.options)
            SamplingParams.model_validate(case.request)
            assert set(case.request) & METHOD_FIELDS <= method.options, case.label
    assert len({case.label for case in plan.cases}) == len(plan.cases)
    for kind in plan.problems:
        assert len(problem_set(kind, 12, 0)) in range(11, 14)


def test_plans_ask_what_the_paper_left_out() -> None:
    asked = {case.label for name in PLANS for case in PLANS[name].cases}
    tracked = {c.options["track_by"]: c.options["track"] for c in PLANS["tracking"].cases}
    assert tracked == dict.fromkeys(("attention", "recent", "random", "none"), 32)
    assert {"story", "letter", "gsm"} <= set(PLANS["text"].problems) and asked
    assert find("all") == list(PLANS.values())
    with pytest.raises(PlanError, match="'nothing'"):
        find("tracking,nothing")
    with pytest.raises(PlanError, match="no plan"):
        find(" , ")


@pytest.mark.parametrize("kind", ["gsm", "fact", "infill", "mixed", "gsm-2shot"])
def test_sets_are_disjoint_and_repeatable(kind: str) -> None:
    sets = [problem_set(kind, 12, index) for index in range(3)]
    texts = [s.prompt_text + s.answer_text * bool(s.gaps) for samples in sets for s in samples]
    assert len(set(texts)) == len(texts)
    assert [s.prompt_text for s in problem_set(kind, 12, 1)] == [s.prompt_text for s in sets[1]]


def test_unknown_or_too_few_problems_are_refused() -> None:
    with pytest.raises(PlanError, match="'poems'"):
        problem_set("poems", 3, 0)
    with pytest.raises(PlanError, match="gsm-9shot"):
        problem_set("gsm-9shot", 3, 0)


def test_an_option_at_its_default_is_the_same_unit() -> None:
    plain, spelled = (
        Case("x", "flash+threshold", {"track": 8}),
        Case("y", "flash+threshold", {"track": 8, "track_by": "attention", "lookahead": 48}),
    )
    assert plain.key("gsm") == spelled.key("gsm")
    assert plain.key("gsm") != Case("x", "flash+threshold", {"track": 8}, {"epsilon": 0.8}).key("gsm")
    twice = units([Plan("p", "?", (plain, spelled)), Plan("q", "?", (spelled,))], 2)
    assert [unit.index for unit in twice] == [0, 1]


def test_shares_are_parsed() -> None:
    assert Share.parse("1/4") == Share(1, 4)
    for text in ("4/4", "1", "a/b", "-1/2", "1/0"):
        with pytest.raises(PlanError, match="I/N"):
            Share.parse(text)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    yield LLM("flash-dllm/tiny-dream", device="cpu", max_num_seqs=4, max_model_len=320)


def test_processes_share_resume_and_add_up(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size: dict[str, Any] = {"sets": 2, "count": 3}
    first = list(run(llm, [PLAN], tmp_path, **size, share=Share(0, 2), seconds=1e9))
    assert [(u.case.label, u.index) for u, _ in first] == [("a", 0), ("a", 1)]
    # Half is done: the table says what is missing, and the other process does the rest.
    report = collect([PLAN], tmp_path, 2)
    assert (report["units"], report["missing"]) == (2, 2)
    assert [row["label"] for row in report["plans"][0]["rows"]] == ["a"]
    late = list(run(llm, [PLAN], tmp_path, **size, share=Share(1, 2), seconds=-1))
    assert [result for _, result in late] == [None, None]
    list(run(llm, [PLAN], tmp_path, **size, share=Share(1, 2), seconds=1e9))
    # A crash in the middle of a line loses that unit and no other.
    file = tmp_path / "units-1-of-2.jsonl"
    file.write_text(file.read_text()[:-40])
    assert len(done_units(tmp_path)) == 3
    again = list(run(llm, [PLAN], tmp_path, **size, share=Share(1, 2), seconds=1e9))
    assert [(u.case.label, u.index) for u, _ in again] == [("b", 1)]
    monkeypatch.setattr(ablations, "run_unit", None)
    assert list(run(llm, [PLAN], tmp_path, **size, share=Share(0, 1), seconds=1e9)) == []
    report = collect([PLAN], tmp_path, 2)
    rows = report["plans"][0]["rows"]
    assert report["missing"] == 0 and [row["n"] for row in rows] == [6, 6]
    assert rows[0]["against_baseline"]["difference"] == 0
    for row in rows:
        assert row["right"] == sum(s["right"] for s in row["sets"]) == "".join(row["verdicts"]).count("1")
        assert row["tokens_per_forward"]["value"] > 0 and row["rows_per_token"]["value"] > 0


def test_a_unit_that_fails_is_reported_and_tried_again(llm: LLM, tmp_path: Path) -> None:
    broken = Case("broken", "flash+threshold", {"colour": 3})
    plan = Plan("test", "Which?", (broken, A), ("arith",))
    for _ in range(2):
        seen = list(run(llm, [plan], tmp_path, sets=1, count=2, share=Share(), seconds=1e9))
        failed = {u.case.label: r for u, r in seen}["broken"]
        assert failed is not None and "colour" in failed["failed_with"]
    assert len(done_units(tmp_path)) == 1
    assert collect([plan], tmp_path, 1)["missing"] == 1


def unit_line(case: Case, index: int, verdicts: str, **changes: Any) -> str:
    n = len(verdicts)
    line = {
        "set": index, "problems": "arith", "method": case.method, "options": case.options, "request": case.request,
        "model": "m", "device": "cpu", "device_name": "x", "dtype": "float32", "slots": 1, "versions": {},
        "counting": "", "problems_a_set": n, "verdicts": verdicts, "tokens": [4] * n, "nfe": [2] * n,
        "steps": [2] * n, "rows": [40] * n, "failed": 0, "seconds": 1.0, **changes,
    }  # fmt: skip
    return json.dumps(line) + "\n"


def test_tables_from_known_units(tmp_path: Path) -> None:
    lines = [unit_line(A, i, "1" * 40 + "0" * 40) for i in range(2)] + [
        unit_line(B, i, "1" * 80) for i in range(2)
    ]
    (tmp_path / "units-0-of-1.jsonl").write_text("".join(lines))
    report = collect([PLAN], tmp_path, 2)
    a, b = report["plans"][0]["rows"]
    assert (a["accuracy"], b["accuracy"]) == (50.0, 100.0)
    against = b["against_baseline"]
    assert (against["difference"], against["better"], against["worse"]) == (50.0, 80, 0)
    assert against["interval"][0] > 0
    assert b["tokens_per_forward"] == {"value": 2.0, "se": 0.0} and b["rows_per_token"]["value"] == 10.0
    assert verdict(report["plans"][0]).endswith("*b* (arith): 50 points more right.")
    a_alone = {**report["plans"][0], "rows": [a]}
    assert "no setting differs" in verdict(a_alone)


def test_units_that_do_not_compare_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "units-0-of-1.jsonl"
    file.write_text(unit_line(A, 0, "11") + unit_line(B, 0, "11", dtype="bfloat16"))
    with pytest.raises(PlanError, match="dtype = 'float32' and 'bfloat16'"):
        collect([PLAN], tmp_path, 1)
    file.write_text("{broken\n" + unit_line(A, 0, "11"))
    with pytest.raises(PlanError, match="line 1"):
        collect([PLAN], tmp_path, 1)
    with pytest.raises(PlanError, match="no finished unit"):
        collect([PLAN], tmp_path / "nowhere", 1)


def test_the_command_lists_and_refuses(run: Run, tmp_path: Path) -> None:
    listed = run("bench", "ablations", "--list")
    assert listed.code == 0 and all(name in listed.out for name in PLANS)
    outcome = run("bench", "ablations", "--plans", "nope", "--out", tmp_path)
    assert outcome.code == 2 and "'nope'" in outcome.err
    outcome = run("bench", "ablations", "--plans", "tracking", "--shard", "3/2", "--out", tmp_path)
    assert outcome.code == 2 and "3/2" in outcome.err


def test_unit_keys_name_their_set() -> None:
    assert Unit(A, "gsm", 0).key != Unit(A, "gsm", 1).key != Unit(B, "gsm", 1).key
