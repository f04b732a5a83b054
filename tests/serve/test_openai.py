"""The official client against a live server: every field, and the answers of the Python interface."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from flash_dllm import LLM, Gap, SamplingParams
from flash_dllm.outputs import Completion
from tests.serve.support import MODEL, WAIT, Live, Stepper, in_background, live, service_of, twin, until

PROMPTS = ("the cat", "1 + 2 =", "naïve ☃", "ein Öl")
TALK = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hello"}]
WHOLE: dict[str, Any] = {"stop_at_eos": False, "skip_special_tokens": False}
"""The whole canvas as text: random weights write special tokens and broken characters everywhere."""


@pytest.fixture(scope="module")
def server(offline: LLM) -> Iterator[Live]:
    dual = LLM.from_args(offline.args.model_copy(update={"cache": "dual", "max_num_seqs": 1}), offline.loaded)
    with live(service_of(twin(offline), dual)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Live) -> openai.OpenAI:
    return server.client()


def complete(client: openai.OpenAI, prompt: Any, diffusion: dict[str, Any] | None = None, **more: Any) -> Any:
    extra = {"extra_body": {"diffusion": diffusion}} if diffusion is not None else {}
    return client.completions.create(model=MODEL, prompt=prompt, **extra, **more)


def same(choice: Any, answer: Completion) -> None:
    """A choice is the answer that the Python interface gives, token for token."""
    said = choice.message.content if hasattr(choice, "message") else choice.text
    assert said == answer.text
    assert choice.finish_reason == answer.finish_reason
    facts = choice.diffusion
    assert facts["token_ids"] == answer.token_ids
    assert (facts["nfe"], facts["steps"], facts["rows"]) == (answer.nfe, answer.steps, answer.rows)
    assert facts["stop_reason"] == answer.stop_reason


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("diffusion", [{}, {"epsilon": 0.2}, {**WHOLE, "epsilon": 0.5}])
def test_completions_are_the_offline_ones(
    client: openai.OpenAI, offline: LLM, prompt: str, diffusion: dict[str, Any]
) -> None:
    expected = offline.generate(prompt, SamplingParams(max_tokens=20, **diffusion))[0]
    reply = complete(client, prompt, diffusion, max_tokens=20)
    same(reply.choices[0], expected.outputs[0])
    answer = expected.outputs[0]
    assert reply.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert reply.usage.completion_tokens == len(answer.token_ids)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert (reply.usage.nfe, reply.usage.steps, reply.usage.tpf) == (
        answer.nfe, answer.steps, round(answer.tpf, 4),
    )  # fmt: skip
    assert answer.certificate is not None
    assert reply.usage.certificate["total_variation"] == answer.certificate.total_variation
    assert reply.object == "text_completion" and reply.model == MODEL and reply.id.startswith("cmpl-")


def test_a_conversation(client: openai.OpenAI, offline: LLM) -> None:
    expected = offline.chat(TALK, SamplingParams(max_tokens=12))[0].outputs[0]
    for name in ("max_tokens", "max_completion_tokens"):
        reply = client.chat.completions.create(model=MODEL, messages=TALK, **{name: 12})  # type: ignore[call-overload]
        same(reply.choices[0], expected)
        assert reply.choices[0].message.role == "assistant"
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in TALK]
    reply = client.chat.completions.create(model=MODEL, messages=parts, max_tokens=12)  # type: ignore[arg-type]
    same(reply.choices[0], expected)


def test_the_default_length_is_the_models(client: openai.OpenAI, offline: LLM) -> None:
    expected = offline.generate("so", SamplingParams(stop_at_eos=False))[0].outputs[0]
    reply = complete(client, "so", {"stop_at_eos": False})
    same(reply.choices[0], expected)
    assert reply.usage.completion_tokens == 24


def test_the_four_forms_of_a_prompt(client: openai.OpenAI, offline: LLM) -> None:
    params = SamplingParams(max_tokens=8)
    ids = [out.prompt_token_ids for out in offline.generate(PROMPTS, params)]
    expected = [out.outputs[0] for out in offline.generate(PROMPTS, params)]
    for form in (list(PROMPTS), ids):
        reply = complete(client, form, max_tokens=8)
        assert [c.index for c in reply.choices] == list(range(len(PROMPTS)))
        for choice, answer in zip(reply.choices, expected, strict=True):
            same(choice, answer)
        assert reply.usage.prompt_tokens == sum(map(len, ids))
    same(complete(client, ids[2], max_tokens=8).choices[0], expected[2])


def test_n_answers_have_seeds_of_their_own(client: openai.OpenAI, offline: LLM) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.0, top_p=0.9, top_k=40, seed=7, n=3)
    expected = offline.generate(["the cat", "so"], params)
    reply = complete(
        client, ["the cat", "so"], max_tokens=10, temperature=1.0, top_p=0.9, seed=7, n=3,
        extra_body={"top_k": 40},
    )  # fmt: skip
    answers = [answer for out in expected for answer in out.outputs]
    assert [c.index for c in reply.choices] == list(range(6))
    for choice, answer in zip(reply.choices, answers, strict=True):
        same(choice, answer)
    assert len({c.text for c in reply.choices}) > 1
    again = complete(client, "the cat", max_tokens=10, temperature=1.0, top_p=0.9, seed=8,
                     extra_body={"top_k": 40})  # fmt: skip
    assert again.choices[0].text == reply.choices[1].text


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("epsilon", [0.9, 0.2])
def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI, prompt: str, epsilon: float) -> None:
    """The texts hold characters of several bytes, cut by token boundaries, and special tokens."""
    diffusion = {**WHOLE, "epsilon": epsilon}
    whole = complete(client, prompt, diffusion, max_tokens=24)
    chunks = list(
        complete(
            client, prompt, diffusion, max_tokens=24, stream=True, stream_options={"include_usage": True}
        )
    )
    *pieces, last = chunks
    assert "".join(c.choices[0].text for c in pieces) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert last.choices == [] and last.usage == whole.usage
    assert all(c.usage is None for c in pieces)
    assert len({c.id for c in chunks}) == 1
    assert pieces[-1].choices[0].diffusion["token_ids"] == whole.choices[0].diffusion["token_ids"]


def test_a_stream_sends_no_half_character(client: openai.OpenAI, offline: LLM) -> None:
    """☃ is three tokens here; a snowman is sent whole, and what was sent is never taken back."""
    assert offline.tokenizer is not None
    snowman = offline.tokenizer.encode("☃")
    assert len(snowman) > 1
    text = complete(client, "naïve ☃", {**WHOLE, "epsilon": 0.2}, max_tokens=24).choices[0].text
    sent = ""
    for chunk in complete(client, "naïve ☃", {**WHOLE, "epsilon": 0.2}, max_tokens=24, stream=True):
        sent += chunk.choices[0].text
        assert text.startswith(sent)
    assert sent == text


def test_a_chat_streams(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=TALK, max_tokens=12)  # type: ignore[call-overload]
    stream = client.chat.completions.create(model=MODEL, messages=TALK, max_tokens=12, stream=True)  # type: ignore[call-overload]
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(c.object == "chat.completion.chunk" for c in chunks)


def test_several_answers_stream_together(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"max_tokens": 10, "temperature": 1.0, "seed": 3, "n": 3}
    whole = complete(client, ["so", "the"], WHOLE, **asked)
    texts = [""] * 6
    for chunk in complete(client, ["so", "the"], WHOLE, stream=True, **asked):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [c.text for c in whole.choices]


def stops_of(text: str) -> list[str]:
    pieces = {text[i : i + n] for i in range(len(text)) for n in (1, 3)}
    return sorted(p for p in pieces if "\ufffd" not in p and p.strip())[::6]


@pytest.mark.parametrize("prompt", PROMPTS[:3])
def test_stop_strings_wherever_tokens_and_steps_end(client: openai.OpenAI, offline: LLM, prompt: str) -> None:
    whole = complete(client, prompt, WHOLE, max_tokens=20).choices[0].text
    found = stops_of(whole)
    assert found
    for stop in found:
        expected = offline.generate(prompt, SamplingParams(max_tokens=20, stop=stop, **WHOLE))[0].outputs[0]
        choice = complete(client, prompt, WHOLE, max_tokens=20, stop=stop).choices[0]
        same(choice, expected)
        assert choice.text == whole[: whole.index(stop)] and choice.finish_reason == "stop"
        sent = ""
        for chunk in complete(client, prompt, WHOLE, max_tokens=20, stop=[stop], stream=True):
            sent += chunk.choices[0].text
            assert choice.text.startswith(sent), "text behind the stop string was sent"
        assert sent == choice.text


def test_suffix_is_infilling(client: openai.OpenAI, offline: LLM) -> None:
    expected = offline.infill(["the cat", Gap(max_tokens=6), " on the mat"])
    assert expected.spans is not None
    reply = complete(client, "the cat", max_tokens=6, suffix=" on the mat")
    choice = reply.choices[0]
    assert choice.text == expected.spans[0]
    assert choice.diffusion["token_ids"] == expected.outputs[0].token_ids
    assert choice.finish_reason == expected.outputs[0].finish_reason
    pieces = complete(client, "the cat", max_tokens=6, suffix=" on the mat", stream=True)
    assert "".join(c.choices[0].text for c in pieces) == choice.text
    short = complete(
        client, "the cat", suffix=" on the mat", extra_body={"diffusion": {"eos": "suppress_logits"}}
    )
    assert short.usage.completion_tokens == 16


def test_a_template_is_infilling_too(client: openai.OpenAI, offline: LLM) -> None:
    template = "the {{3}} sat {{<=4}}."
    expected = offline.infill(template).outputs[0]
    choice = complete(client, template, {"infill": True}).choices[0]
    assert choice.text == expected.text and choice.diffusion["spans"] == expected.spans
    chunks = complete(client, template, {"infill": True}, stream=True)
    assert "".join(c.choices[0].text for c in chunks) == choice.text


def test_echo(client: openai.OpenAI, offline: LLM) -> None:
    plain = complete(client, "the cat", max_tokens=6).choices[0].text
    assert complete(client, "the cat", max_tokens=6, echo=True).choices[0].text == "the cat" + plain
    assert offline.tokenizer is not None
    ids = offline.tokenizer.encode("the cat")
    assert complete(client, ids, max_tokens=6, echo=True).choices[0].text == "the cat" + plain
    chunks = complete(client, "the cat", max_tokens=6, echo=True, stream=True)
    assert "".join(c.choices[0].text for c in chunks) == "the cat" + plain


def test_logprobs_of_completions(client: openai.OpenAI, offline: LLM) -> None:
    params = SamplingParams(max_tokens=16, logprobs=True, **WHOLE)
    expected = offline.generate("naïve ☃", params)[0].outputs[0]
    reply = complete(client, "naïve ☃", WHOLE, max_tokens=16, logprobs=0)
    found = reply.choices[0].logprobs
    assert found.token_logprobs == pytest.approx(expected.log_probs)
    assert len(found.tokens) == len(found.text_offset) == 16
    text = reply.choices[0].text
    for token, start in zip(found.tokens, found.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert text[start : start + len(token)] == token
    echoed = complete(client, "the cat", WHOLE, max_tokens=4, logprobs=0, echo=True).choices[0].logprobs
    given = len(echoed.tokens) - 4
    assert given > 0 and echoed.token_logprobs[:given] == [None] * given
    chunks = list(complete(client, "naïve ☃", WHOLE, max_tokens=16, logprobs=0, stream=True))
    assert chunks[-1].choices[0].logprobs == found


def test_logprobs_of_chats(client: openai.OpenAI, offline: LLM) -> None:
    expected = offline.chat(TALK, SamplingParams(max_tokens=16, logprobs=True, **WHOLE))[0].outputs[0]
    reply = client.chat.completions.create(  # type: ignore[call-overload]
        model=MODEL,
        messages=TALK,
        max_tokens=16,
        logprobs=True,
        top_logprobs=0,
        extra_body={"diffusion": WHOLE},
    )
    content = reply.choices[0].logprobs.content
    assert [c.logprob for c in content] == pytest.approx(expected.log_probs)
    # The bytes of all tokens are those of the text, although single tokens are parts of characters.
    joined = b"".join(bytes(c.bytes) for c in content).decode("utf-8", "replace")
    assert joined == reply.choices[0].message.content


def test_the_canvas_stream_holds_every_commit(client: openai.OpenAI, offline: LLM) -> None:
    diffusion = {**WHOLE, "stream": "canvas"}
    whole = complete(client, "the cat", WHOLE, max_tokens=16).choices[0]
    chunks = list(complete(client, "the cat", diffusion, max_tokens=16, stream=True))
    start, *steps, end = [c.choices[0].diffusion for c in chunks]
    assert start["event"] == "start" and start["masked"] == [[start["length"] - 16, start["length"]]]
    assert [s["step"] for s in steps] == list(range(1, len(steps) + 1)) and len(steps) == end["steps"]
    committed: dict[int, int] = {}
    for step in steps:
        columns = ("positions", "tokens", "texts", "confidences", "states")
        for pos, token, text, confidence, state in zip(*(step[c] for c in columns), strict=True):
            assert state in ("guess", "committed") and 0 <= confidence <= 1
            assert offline.tokenizer is not None
            assert text == offline.tokenizer.decode([token], skip_special=False)
            if state == "committed":
                assert pos not in committed
                committed[pos] = token
        assert step["passes"][0]["kind"] == "denoise"
    assert [committed[p] for p in sorted(committed)] == end["token_ids"] == whole.diffusion["token_ids"]
    assert "".join(c.choices[0].text for c in chunks) == whole.text


def test_a_request_picks_its_method(client: openai.OpenAI, server: Live, offline: LLM) -> None:
    assert list(server.service.llms) == ["none+threshold", "dual+threshold"]
    dual = offline.with_method("dual", "threshold")
    params = SamplingParams(max_tokens=20, stop_at_eos=False, block_length=10)
    expected = dual.generate("the cat", params)[0].outputs[0]
    options = {"method": "dual+threshold", "block_length": 10, "stop_at_eos": False}
    choice = complete(client, "the cat", options, max_tokens=20).choices[0]
    same(choice, expected)
    assert (
        choice.diffusion["rows"]
        < complete(client, "the cat", {"stop_at_eos": False}, max_tokens=20).choices[0].diffusion["rows"]
    )
    assert server.service.llms["dual+threshold"].loaded is server.service.llms["none+threshold"].loaded


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL and model.methods == ["none+threshold", "dual+threshold"]  # type: ignore[attr-defined]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="nothere"):
        client.models.retrieve("nothere")


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_field"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_field"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_field"),
    ({"logit_bias": {"1": 5}}, "logit_bias", "unsupported_field"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_field"),
    ({"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs", "unsupported_field"),
    ({"extra_body": {"guided_json": {}}}, "guided_json", "unsupported_field"),
    ({"extra_body": {"foo": 1}}, "foo", "unknown_field"),
    ({"extra_body": {"diffusion": {"treshold": 0.9}}}, "diffusion.treshold", "unknown_field"),
    ({"extra_body": {"diffusion": {"epsilon": 1.5}}}, "diffusion.epsilon", "invalid_value"),
    ({"extra_body": {"diffusion": {"gamma": 0.5}}}, "diffusion.gamma", "invalid_value"),
    ({"extra_body": {"diffusion": {"steps": 4}}}, "diffusion.steps", "invalid_value"),
    ({"extra_body": {"diffusion": {"eos": "never"}}}, "diffusion.eos", "invalid_value"),
    ({"extra_body": {"diffusion": {"method": "flash"}}}, "diffusion.method", "invalid_value"),
    ({"extra_body": {"diffusion": {"stream": "canvas"}}}, "diffusion.stream", "invalid_value"),
    ({"extra_body": {"diffusion": {"infill": True}}}, "diffusion.infill", "invalid_value"),
    ({"extra_body": {"diffusion": {"timeout": 10000}}}, "diffusion.timeout", "invalid_value"),
    ({"extra_body": {"stream_options": {"include_usage": True}}}, "stream_options", "invalid_value"),
    ({"temperature": -1}, "temperature", "invalid_value"),
    ({"temperature": "warm"}, "temperature", "invalid_value"),
    ({"top_p": 0.5}, "top_p", "invalid_value"),
    ({"n": 3}, "n", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": 100000}, "max_tokens", "invalid_value"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens", "invalid_value"),
    ({"top_logprobs": 3, "logprobs": True}, "top_logprobs", "invalid_value"),
    ({"seed": -1}, "seed", "invalid_value"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": [1]}, "stop.0", "invalid_value"),
    ({"stop": ["x"] * 33}, "stop", "invalid_value"),
    ({"user": 5}, "user", "invalid_value"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "invalid_value"),
    ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages.0.name", "unsupported_field"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type",
        "invalid_value",
    ),
]


@pytest.mark.parametrize(
    ("fields", "param", "code"), WRONG, ids=[f"{p}-{i}" for i, (_, p, _) in enumerate(WRONG)]
)
def test_what_is_wrong_or_not_supported_is_named(
    client: openai.OpenAI, fields: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, **{**CHAT, **fields})
    assert (caught.value.param, caught.value.code) == (param, code), caught.value.message
    assert param.removeprefix("diffusion.") in caught.value.message
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [999999]}, "999999"),
        ({"prompt": "x " * 400}, "max_model_len"),
        ({"prompt": "x", "suffix": "y", "stop": "z"}, "stop"),
        ({"prompt": "x", "suffix": "y", "echo": True}, "echo"),
        ({"prompt": ["x"], "suffix": "y"}, "suffix"),
        ({"prompt": "x", "logprobs": 5}, "logprobs"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "{{999999999}}", "extra_body": {"diffusion": {"infill": True}}}, "too long"),
        ({"prompt": "{{" + "9" * 5000 + "}}", "extra_body": {"diffusion": {"infill": True}}}, "too long"),
        ({"prompt": "no gap", "extra_body": {"diffusion": {"infill": True}}}, "gap"),
        ({"prompt": ["x"] * 40, "n": 4, "temperature": 1}, "160 answers"),
        ({"prompt": "x", "extra_body": {"diffusion": {"stop_token_ids": list(range(20))}}}, "stop token ids"),
        (
            {"prompt": "x", "extra_body": {"diffusion": {"cfg_scale": 1.0, "method": "dual+threshold"}}},
            "cfg_scale",
        ),
    ],
)
def test_wrong_completions(client: openai.OpenAI, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        client.completions.create(model=MODEL, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none", "frequency_penalty": 0, "response_format": {"type": "text"}},
        {"extra_body": {"stop": None, "logit_bias": None, "functions": None, "seed": None, "diffusion": None}},
        {"extra_body": {"diffusion": {"epsilon": None, "method": None, "stream": None}}},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "refusal": None,
                       "tool_calls": None}, {"role": "user", "content": "hi"}]},
        {"temperature": 0, "n": 1, "top_p": 1, "store": False},
    ],
)  # fmt: skip
def test_neutral_values_ask_for_nothing(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    reply = client.chat.completions.create(model=MODEL, max_tokens=4, **{**CHAT, **fields})
    assert reply.choices[0].finish_reason in ("stop", "length")


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", **CHAT)
    assert caught.value.param == "model" and "gpt-4" in caught.value.message and MODEL in caught.value.message


def test_short_answers_do_not_wait_for_long_ones(offline: LLM) -> None:
    """A slot is refilled as soon as its answer is there, whatever its batch mates do."""
    llm = twin(offline, slots=2)
    stepper = Stepper(llm)
    with live(service_of(llm)) as server:
        whole = {"stop_at_eos": False, "epsilon": 1.0}

        def ask(length: int) -> Any:
            return complete(server.client(), "the cat", whole, max_tokens=length)

        slow, slow_found = in_background(lambda: ask(100))
        until(lambda: server.service.unfinished == 1)
        quick = [in_background(lambda: ask(4)) for _ in range(5)]
        until(lambda: server.service.unfinished == 6)
        until(lambda: stepper.waiting)
        while server.service.unfinished > 1:
            stepper.allow(1)
            assert stepper.done < 60, "the short answers wait"
        for thread, found in quick:
            thread.join(WAIT)
            assert found[0].usage.completion_tokens == 4
        assert slow.is_alive() and not slow_found
        stepper.open()
        slow.join(WAIT)
        assert slow_found[0].usage.completion_tokens == 100


def test_a_checkpoint_without_a_tokenizer(bare_folder: Path) -> None:
    llm = LLM(bare_folder, max_num_seqs=1)
    expected = twin(llm).generate([[5, 6, 7]], SamplingParams(max_tokens=6, logprobs=True))[0].outputs[0]
    with live(service_of(llm)) as server:
        client = server.client()
        choice = complete(client, [5, 6, 7], max_tokens=6, logprobs=0).choices[0]
        assert choice.text == "" and choice.diffusion["token_ids"] == expected.token_ids
        assert choice.logprobs.tokens == [str(t) for t in expected.token_ids]
        chunks = list(
            complete(
                client, [5, 6, 7], max_tokens=6, stream=True, extra_body={"diffusion": {"stream": "canvas"}}
            )
        )
        assert chunks[-1].choices[0].diffusion["token_ids"] == expected.token_ids
        for wrong in ({"prompt": "text"}, {"prompt": [5], "stop": "x"}):
            with pytest.raises(openai.BadRequestError, match="tokenizer"):
                client.completions.create(model=MODEL, **wrong)
        with pytest.raises(openai.BadRequestError, match="chat"):
            client.chat.completions.create(model=MODEL, **CHAT)
