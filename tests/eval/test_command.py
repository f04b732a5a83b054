"""``flash-dllm eval``: what it refuses before a model is loaded, without the harness."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flash_dllm.eval import errors
from flash_dllm.eval.report import PUBLISHED, counters, rescore
from flash_dllm.eval.tasks import TASKS
from tests.commands import Run
from tests.eval.rows import MATH, rows, write
from tests.eval.test_answers import SHORT


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "tasks"),
        (("--tasks", ","), "gsm8k"),
        (("--tasks", "humaneval"), "--confirm-run-unsafe-code"),
        (("--tasks", "gsm8k,mbpp"), "mbpp runs what the model wrote"),
        (("--tasks", "gsm8k", "--data-dir", "nowhere"), "no file for its train split in nowhere"),
        (("--tasks", "arc_easy", "--data-dir", "nowhere"), "'arc_easy'"),
        (("--tasks", "gsm8k", "--stop-mode", "never"), "stop_mode='never'"),
        (("--tasks", "gsm8k", "--too-long", "drop"), "too_long='drop'"),
        (("--tasks", "gsm8k", "--limit", "0"), "limit"),
        (("--tasks", "gsm8k", "--gen-kwargs", "epsilon"), "NAME=VALUE"),
        (("--tasks", "gsm8k", "--gen-kwargs", "epsilon=0.8", "--epsilon", "0.7"), "epsilon is given both"),
        (("--tasks", "gsm8k", "--harness", "limit=3"), "'limit' has an option of its own"),
    ],
)
def test_bad_input_is_named(run: Run, words: tuple[str, ...], said: str) -> None:
    done = run("eval", *words)
    assert done.code == 2 and said in done.err and len(done.err.splitlines()) == 1


def test_a_missing_extra_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    done = run("eval", "--tasks", "gsm8k")
    assert done.code == 2 and "pip install 'flash-dllm[eval]'" in done.err


def test_the_start_script_says_so_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from flash_dllm.eval import lm_eval

    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    assert lm_eval.main() == 2
    assert "pip install 'flash-dllm[eval]'" in capsys.readouterr().err


def test_nothing_here_imports_the_harness() -> None:
    import flash_dllm.cli.eval
    import flash_dllm.eval.report
    import flash_dllm.eval.run
    import flash_dllm.eval.sources  # noqa: F401

    assert "lm_eval" not in sys.modules


def samples(task: str, docs: list[dict], texts: list[str], **more: object) -> list[dict]:
    return [
        {"doc_id": i, "doc": doc, "resps": [[text]], "filter": "none", **more}
        for i, (doc, text) in enumerate(zip(docs, texts, strict=True))
    ]


def test_rules_beside_the_harness() -> None:
    pytest.importorskip("math_verify")
    gold = rows("gsm8k-test")
    verdicts = rescore("gsm8k", samples("gsm8k", gold, [gold[0]["answer"], "?"]), [])
    assert verdicts == {"strict-match": {0: True, 1: False}, "flexible-extract": {0: True, 1: False}}
    math = rescore("minerva_math_algebra", samples("", MATH, [m["solution"] for m in MATH]), [])
    assert set(math) == {"math_verify", "math_verify_0.4.8"} and all(math["math_verify"].values())
    assert rescore("arc_easy", samples("", [{}], ["x"]), []) == {}


def test_humaneval_is_extracted_from_the_uncut_text(chat_folder: Path) -> None:
    from dataclasses import replace

    from flash_dllm.eval.answers import Answerer, Ask
    from flash_dllm.llm import LLM

    problem = rows("humaneval")[0]
    (answer,) = Answerer(LLM(chat_folder)).answer([Ask("humaneval", 0, "the cat", SHORT)])
    whole = f"```python\n{problem['prompt']}{problem['canonical_solution']}```"
    answer = replace(answer, full_text=whole, text="")
    found = rescore("humaneval", samples("", [problem], [""], **{"pass@1": 0.0}), [answer])
    assert found == {"pass@1 extracted": {0: True}, "pass@1": {0: False}}
    counted = counters([answer, replace(answer, answer_tokens=10, kept_tokens=4, nfe=5, elapsed=2.0)])
    assert counted["nfe"] == answer.nfe + 5 and counted["kept_tokens"] == answer.kept_tokens + 4
    assert counted["empty"] == 2
    assert counted["tokens_per_second"] == pytest.approx((answer.answer_tokens + 10) / 2.0, abs=0.01)
    assert counters([])["tokens_per_second"] is None


def test_every_task_has_a_rule_of_the_papers() -> None:
    assert all(any(name.startswith(start) for start in PUBLISHED) for name in TASKS)


def test_rows_are_those_of_the_notice() -> None:
    assert write  # the helpers of the other tests
    assert [row["task_id"] for row in rows("mbpp")] == [2, 11, 367]
