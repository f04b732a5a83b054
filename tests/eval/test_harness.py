"""lm-evaluation-harness end to end on local files: the one test that imports it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flash_dllm.eval.answers import Answerer, Policy
from flash_dllm.eval.run import Settings, evaluate
from flash_dllm.params import EngineArgs, SamplingParams
from tests.checkpoints import write_checkpoint
from tests.eval.rows import MATH, gsm8k_prompt, rows, train_set, write

TASKS = ("gsm8k", "minerva_math500", "humaneval", "mbpp")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write(folder / "gsm8k" / "train.jsonl", train_set())
    write(folder / "gsm8k" / "test.jsonl", rows("gsm8k-test"))
    write(folder / "math500" / "math500.jsonl", MATH)
    write(folder / "humaneval" / "humaneval.jsonl", rows("humaneval"))
    write(folder / "mbpp" / "mbpp.jsonl", rows("mbpp"))
    return folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineArgs:
    """A random model with room for five-shot prompts."""
    folder = write_checkpoint(tmp_path_factory.mktemp("models") / "long", max_sequence_length=6000)
    return EngineArgs(model=str(folder), device="cpu", max_model_len=6000, max_num_seqs=2)


def check_scores(report: dict[str, Any], right: bool) -> None:
    """Every rule of every task, the harness's own and ours."""
    for name in TASKS:
        task = report["tasks"][name]
        assert not task["disagreements"]
        for rule, rate in task["rules"].items():
            # Task 367 of MBPP fails with its own gold code; the rule of 0.4.8 reads few of the short answers.
            wanted = {"mbpp": 1}.get(name, rate["n"]) if right else 0
            assert rate["right"] == wanted or rule == "math_verify_0.4.8", (name, rule)
    harness = {name: report["tasks"][name]["harness"] for name in TASKS}
    best = 1.0 if right else 0.0
    assert harness["gsm8k"]["exact_match,strict-match"] == best
    assert harness["gsm8k"]["exact_match,flexible-extract"] == best
    assert harness["minerva_math500"]["math_verify,none"] == best
    assert harness["humaneval"]["pass@1,create_test"] == best
    assert harness["mbpp"]["pass_at_1,none"] == best / 2


def check_likelihood(engine: EngineArgs, answerer: Answerer) -> None:
    """The class as the harness builds it, and its other request types."""
    from lm_eval.api.instance import Instance

    from flash_dllm.eval.lm import FlashDLLM

    args = f"pretrained={engine.model},method=dual+threshold,epsilon=0.8,mc_num=2,max_model_len=512,window=8"
    with pytest.raises(ValueError, match="'window' is not read"):
        FlashDLLM.create_from_arg_string(args, {"batch_size": "2", "device": "cuda:0"})
    made = FlashDLLM.create_from_arg_string(
        args.removesuffix(",window=8"), {"batch_size": "2", "device": "cpu"}
    )
    assert made.llm.max_num_seqs == 2 and made.llm.method.name == "dual+threshold"
    assert made.answerer.policy.params == SamplingParams(epsilon=0.8)
    pair = Instance("loglikelihood", {}, ("the cat ", "sat"), 0)
    ((log_prob, greedy),) = made.loglikelihood([pair])
    assert log_prob < 0 and isinstance(greedy, bool)
    context, target = made._pair("the cat ", "sat")
    tokenizer = made.answerer.tokenizer
    assert tokenizer.decode(context) == "the cat" and tokenizer.decode(target) == " sat"
    assert made.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("the cat",), 0)])[0] < 0
    talk = [{"role": "user", "content": "1 + 2"}, {"role": "assistant", "content": "so"}]
    model = FlashDLLM.over(answerer)
    assert model.apply_chat_template(talk, add_generation_prompt=False).endswith(
        "assistant<|end_header_id|>\nso"
    )
    assert model.answerer.policy.chat and model.answerer.policy.uncut == {"humaneval"}


@pytest.mark.slow
def test_the_harness_end_to_end(
    data: Path, engine: EngineArgs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    settings = Settings(TASKS, data, limit=2, confirm_run_unsafe_code=True)
    policy = Policy(SamplingParams(max_tokens=4))
    report = evaluate(engine, settings, policy, tmp_path)

    lines = (tmp_path / "samples_gsm8k.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = {s["doc_id"]: s["arguments"][0][0] for s in map(json.loads, lines)}
    assert prompts == {0: gsm8k_prompt(0), 1: gsm8k_prompt(1)}
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == json.loads(
        json.dumps(report)
    )
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert report["counting"] in page and "lm_eval 0.4.13" in page and "math_verify_0.4.8" in page
    assert (
        report["sandbox"]
        and report["tasks"]["gsm8k"]["num_fewshot"] == 5
        and report["tasks"]["gsm8k"]["of"] == 2
    )
    for name in TASKS:
        counted = report["tasks"][name]["counters"]
        assert counted["answers"] == 2 and counted["nfe"] >= 2 and 0 <= counted["answer_tokens"] <= 8
        assert counted["processes"] == 1 and counted["seconds"] > 0

    # A second run decodes only what is new.
    decoded = []
    original = Answerer._answer
    monkeypatch.setattr(Answerer, "_answer", lambda *a: decoded.append(a[1].ask) or original(*a))
    more = evaluate(engine, replace(settings, tasks=("minerva_math500",), limit=3), policy, tmp_path)
    assert [ask.doc for ask in decoded] == [2]
    assert more["tasks"]["minerva_math500"]["counters"]["processes"] == 2
    with pytest.raises(ValueError, match="num_fewshot"):
        evaluate(engine, replace(settings, num_fewshot=1), policy, tmp_path)

    talk = replace(settings, tasks=("humaneval",), limit=1, apply_chat_template=True)
    said = evaluate(engine, talk, policy, tmp_path / "chat")
    assert said["policy"]["chat"] and said["policy"]["uncut"] == ["humaneval"]
    (line,) = (tmp_path / "chat" / "samples_humaneval.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["arguments"][0][0].startswith("<|startoftext|><|start_header_id|>user")

    for kind, right in (("gold", True), ("broken", False)):
        check_scores(evaluate(engine, replace(settings, limit=None, answers=kind), policy), right)
    check_likelihood(engine, Answerer(running_llm(engine)))


def running_llm(engine: EngineArgs) -> Any:
    """The model of the test."""
    from flash_dllm.llm import LLM

    return LLM.from_args(engine)
