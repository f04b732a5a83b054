"""Streams of a text that is known beforehand: characters of several tokens, stop strings, the order of commits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
import torch

from flash_dllm import LLM
from tests.serve.support import MODEL, live, service_of, twin

TEXT = "naïve ☃ und ☃☃ für Öl, 日本語 1 + 2"


class Script:
    """Makes an engine write a given text, from left to right or in the order that the model's confidences give."""

    def __init__(self, llm: LLM, text: str, in_order: bool) -> None:
        assert llm.tokenizer is not None
        self.ids = torch.tensor(llm.tokenizer.encode(text))
        decoder = llm.engine.decoder
        plain = decoder._read

        def read(hidden: Any, cand: Any, lanes: Any) -> Any:
            draft = plain(hidden, cand, lanes)
            place = (cand.pos - decoder.state.first[:, None]).clamp(0, len(self.ids) - 1)
            sure = 0.9 / (1 + place) if in_order else draft.prob
            return replace(draft, token=self.ids[place], prob=sure, confidence=sure)

        decoder._read = read  # type: ignore[method-assign]


@pytest.fixture(scope="module", params=[True, False], ids=["in order", "any order"])
def scripted(offline: LLM, request: pytest.FixtureRequest) -> Iterator[tuple[openai.OpenAI, int]]:
    """A client of a server that answers :data:`TEXT`, and the number of its tokens."""
    llm = twin(offline)
    script = Script(llm, TEXT, request.param)
    with live(service_of(llm)) as server:
        yield server.client(), len(script.ids)


def pieces(client: openai.OpenAI, tokens: int, **more: Any) -> list[str]:
    stream = client.completions.create(
        model=MODEL, prompt="x", max_tokens=tokens, stream=True,
        extra_body={"diffusion": {"stop_at_eos": False, "epsilon": more.pop("epsilon", 1.0)}}, **more,
    )  # fmt: skip
    return [chunk.choices[0].text for chunk in stream]


def test_the_text_has_characters_of_several_tokens(offline: LLM) -> None:
    assert offline.tokenizer is not None
    for char in "☃日":
        assert len(offline.tokenizer.encode(char)) > 1
        assert "\ufffd" in offline.tokenizer.decode(offline.tokenizer.encode(char)[:1])


@pytest.mark.parametrize("epsilon", [1.0, 0.5, 0.1])
def test_no_piece_holds_half_a_character(scripted: tuple[openai.OpenAI, int], epsilon: float) -> None:
    client, tokens = scripted
    found = pieces(client, tokens, epsilon=epsilon)
    assert "".join(found) == TEXT
    assert not any("\ufffd" in piece for piece in found)
    assert sum(bool(piece) for piece in found) > 1, "nothing was streamed before the end"


@pytest.mark.parametrize("length", [1, 2, 4, 6])
@pytest.mark.parametrize("epsilon", [1.0, 0.2])
def test_stop_strings_in_and_across_characters_of_several_tokens(
    scripted: tuple[openai.OpenAI, int], length: int, epsilon: float
) -> None:
    client, tokens = scripted
    for start in range(0, len(TEXT) - length, 3):
        stop = TEXT[start : start + length]
        found = pieces(client, tokens, stop=stop, epsilon=epsilon)
        assert "".join(found) == TEXT[: TEXT.index(stop)], stop
        assert not any("\ufffd" in piece for piece in found)


def test_what_only_looks_like_a_stop_string_comes_later(scripted: tuple[openai.OpenAI, int]) -> None:
    """Held back while it may be one, sent once it is none."""
    client, tokens = scripted
    assert "".join(pieces(client, tokens, stop=["☃☃☃", "für Oel", "1 + 3", "2\n"])) == TEXT


@pytest.fixture(scope="module")
def bundled() -> Iterator[tuple[openai.OpenAI, LLM]]:
    llm = LLM("flash-dllm/tiny-dream", device="cpu", max_num_seqs=4, max_model_len=256)
    with live(service_of(llm)) as server:
        yield server.client(), twin(llm)


def test_the_bundled_model(bundled: tuple[openai.OpenAI, LLM]) -> None:
    """Real weights, of a shifted model: whole, streamed, sampled, stopped, filled in, as offline."""
    from flash_dllm import Gap, SamplingParams

    client, llm = bundled
    talk: Any = [{"role": "user", "content": "What is 12 + 7?"}]
    expected = llm.chat(talk, SamplingParams(max_tokens=32))[0].outputs[0]
    asked: dict[str, Any] = {"model": MODEL, "messages": talk, "max_tokens": 32}
    choice = client.chat.completions.create(**asked).choices[0]
    assert (choice.message.content, choice.finish_reason) == (expected.text, "stop") and "19" in expected.text
    assert choice.diffusion["token_ids"] == expected.token_ids  # type: ignore[attr-defined]
    streamed = client.chat.completions.create(**asked, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == expected.text

    params = SamplingParams(max_tokens=32, temperature=1.0, seed=3, n=2)
    several = client.chat.completions.create(**asked, temperature=1.0, seed=3, n=2).choices
    assert [c.message.content for c in several] == [a.text for a in llm.chat(talk, params)[0].outputs]

    stopped = client.chat.completions.create(**asked, stop="=").choices[0].message.content
    assert stopped == expected.text[: expected.text.index("=")]

    given = "Karl has a purple ring. The ring of Karl is"
    filled = client.completions.create(model=MODEL, prompt=given, suffix=".", max_tokens=2).choices[0].text
    assert llm.infill([given, Gap(max_tokens=2), "."]).spans == [filled]
