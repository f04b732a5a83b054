"""Stop strings are cut exactly, wherever tokens and steps end; streamed pieces add up to the text."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash_dllm import LLM, FlashDLLMError, SamplingParams
from flash_dllm.outputs import StreamEvent

PROMPTS = ("the cat", "1 + 2 =", "naïve ☃", "so", "ein Öl")


@pytest.fixture(scope="module")
def llm(chat_folder: Path) -> LLM:
    return LLM(chat_folder, max_num_seqs=2)


def full_text(llm: LLM, prompt: str, **kw: object) -> str:
    params = SamplingParams(max_tokens=24, stop_at_eos=False, skip_special_tokens=False, **kw)  # type: ignore[arg-type]
    return llm.generate(prompt, params)[0].text


def stops_of(text: str) -> list[str]:
    """Every piece of 1 to 4 characters that is no replacement character."""
    pieces = {text[i : i + n] for i in range(len(text)) for n in (1, 2, 4)}
    return sorted(p for p in pieces if "\ufffd" not in p and p)[::5]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("epsilon", [0.9, 0.1])
def test_stop_strings_are_cut_exactly(llm: LLM, prompt: str, epsilon: float) -> None:
    text = full_text(llm, prompt, epsilon=epsilon)
    assert llm.tokenizer is not None
    for stop in stops_of(text):
        params = SamplingParams(
            max_tokens=24, stop_at_eos=False, skip_special_tokens=False, stop=stop, epsilon=epsilon
        )
        answer = llm.generate(prompt, params)[0].outputs[0]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        assert answer.text == text[: text.index(stop)]
        whole = llm.tokenizer.decode(answer.token_ids, skip_special=False)
        assert text.startswith(whole) and len(whole) <= len(answer.text)
        streamed = list(llm.stream(prompt, params))
        assert "".join(e.text for e in streamed) == answer.text


def test_the_first_of_several_stop_strings_ends_the_answer(llm: LLM) -> None:
    text = full_text(llm, "the cat")
    stops = [s for s in stops_of(text) if len(s) == 1][:3]
    params = SamplingParams(max_tokens=24, stop_at_eos=False, skip_special_tokens=False, stop=tuple(stops))
    answer = llm.generate("the cat", params)[0].outputs[0]
    assert answer.text == text[: min(text.index(s) for s in stops)]


def test_a_stop_string_ends_the_work_early(llm: LLM) -> None:
    text = full_text(llm, "the cat")
    stop = next(c for c in text if c != "\ufffd")
    params = SamplingParams(max_tokens=24, stop_at_eos=False, skip_special_tokens=False)
    whole = llm.generate("the cat", params)[0].outputs[0]
    cut = llm.generate("the cat", params.model_copy(update={"stop": (stop,)}))[0].outputs[0]
    assert cut.nfe < whole.nfe


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("skip", [True, False])
def test_pieces_join_to_the_text(llm: LLM, prompt: str, skip: bool) -> None:
    params = SamplingParams(max_tokens=24, stop_at_eos=False, skip_special_tokens=skip)
    events = list(llm.stream(prompt, params))
    output = llm.generate(prompt, params)[0]
    assert events[-1].output is not None
    assert "".join(e.text for e in events) == events[-1].output.text == output.text
    committed = {p: t for e in events for p, t in zip(e.positions, e.tokens, strict=True)}
    start = len(output.prompt_token_ids)
    assert [committed[start + i] for i in range(24)] == output.canvas_ids[start:]
    assert all(e.output is None for e in events[:-1])
    assert [e.step for e in events[:-1]] == list(range(1, len(events)))


def test_guesses_are_no_commits(llm: LLM) -> None:
    events = list(llm.stream("the cat", SamplingParams(max_tokens=24, stop_at_eos=False)))
    assert any(e.guesses for e in events)
    for event in events:
        assert not {p for p, _, _ in event.guesses} & set(event.positions)


def test_closing_a_stream_frees_its_slot(llm: LLM) -> None:
    stream = llm.stream("the cat", SamplingParams(max_tokens=24))
    assert isinstance(next(stream), StreamEvent)
    stream.close()  # type: ignore[attr-defined]
    assert llm.engine.idle


def test_a_stream_and_a_batch_share_the_engine(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, stop_at_eos=False)
    alone = llm.generate(["the cat", "so"], params)
    stream = llm.stream("the cat", params)
    events = [next(stream)]
    between = llm.generate("so", params)[0]
    events += list(stream)
    assert between.text == alone[1].text
    assert "".join(e.text for e in events) == alone[0].text
    assert sum(len(e.positions) for e in events) == 20
    assert llm.engine.idle


def test_a_stream_has_one_answer(llm: LLM) -> None:
    with pytest.raises(FlashDLLMError, match="n=2"):
        list(llm.stream("x", SamplingParams(n=2, temperature=1.0)))


def test_a_conversation_streams(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hello"}]
    params = SamplingParams(max_tokens=6)
    assert "".join(e.text for e in llm.stream(talk, params)) == llm.chat(talk, params)[0].text


def test_an_answer_has_no_text_behind_its_stop_token_even_where_decoding_goes_on(llm: LLM) -> None:
    """Whole, streamed and with a stop string that only stands behind it."""
    ids = llm.generate("Say it.", SamplingParams(max_tokens=24, stop_at_eos=False))[0].canvas_ids[-24:]
    stop = ids[len(ids) // 2]
    first = ids.index(stop)
    params = SamplingParams(
        max_tokens=24, stop_at_eos=False, stop_token_ids=(stop,), skip_special_tokens=False
    )
    whole = llm.generate("Say it.", params)[0].outputs[0]
    assert whole.token_ids == ids[:first]
    events = list(llm.stream("Say it.", params))
    assert "".join(event.text for event in events) == whole.text
    assert llm.tokenizer is not None
    behind = llm.tokenizer.decode(ids[first + 1 :], False)
    hidden = next((piece for piece in behind if piece.strip() and piece not in whole.text), None)
    if hidden is not None:
        cut = llm.generate("Say it.", params.model_copy(update={"stop": (hidden,)}))[0].outputs[0]
        assert cut.text == whole.text and cut.stop_reason != hidden
