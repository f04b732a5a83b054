"""The tokenizer: round trips, single digits, special ids, the chat template, determinism."""

from __future__ import annotations

import json

import pytest

from flash_dllm.train.tasks import FAMILIES, make, render
from flash_dllm.train.tokenizer import (
    BOS,
    EOS,
    EOT,
    HEADER_END,
    HEADER_START,
    MASK,
    SPECIAL,
    VOCAB_SIZE,
    bundled_folder,
    load_tokenizer,
    train_tokenizer,
)

TOKENIZER = load_tokenizer(bundled_folder())


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(family: str) -> None:
    for seed in range(50):
        text = make(family, seed, "heldout").answer_text
        ids = TOKENIZER.encode(text, add_special_tokens=False).ids
        assert TOKENIZER.decode(ids) == text


def test_any_bytes_round_trip() -> None:
    text = "Zażółć gęślą jaźń — 日本語 🙂\t\r\n  x"
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False).ids) == text


def test_vocabulary() -> None:
    assert TOKENIZER.get_vocab_size() == VOCAB_SIZE
    assert [TOKENIZER.token_to_id(t) for t in SPECIAL] == [EOS, MASK, BOS, EOT, HEADER_START, HEADER_END]
    assert [TOKENIZER.token_to_id(t) for t in SPECIAL] == list(range(6))


def test_digits_are_single_tokens_and_indentation_is_one() -> None:
    digits = [token for token in TOKENIZER.get_vocab() if any(c in "0123456789" for c in token)]
    assert sorted(digits) == list("0123456789")
    assert len(TOKENIZER.encode("\n    ", add_special_tokens=False).ids) == 1


def test_chat_template_renders_what_training_renders() -> None:
    jinja2 = pytest.importorskip("jinja2")
    config = json.loads((bundled_folder() / "tokenizer_config.json").read_text(encoding="utf-8"))
    messages = (("user", "What is 2 + 3?"), ("assistant", "It is 5."), ("user", "And 4?"))
    turns = [{"role": role, "content": text} for role, text in messages]
    template = jinja2.Environment().from_string(config["chat_template"])
    assert template.render(messages=turns) == render(messages)


def test_a_turn_costs_ten_tokens() -> None:
    ids = TOKENIZER.encode(render((("user", ""),)), add_special_tokens=False).ids
    assert len(ids) == 10


def test_training_is_deterministic() -> None:
    one, two = (train_tokenizer(300, 512).to_str() for _ in range(2))
    assert one == two
