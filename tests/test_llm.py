"""The Python interface: prompts in all forms, defaults, outputs, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flash_dllm import LLM, FlashDLLMError, SamplingParams
from flash_dllm.requests import DEFAULT_MAX_TOKENS
from tests.checkpoints import EOS, EOT, MASK, write_checkpoint


@pytest.fixture(scope="module")
def llm(chat_folder: Path) -> LLM:
    return LLM(chat_folder)


@pytest.fixture(scope="module")
def golden(golden_dir: Path) -> LLM:
    return LLM(golden_dir / "llada-tiny")


def test_prompts_in_all_forms(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("the cat")
    params = SamplingParams(max_tokens=6)
    forms: list[Any] = ["the cat", ["the cat"], ids, {"prompt": "the cat"}, {"prompt_token_ids": ids}, [ids]]
    answers = [llm.generate(form, params)[0] for form in forms]
    assert len({tuple(a.outputs[0].token_ids) for a in answers}) == 1
    assert all(a.prompt_token_ids == ids for a in answers)
    assert answers[0].prompt == "the cat" and answers[2].prompt is None


def test_many_prompts_keep_their_order(llm: LLM) -> None:
    texts = ["the dog", "the cat sat on the mat", "1 + 2", "so", "the house", "ran"]
    together = llm.generate(texts, SamplingParams(max_tokens=5))
    assert [o.prompt for o in together] == texts
    assert llm.generate([]) == []


def test_the_answer_has_what_it_cost(golden: LLM) -> None:
    output = golden.generate([5, 6, 7], SamplingParams(max_tokens=24, logprobs=True))[0]
    answer = output.outputs[0]
    assert answer.finish_reason == "length" and answer.stop_reason is None
    assert len(answer.token_ids) == 24
    assert answer.nfe == answer.steps > 0
    assert answer.tpf == pytest.approx(24 / answer.nfe)
    assert answer.rows == answer.nfe * 27
    assert answer.seconds > 0 and answer.queued >= 0
    assert answer.log_probs is not None and all(p <= 0 for p in answer.log_probs)
    assert answer.passes is not None and max(answer.passes) == answer.nfe and min(answer.passes) == 1
    assert output.canvas_ids == [5, 6, 7, *answer.token_ids]
    assert output.to_dict()["outputs"][0]["nfe"] == answer.nfe


def test_a_stop_token_ends_the_answer_and_is_not_in_it(golden: LLM) -> None:
    answer = golden.generate([1, 2, 3], SamplingParams(max_tokens=16))[0].outputs[0]
    assert answer.finish_reason == "stop" and answer.stop_reason == 510
    assert 510 not in answer.token_ids and len(answer.token_ids) < 16
    full = golden.generate([1, 2, 3], SamplingParams(max_tokens=16, stop_at_eos=False))[0]
    assert full.outputs[0].finish_reason == "length"
    assert 511 not in full.canvas_ids


def test_own_stop_token_ids(golden: LLM) -> None:
    plain = golden.generate([5, 6, 7], SamplingParams(max_tokens=24))[0].outputs[0]
    stop = plain.token_ids[10]
    params = SamplingParams(max_tokens=24, stop_token_ids=(stop,))
    cut = golden.generate([5, 6, 7], params)[0].outputs[0]
    assert cut.finish_reason == "stop" and cut.stop_reason == stop
    assert cut.token_ids == plain.token_ids[: plain.token_ids.index(stop)]


def test_the_default_length_is_the_models_own(llm: LLM, golden: LLM) -> None:
    assert len(llm.generate("the cat", SamplingParams(stop_at_eos=False))[0].canvas_ids) == 24 + len(
        llm.generate("the cat", SamplingParams(max_tokens=1))[0].prompt_token_ids
    )
    job = golden.job([1, 2, 3], SamplingParams())
    assert sum(job.masked) == DEFAULT_MAX_TOKENS
    near_the_end = golden.job([1] * 1000, SamplingParams())
    assert sum(near_the_end.masked) == 24


def test_a_mask_id_in_the_prompt_is_given_text(llm: LLM) -> None:
    output = llm.generate([7, MASK, 8], SamplingParams(max_tokens=4))[0]
    assert output.prompt_token_ids == [7, MASK, 8] == output.canvas_ids[:3]


def test_chat_uses_the_template(llm: LLM) -> None:
    talk = [{"role": "user", "content": " hello "}]
    output = llm.chat(talk, SamplingParams(max_tokens=4))[0]
    assert output.prompt is not None and output.prompt.startswith("<|startoftext|><|start_header_id|>user")
    two = llm.chat(
        [talk, [*talk, {"role": "assistant", "content": "x"}, *talk]], SamplingParams(max_tokens=4)
    )
    assert two[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert len(two[1].prompt_token_ids) > len(two[0].prompt_token_ids)


def test_a_chat_template_of_ones_own(chat_folder: Path, tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    file = tmp_path / "t.jinja"
    file.write_text(source)
    for template in (source, file, str(file)):
        llm = LLM(chat_folder, chat_template=template)
        assert llm.job([{"role": "user", "content": "the cat"}], SamplingParams()).prompt == "the cat"


def test_seeds(llm: LLM) -> None:
    def answer(**kw: Any) -> list[int]:
        params = SamplingParams(max_tokens=12, temperature=1.0, **kw)
        return llm.generate("the cat", params)[0].outputs[0].token_ids

    assert answer() == answer() == answer(seed=0)
    assert answer(seed=1) != answer(seed=2)
    several = llm.generate("the cat", SamplingParams(max_tokens=12, temperature=1.0, n=3, seed=5))[0]
    assert [c.token_ids for c in several.outputs] == [answer(seed=5), answer(seed=6), answer(seed=7)]
    assert [c.index for c in several.outputs] == [0, 1, 2]
    reseeded = LLM.from_args(llm.args.model_copy(update={"seed": 1}), llm.loaded)
    assert reseeded.generate("the cat", SamplingParams(max_tokens=12, temperature=1.0))[0].outputs[
        0
    ].token_ids == answer(seed=1)


def test_mask_and_ids_beyond_the_tokenizer_are_never_produced(tmp_path: Path) -> None:
    llm = LLM(write_checkpoint(tmp_path / "m", embedding_size=400))
    assert llm.tokenizer is not None
    params = SamplingParams(max_tokens=60, temperature=20.0, stop_at_eos=False)
    for seed in range(3):
        output = llm.generate("the", params.model_copy(update={"seed": seed}))[0]
        answer = output.canvas_ids[len(output.prompt_token_ids) :]
        assert MASK not in answer and max(answer) < llm.tokenizer.n_tokens


def test_eos_policies(golden: LLM) -> None:
    params = SamplingParams(max_tokens=16, stop_at_eos=False)
    kept = golden.generate([1, 2, 3], params)[0].canvas_ids
    gone = golden.generate([1, 2, 3], params.model_copy(update={"eos": "suppress_logits"}))[0].canvas_ids
    assert 510 in kept and 510 not in gone


def test_guidance_takes_two_slots(golden_dir: Path) -> None:
    llm = LLM(golden_dir / "llada-tiny", max_num_seqs=2)
    plain = llm.generate([1, 2, 3], SamplingParams(max_tokens=8))[0].outputs[0]
    guided = llm.generate([1, 2, 3], SamplingParams(max_tokens=8, cfg_scale=1.5))[0].outputs[0]
    assert guided.nfe == 2 * guided.steps and guided.token_ids != plain.token_ids
    one = LLM(golden_dir / "llada-tiny", max_num_seqs=1)
    with pytest.raises(FlashDLLMError, match="two slots"):
        one.generate([1, 2, 3], SamplingParams(max_tokens=8, cfg_scale=1.5))


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", {}, "prompt is empty"),
        ([], {}, None),
        ([[]], {}, "prompt is empty"),
        ([1, 2, 99999], {}, "token id 99999"),
        ([1, -1], {}, "token id -1"),
        ([[1, "x"]], {}, "token ids"),
        ([{"text": "x"}], {}, "prompt dict"),
        (7, {}, "not int"),
        ([1] * 300, {}, "leaves no room"),
        ([1] * 200, {"max_tokens": 100}, "max_tokens=100"),
        ("x", {"stop_token_ids": (5000,)}, "stop token id 5000"),
        ("x", {"stop_token_ids": tuple(range(9))}, "at most 8"),
        ("\ud800", {}, "lone surrogate"),
    ],
)
def test_bad_prompts(llm: LLM, prompt: Any, params: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert llm.generate(prompt) == []
        return
    with pytest.raises(FlashDLLMError, match=message):
        llm.generate(prompt, SamplingParams(**params))
    assert llm.engine.idle


def test_one_bad_prompt_stops_the_batch_before_it_starts(llm: LLM) -> None:
    steps = llm.engine.totals.steps
    with pytest.raises(FlashDLLMError, match="empty"):
        llm.generate(["fine", ""])
    assert llm.engine.totals.steps == steps and llm.engine.idle
    assert llm.generate("fine", SamplingParams(max_tokens=2))


def test_parameters_one_a_prompt(llm: LLM) -> None:
    lengths = [3, 5]
    outputs = llm.generate(["the", "cat"], [SamplingParams(max_tokens=n, stop_at_eos=False) for n in lengths])
    assert [len(o.canvas_ids) - len(o.prompt_token_ids) for o in outputs] == lengths
    with pytest.raises(FlashDLLMError, match="2 sets"):
        llm.generate(["a", "b", "c"], [SamplingParams()] * 2)


def test_a_checkpoint_without_a_tokenizer(bare_folder: Path) -> None:
    llm = LLM(bare_folder)
    output = llm.generate([5, 6, 7], SamplingParams(max_tokens=4))[0]
    assert output.outputs[0].text == "" and output.outputs[0].token_ids
    for call in (
        lambda: llm.generate("text"),
        lambda: llm.generate([5, 6], SamplingParams(stop="x")),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.infill("a {{2}} b"),
    ):
        with pytest.raises(FlashDLLMError, match="tokenizer"):
            call()


def test_a_chat_without_a_template(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "base")
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(FlashDLLMError, match="no chat template"):
        LLM(folder).chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("talk", [[], [{"role": "user"}], [{"role": "user", "content": 3}]])
def test_bad_conversations(llm: LLM, talk: Any) -> None:
    with pytest.raises(FlashDLLMError):
        llm.chat(talk)


def test_constructor_refusals(chat_folder: Path, golden_dir: Path) -> None:
    for kw, message in (
        ({"cache": "nonsense"}, "unknown cache 'nonsense'"),
        ({"decoding": "nonsense"}, "unknown decoding"),
        ({"nonsense": 3}, "option 'nonsense'"),
        ({"max_model_len": 100000}, "max_model_len=100000"),
        ({"preset": "fast"}, "unknown preset 'fast'"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"device": "gpu"}, "'gpu': unknown"),
        ({"revision": "main"}, "revision"),
    ):
        with pytest.raises(FlashDLLMError, match=message):
            LLM(chat_folder, **kw)
    with pytest.raises(ValidationError):
        LLM(chat_folder, dtype="int3")
    with pytest.raises(FlashDLLMError, match="no such"):
        LLM("nowhere-to-be-found")


def test_another_method_on_the_same_weights(llm: LLM) -> None:
    greedy = llm.with_method("none", "greedy")
    assert greedy.loaded is llm.loaded and greedy.method.name == "none+greedy"
    answer = greedy.generate("the cat", SamplingParams(max_tokens=9, stop_at_eos=False))[0].outputs[0]
    assert answer.nfe == 9


def test_the_engine_survives_bad_weights(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "nan")
    llm = LLM(folder)
    llm.loaded.model.norm.fill_(float("nan"))
    failed = llm.generate(["the", "cat"], SamplingParams(max_tokens=4))
    assert [o.outputs[0].finish_reason for o in failed] == ["error", "error"]
    assert all("non-finite" in str(o.outputs[0].error) for o in failed)
    llm.loaded.model.norm.fill_(1.0)
    assert llm.generate("the", SamplingParams(max_tokens=4))[0].outputs[0].error is None


def test_eot_is_a_stop_token_by_default(llm: LLM) -> None:
    assert llm.loaded.stop_ids == (EOS, EOT)


def test_a_job_that_is_there_twice_is_refused_and_nothing_stays(bare_folder: Path) -> None:
    llm = LLM(bare_folder, device="cpu")
    job = llm.job([5, 6, 7], SamplingParams(max_tokens=4))
    with pytest.raises(FlashDLLMError, match="twice"):
        list(llm.as_completed([job, job]))
    assert llm.engine.idle
    with pytest.raises(FlashDLLMError, match="SamplingParams"):
        llm.generate([[5, 6]], {"max_tokens": 3})  # type: ignore[arg-type]


def test_a_log_inside_a_log_leaves_the_outer_one(bare_folder: Path, tmp_path: Path) -> None:
    llm = LLM(bare_folder, device="cpu")
    outer, inner = tmp_path / "outer.jsonl", tmp_path / "inner.jsonl"
    with llm.tracing(outer):
        with llm.tracing(inner):
            llm.generate([[5, 6]], SamplingParams(max_tokens=2))
        llm.generate([[7, 8]], SamplingParams(max_tokens=2))
    for path in (outer, inner):
        events = [json.loads(line)["event"] for line in path.read_text().splitlines()]
        assert events.count("request") == events.count("end") == 1
