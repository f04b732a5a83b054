"""Templates with gaps anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flash_dllm import LLM, FlashDLLMError, Gap, SamplingParams
from flash_dllm.infill import TemplateError, parse_template
from tests.checkpoints import EOS, EOT, MASK


@pytest.fixture(scope="module")
def llm(chat_folder: Path) -> LLM:
    return LLM(chat_folder)


def test_the_text_form() -> None:
    assert parse_template("a {{3}} b {{<=4}}c") == ["a ", Gap(3), " b ", Gap(max_tokens=4), "c"]
    assert parse_template("{{ 2 }}{{ <= 3 }}") == [Gap(2), Gap(max_tokens=3)]
    assert parse_template("{{x}} {{1}} {3}") == ["{{x}} ", Gap(1), " {3}"]
    assert parse_template(["{{5}}", Gap(1)]) == ["{{5}}", Gap(1)]


@pytest.mark.parametrize(
    "template", ["no gap", "", [], ["a", 3], [Gap(1), None], "{{0}}", "{{x}}", [["a"], Gap(1)]]
)
def test_bad_templates(template: Any) -> None:
    with pytest.raises(TemplateError):
        parse_template(template)


@pytest.mark.parametrize(
    "kw", [{}, {"length": 0}, {"length": -2}, {"max_tokens": 0}, {"length": 1, "max_tokens": 1}]
)
def test_bad_gaps(kw: dict[str, Any]) -> None:
    with pytest.raises(TemplateError):
        Gap(**kw)


def test_text_around_the_gaps_stays(llm: LLM) -> None:
    output = llm.infill("the {{3}} sat on {{2}}. ☃")
    assert output.spans is not None and len(output.spans) == 2
    assert output.text == f"the {output.spans[0]} sat on {output.spans[1]}. ☃"
    assert len(output.outputs[0].token_ids) == 5 and output.outputs[0].finish_reason == "length"
    assert llm.tokenizer is not None
    pieces = [llm.tokenizer.encode(t) for t in ("the ", " sat on ", ". ☃")]
    a, b = output.outputs[0].token_ids[:3], output.outputs[0].token_ids[3:]
    assert output.canvas_ids == [*pieces[0], *a, *pieces[1], *b, *pieces[2]]
    assert output.prompt_token_ids == [t for piece in pieces for t in piece]


def test_gaps_at_both_ends_and_side_by_side(llm: LLM) -> None:
    output = llm.infill([Gap(2), "cat", Gap(1), Gap(2)])
    assert output.spans is not None and [bool(s is not None) for s in output.spans] == [True] * 3
    assert MASK not in output.canvas_ids


@pytest.mark.parametrize("method", ["threshold", "greedy", "random", "factor"])
def test_every_decoding_fills_every_gap(llm: LLM, method: str) -> None:
    output = llm.with_method("none", method).infill("a {{5}} b {{40}} c {{1}}")
    assert MASK not in output.canvas_ids
    assert len(output.outputs[0].token_ids) == 46


def test_a_gap_of_fixed_length_holds_no_stop_token(llm: LLM) -> None:
    for seed in range(4):
        params = SamplingParams(temperature=8.0, seed=seed)
        ids = llm.infill("a {{60}} b", params).outputs[0].token_ids
        assert len(ids) == 60 and not {EOS, EOT} & set(ids)
    keep = SamplingParams(temperature=8.0, eos="keep")
    assert {EOS, EOT} & {
        t for s in range(8) for t in llm.infill("a {{60}} b", keep.model_copy(update={"seed": s})).canvas_ids
    }


def test_an_open_ended_gap_is_cut_at_its_stop_token(llm: LLM) -> None:
    for seed in range(40):
        output = llm.infill("a {{<=60}} b {{<=3}}", SamplingParams(temperature=8.0, seed=seed))
        start = len(llm.tokenizer.encode("a ")) if llm.tokenizer else 0
        span = output.canvas_ids[start : start + 60]
        stops = [i for i, token in enumerate(span) if token in (EOS, EOT)]
        if stops:
            assert llm.tokenizer is not None and output.spans is not None
            assert output.spans[0] == llm.tokenizer.decode(span[: stops[0]])
            assert output.outputs[0].finish_reason == "stop"
            assert MASK not in output.canvas_ids, "the second gap is filled all the same"
            return
    pytest.fail("no stop token in 40 tries")


def test_token_ids_need_no_tokenizer(bare_folder: Path, llm: LLM) -> None:
    output = LLM(bare_folder).infill([[5, 6], Gap(3), [7]])
    assert output.canvas_ids[:2] == [5, 6] and output.canvas_ids[-1] == 7
    assert output.canvas_ids == llm.infill([[5, 6], Gap(3), [7]]).canvas_ids


def test_a_template_beside_prompts_changes_neither(llm: LLM) -> None:
    job = llm.job("the {{3}} sat {{4}}", SamplingParams(), template=True)
    alone = llm.infill("the {{3}} sat {{4}}").canvas_ids
    other = llm.generate("so", SamplingParams(max_tokens=9))[0].canvas_ids
    jobs = [llm.job("so", SamplingParams(max_tokens=9)), job]
    outputs = dict(llm.as_completed(jobs))
    assert (outputs[0].canvas_ids, outputs[1].canvas_ids) == (other, alone)


@pytest.mark.parametrize(
    ("params", "message"),
    [({"max_tokens": 5}, "max_tokens=5"), ({"stop": "x"}, "stop="), ({"steps": 2}, "steps=2 is not read")],
)
def test_options_that_do_not_apply(llm: LLM, params: dict[str, Any], message: str) -> None:
    with pytest.raises(FlashDLLMError, match=message):
        llm.infill("a {{3}}", SamplingParams(**params))


def test_too_long(llm: LLM) -> None:
    with pytest.raises(FlashDLLMError, match="max_model_len=256"):
        llm.infill("a {{400}}")
