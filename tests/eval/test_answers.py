"""The harness's requests through the engine: order, lengths, stop strings, counters, resuming."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flash_dllm.eval.answers import DEFAULT_LENGTH, Answerer, Ask, Policy, cut, sampling_params
from flash_dllm.eval.errors import EvalError
from flash_dllm.eval.journal import Journal, wall_seconds
from flash_dllm.eval.progress import Lines
from flash_dllm.llm import LLM
from flash_dllm.outputs import RequestOutput
from flash_dllm.params import SamplingParams

WORDS = ["the cat sat", "the dog ran to the house and the cat", "1 + 2 =", "ein Fünfer", "the mat"]
SHORT = {"max_gen_toks": 12, "do_sample": False, "temperature": 0.0}


@pytest.fixture(scope="module")
def llm(chat_folder: Path) -> LLM:
    return LLM(chat_folder, cache="none", decoding="threshold", max_num_seqs=2, seed=3)


def asks(**settings: object) -> list[Ask]:
    return [Ask("task", i, text, {**SHORT, **settings}) for i, text in enumerate(WORDS)]


def whole_outputs(llm: LLM) -> list[RequestOutput]:
    """What the engine decodes without any stop string."""
    return llm.generate(WORDS, SamplingParams(max_tokens=12))


def test_answers_come_in_the_order_of_the_requests(llm: LLM) -> None:
    answerer = Answerer(llm)
    there = answerer.answer(asks())
    assert [a.doc for a in there] == [0, 1, 2, 3, 4]
    assert [a.text for a in there] == [o.text for o in whole_outputs(llm)]
    back = Answerer(llm).answer(asks()[::-1])
    assert [a.text for a in back] == [a.text for a in there[::-1]]
    assert answerer.answers == there


def test_answers_do_not_depend_on_slots_or_neighbours(llm: LLM) -> None:
    """Scores of a published evaluator changed with its batch size."""
    alone = LLM.from_args(llm.args.model_copy(update={"max_num_seqs": 1}), llm.loaded)
    many = LLM.from_args(llm.args.model_copy(update={"max_num_seqs": 5}), llm.loaded)
    texts = [[a.text for a in Answerer(each).answer(asks())] for each in (alone, llm, many)]
    assert texts[0] == texts[1] == texts[2]
    assert [Answerer(many).answer([ask])[0].text for ask in asks()] == texts[0]


def test_counters_are_those_of_the_engine(llm: LLM) -> None:
    for answer, output in zip(Answerer(llm).answer(asks()), whole_outputs(llm), strict=True):
        done = output.outputs[0]
        assert answer.answer_tokens == answer.kept_tokens == len(done.token_ids)
        assert (answer.nfe, answer.steps, answer.rows) == (done.nfe, done.steps, done.rows)
        assert answer.prompt_tokens == len(output.prompt_token_ids)
        assert answer.finish_reason == done.finish_reason


@pytest.mark.parametrize("stop", ["early", "late"])
def test_text_is_cut_before_the_first_stop_string(llm: LLM, stop: str) -> None:
    full = [o.text for o in whole_outputs(llm)]
    wanted = [text[len(text) // 2 :][:2] for text in full]
    for index, (text, until) in enumerate(zip(full, wanted, strict=True)):
        answerer = Answerer(llm, Policy(stop=stop))
        (answer,) = answerer.answer(
            [Ask("task", index, WORDS[index], {**SHORT, "until": ["never said", until, ""]})]
        )
        assert answer.text == text[: text.index(until)]
        if stop == "late":
            assert answer.full_text == text and answer.answer_tokens > answer.kept_tokens
        else:
            assert answer.finish_reason == "stop" and answer.answer_tokens >= answer.kept_tokens


def test_decoding_late_costs_more_and_says_the_same(llm: LLM) -> None:
    """Both count the passes that they made; only what lies before the stop string is kept."""
    until = whole_outputs(llm)[1].text[4:6]
    ask = [Ask("task", 1, WORDS[1], {**SHORT, "until": until})]
    (early,), (late,) = (Answerer(llm, Policy(stop=stop)).answer(ask) for stop in ("early", "late"))
    assert early.text == late.text and early.kept_tokens == late.kept_tokens
    assert early.nfe <= late.nfe and early.answer_tokens <= late.answer_tokens


def test_a_task_may_be_left_uncut_by_the_engine(llm: LLM) -> None:
    until = whole_outputs(llm)[1].text[4:6]
    policy = Policy(uncut=frozenset({"task"}))
    (answer,) = Answerer(llm, policy).answer([Ask("task", 1, WORDS[1], {**SHORT, "until": until})])
    assert answer.full_text == whole_outputs(llm)[1].text and answer.text == answer.full_text[:4]


def test_cutting_finds_a_stop_string_inside_a_token(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("the house and the cat")
    text, kept = cut(llm, ids, ("ouse",))
    assert text == "the h" and 0 < kept < len(ids)
    assert cut(llm, ids, ("dog",)) == ("the house and the cat", len(ids))
    assert cut(llm, ids, ("the",)) == ("", 0)
    ended = [*ids, *llm.tokenizer.encode("<|eot_id|>")]
    assert cut(llm, ended, ("<|eot_id|>",)) == ("the house and the cat", len(ids))


def test_a_prompt_that_is_too_long_is_an_error(llm: LLM) -> None:
    long = Ask("gsm8k", 7, "the cat sat " * 200, SHORT)
    with pytest.raises(
        EvalError, match=r"1 of 2 prompts do not fit max_model_len=256.*gsm8k, problem 7.*--num-fewshot"
    ):
        Answerer(llm).answer([Ask("gsm8k", 6, "the", SHORT), long])
    roomier = LLM.from_args(llm.args.model_copy(update={"max_model_len": 64}), llm.loaded)
    with pytest.raises(EvalError, match=r"--max-model-len \(at most 256\)"):
        Answerer(roomier).answer([Ask("gsm8k", 7, "the cat sat " * 20, SHORT)])
    hopeless = Ask("gsm8k", 1, "the", {**SHORT, "max_gen_toks": 256})
    with pytest.raises(EvalError, match=r"--max-tokens\)$"):
        Answerer(llm, Policy(too_long="truncate")).answer([hopeless])


def test_a_prompt_may_be_truncated_at_its_beginning(llm: LLM) -> None:
    assert llm.tokenizer is not None
    text = "1 + 2 = 3 " * 100 + "the cat sat"
    (answer,) = Answerer(llm, Policy(too_long="truncate")).answer([Ask("task", 0, text, SHORT)])
    ids = llm.tokenizer.encode(text, add_special=True)
    assert answer.prompt_tokens == 256 - 12 and answer.cut_tokens == len(ids) - 244
    assert answer.text == llm.generate(ids[-244:], SamplingParams(max_tokens=12))[0].text


def test_a_first_token_is_put_before_the_prompt_once(llm: LLM) -> None:
    plain, first = (Answerer(llm, Policy(bos=bos)).answer(asks()[:1])[0] for bos in (None, 2))
    assert first.prompt_tokens == plain.prompt_tokens + 1
    twice = Answerer(llm, Policy(bos=2)).answer([Ask("task", 0, "<|startoftext|>the cat sat", SHORT)])
    assert twice[0].prompt_tokens == first.prompt_tokens


@pytest.mark.parametrize(
    ("settings", "given", "wanted"),
    [
        ({}, {}, {"max_tokens": DEFAULT_LENGTH, "stop": ()}),
        ({"until": "x"}, {}, {"stop": ("x",)}),
        ({"until": ["x", "", "y", "x"]}, {"stop": ["z"]}, {"stop": ("x", "y", "z")}),
        ({"max_gen_toks": 1024}, {}, {"max_tokens": 1024}),
        ({"max_new_tokens": 5, "max_tokens": 6}, {}, {"max_tokens": 5}),
        ({"max_gen_toks": 1024}, {"max_tokens": 64}, {"max_tokens": 64}),
        ({"do_sample": False, "temperature": 0.7}, {}, {"temperature": 0.0}),
        ({"temperature": 0.7}, {}, {"temperature": 0.7}),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.9}, {}, {"temperature": 0.7, "top_p": 0.9}),
        ({"do_sample": False}, {"temperature": 0.2}, {"temperature": 0.2}),
        ({"epsilon": 0.8, "block_length": 16}, {"epsilon": 0.7}, {"epsilon": 0.7, "block_length": 16}),
    ],
)
def test_task_settings_become_parameters_and_the_users_win(settings: dict, given: dict, wanted: dict) -> None:
    params = sampling_params(settings, SamplingParams.model_validate(given))
    assert {name: getattr(params, name) for name in wanted} == wanted


def test_a_setting_that_nobody_reads_is_an_error(llm: LLM) -> None:
    with pytest.raises(EvalError, match="num_beams=4"):
        Answerer(llm).answer(asks(num_beams=4))
    with pytest.raises(EvalError, match="n=2"):
        Answerer(llm, Policy(SamplingParams(n=2, temperature=1.0)))


def test_a_repeated_request_gets_its_own_noise(llm: LLM) -> None:
    again = [Ask("task", 0, WORDS[0], {**SHORT, "do_sample": True, "temperature": 5.0})] * 3
    answers = Answerer(llm).answer(again)
    assert len({a.key for a in answers}) == 3 and len({a.text for a in answers}) > 1


class StoppedError(Exception):
    pass


def interrupt_after(count: int, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine give ``count`` answers, then stop as Ctrl-C would."""
    original = llm.as_completed

    def some(jobs):  # type: ignore[no-untyped-def]
        for index, answer in enumerate(original(jobs)):
            if index == count:
                raise StoppedError
            yield answer

    monkeypatch.setattr(llm, "as_completed", some)


def test_an_interrupted_run_goes_on_where_it_stopped(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, settings = tmp_path / "out" / "answers.jsonl", {"method": "x", "list": [1]}
    expected = [a.text for a in Answerer(llm).answer(asks())]
    with monkeypatch.context() as patch, Journal(path, settings) as journal:
        interrupt_after(2, llm, patch)
        with pytest.raises(StoppedError):
            Answerer(llm, journal=journal).answer(asks())
    with path.open("ab") as file:
        file.write(b'{"key": "half a li')
    decoded = []
    original = llm.as_completed
    monkeypatch.setattr(llm, "as_completed", lambda jobs: decoded.extend(jobs) or original(jobs))
    with Journal(path, settings) as journal:
        answers = Answerer(llm, journal=journal).answer(asks())
    assert [a.text for a in answers] == expected and len(decoded) == 3
    assert {a.run for a in answers} == {0, 1}
    with Journal(path, settings) as journal:
        assert [a.text for a in Answerer(llm, journal=journal).answer(asks()[:4])] == expected[:4]
    assert len(decoded) == 3


def test_answers_of_other_settings_are_refused(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with Journal(path, {"epsilon": 0.9}) as journal:
        Answerer(llm, journal=journal).answer(asks()[:1])
    with pytest.raises(EvalError, match=r"epsilon=0\.9; this run has 0\.8"):
        Journal(path, {"epsilon": 0.8})
    with pytest.raises(EvalError, match="more=None; this run has 1"):
        Journal(path, {"epsilon": 0.9, "more": 1})
    path.write_text("no journal\n", encoding="utf-8")
    with pytest.raises(EvalError, match="not the answers of an earlier evaluation"):
        Journal(path, {})


def test_a_prompt_that_changed_is_answered_again(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with Journal(path, {}) as journal:
        Answerer(llm, journal=journal).answer(asks()[:1])
        Answerer(llm, journal=journal).answer([Ask("task", 0, "another", SHORT)])
    assert len(path.read_text(encoding="utf-8").splitlines()) == 3


def test_failed_answers_are_tried_again(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with Journal(path, {}) as journal:
        (answer,) = Answerer(llm, journal=journal).answer(asks()[:1])
    lines = path.read_text(encoding="utf-8").splitlines()
    broken = {**json.loads(lines[1]), "error": "the model gave non-finite logits", "text": ""}
    path.write_text(f"{lines[0]}\n{json.dumps(broken)}\n", encoding="utf-8")
    with Journal(path, {}) as journal:
        assert not journal.answers
        assert Answerer(llm, journal=journal).answer(asks()[:1])[0].text == answer.text


def test_wall_time_adds_up_over_processes_and_tasks(llm: LLM) -> None:
    from dataclasses import replace

    (one,) = Answerer(llm).answer(asks()[:1])
    made = [
        replace(one, run=run, task=task, elapsed=elapsed)
        for run, task, elapsed in ((0, "a", 1.0), (0, "a", 4.0), (0, "b", 2.0), (1, "a", 3.0))
    ]
    assert wall_seconds(made) == 4.0 + 2.0 + 3.0
    assert wall_seconds([]) == 0.0


def test_progress_tells_rate_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(total=10, done=2, every=0.0)
    lines.advance(30)
    assert lines.line(2.0) == "flash-dllm: 3 of 10 answers, 15.0 tokens/s, 0:00:14 left"
    assert "3 of 10 answers" in capsys.readouterr().err
    assert Lines(3, 0, 1e9).line(0.0) == "flash-dllm: 0 of 3 answers, 0.0 tokens/s, ? left"


def test_a_model_without_a_tokenizer_is_refused(bare_folder: Path) -> None:
    with pytest.raises(EvalError, match="no tokenizer"):
        Answerer(LLM(bare_folder))
