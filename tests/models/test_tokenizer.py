"""Tokenizers built here, against transformers; chat templates; stop ids; stable streaming of text."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from flash_dllm.models import (
    SHAPES,
    ModelError,
    StableDecoder,
    Tokenizer,
    load_generation_defaults,
    load_tokenizer,
    stop_ids,
)

SPECIAL = [
    "<|endoftext|>",
    "<|mdm_mask|>",
    "<|startoftext|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
]
LLADA_TEMPLATE = (
    "{% for m in messages %}{% if loop.index0 == 0 %}{{ bos_token }}{% endif %}"
    "<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
CHATML = """{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TEXTS = [
    "Hello, world! It's 12345 degrees.",
    "  leading and trailing  \n\n\tlines\r\n",
    "caf\u00e9 cafe\u0301 \u4f60\u597d \U0001f600\U0001f469\u200d\U0001f469",
    "\u0928\u092e\u0938\u094d\u0924\u0947 it'S don'T 3.14 a\u00a0b",
    "<|startoftext|>inside<|eot_id|> text",
    "",
]
CHATS = [
    [{"role": "user", "content": " What is 2+2? "}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye\n\n"},
    ],
]


@cache
def backend_json() -> str:
    """A byte-level BPE of 400 tokens, trained on the texts of this file."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([*TEXTS, CHATML, LLADA_TEMPLATE] * 3, trainer)
    return backend.to_str()


def write_llada(folder: Path, **config) -> Path:
    (folder / "tokenizer.json").write_text(backend_json())
    merged = {
        "add_bos_token": False,
        "bos_token": "<|startoftext|>",
        "eos_token": {"content": "<|endoftext|>", "__type": "AddedToken"},
        "pad_token": "<|endoftext|>",
        "chat_template": LLADA_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(merged))
    return folder


def write_dream(folder: Path, **config) -> Path:
    """Dream's layout: vocab.json, merges.txt and a Python class of its own, no tokenizer.json."""
    vocab = {t: i for t, i in json.loads(backend_json())["model"]["vocab"].items() if t not in SPECIAL}
    vocab = {t: i for i, t in enumerate(sorted(vocab, key=vocab.__getitem__))}
    merges = [" ".join(m) for m in json.loads(backend_json())["model"]["merges"]]
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    merged = {
        "added_tokens_decoder": {str(len(vocab) + i): {"content": n, **flags} for i, n in enumerate(names)},
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "bos_token": None,
        "chat_template": CHATML,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "tokenizer_class": "DreamTokenizer",
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(merged))
    return folder


def assert_same(ours: Tokenizer, theirs) -> None:
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids, skip_special_tokens=False)
    for chat in CHATS:
        rendered = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ours.render_chat(chat) == rendered
        assert ours.apply_chat(chat) == theirs.encode(rendered, add_special_tokens=False)
    assert ours.n_tokens == len(theirs)


def test_llada_layout_equals_transformers(tmp_path):
    from transformers import AutoTokenizer

    folder = write_llada(tmp_path)
    ours = load_tokenizer(folder)
    assert_same(ours, AutoTokenizer.from_pretrained(folder))
    assert ours.apply_chat(CHATS[0])[0] == ours.token_id("<|startoftext|>")
    assert ours.apply_chat(CHATS[1]).count(ours.token_id("<|startoftext|>")) == 1


def test_dream_layout_equals_transformers_qwen2(tmp_path):
    from transformers import Qwen2Tokenizer

    folder = write_dream(tmp_path)
    ours = load_tokenizer(folder)
    assert_same(ours, Qwen2Tokenizer.from_pretrained(folder))
    assert ours.token_id("<|im_end|>") == ours.n_tokens - 2
    assert ours.decode(ours.encode("a<|im_end|>b")) == "ab"


def test_folder_without_tokenizer(tmp_path):
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "tokenizer.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer.json.*'PreTrainedTokenizerFast'"),
        (lambda f: (f / "tokenizer_config.json").write_text("["), "tokenizer_config.json"),
        (lambda f: write_llada(f, chat_template=3), "chat_template"),
        (
            lambda f: write_llada(f, added_tokens_decoder={"9999": {"content": "<x>"}}),
            "'<x>' does not get its id",
        ),
        (lambda f: write_llada(f, added_tokens_decoder={"9999": {}}), "added_tokens_decoder"),
        (lambda f: write_llada(f, added_tokens_decoder={"one": {"content": "<x>"}}), "added_tokens_decoder"),
        (lambda f: write_llada(f, added_tokens_decoder=["<x>"]), "added_tokens_decoder"),
    ],
)
def test_broken_tokenizer_is_refused(tmp_path, change, words):
    change(write_llada(tmp_path))
    with pytest.raises(ModelError, match=words):
        load_tokenizer(tmp_path)


def test_stored_truncation_and_padding_do_not_touch_prompts(tmp_path):
    backend = Backend.from_str(backend_json())
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    tokenizer = Tokenizer(backend)
    text = TEXTS[0]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template_sources(tmp_path):
    folder = write_llada(tmp_path)
    chat = CHATS[0]
    assert (
        load_tokenizer(folder, chat_template="{{ messages[0].content }}").render_chat(chat)
        == chat[0]["content"]
    )
    (tmp_path / "own.jinja").write_text("file {{ eos_token }}")
    assert load_tokenizer(folder, tmp_path / "own.jinja").render_chat(chat) == "file <|endoftext|>"
    with pytest.raises(ModelError, match=r"none\.jinja"):
        load_tokenizer(folder, tmp_path / "none.jinja")
    named = [{"name": "default", "template": "named"}, {"name": "tools", "template": "x"}]
    assert load_tokenizer(write_llada(tmp_path, chat_template=named)).render_chat(chat) == "named"
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert load_tokenizer(folder).render_chat(chat) == "own file"


def test_chat_refusals(tmp_path):
    folder = write_llada(tmp_path)
    plain = load_tokenizer(write_llada(folder, chat_template=None))
    assert not plain.has_chat_template
    with pytest.raises(ModelError, match="no chat template"):
        plain.apply_chat(CHATS[0])
    for template in ("{{ raise_exception('no system role') }}", "{% if %}", "{{ messages[0].a.b }}"):
        with pytest.raises(ModelError, match="chat template: "):
            load_tokenizer(folder, template).apply_chat(CHATS[0])
    for message in ({"role": "user"}, {"role": "user", "content": [1]}):
        with pytest.raises(ModelError, match="needs a role and a content"):
            load_tokenizer(folder, "x").apply_chat([message])


def test_templates_are_sandboxed(tmp_path):
    attack = "{{ messages.__class__.__mro__[-1].__subclasses__() }}"
    with pytest.raises(ModelError, match="chat template"):
        load_tokenizer(write_llada(tmp_path), attack).apply_chat(CHATS[0])


def test_lone_surrogate_is_refused():
    with pytest.raises(ModelError, match="lone surrogate at character 1"):
        Tokenizer(Backend.from_str(backend_json())).encode("a\ud800")


def test_stop_ids(tmp_path):
    tokenizer = load_tokenizer(write_llada(tmp_path))
    config = SHAPES["llada-tiny"]
    assert stop_ids(config) == (510,)
    assert stop_ids(config, tokenizer) == (510, 3)
    assert stop_ids(config, tokenizer, {"eos_token_id": [510, 7]}) == (510, 7, 3)
    assert stop_ids(SHAPES["dream-tiny"], tokenizer) == (510,)
    with pytest.raises(ModelError, match="stop token id 512"):
        stop_ids(config, None, {"eos_token_id": 512})


def test_generation_defaults(tmp_path):
    assert load_generation_defaults(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text(
        '{"steps": 512, "alg_temp": null, "transformers_version": "4", "_from_model_config": true}'
    )
    assert load_generation_defaults(tmp_path) == {"steps": 512}
    file.write_text("nonsense")
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        load_generation_defaults(tmp_path)


def pieces(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip_special: bool) -> list[str]:
    """What a StableDecoder gives when ``ids`` arrive up to each cut, and then the rest."""
    stream = StableDecoder(tokenizer, skip_special)
    out = [stream.push(ids[:cut]) for cut in sorted(cut % (len(ids) + 1) for cut in cuts)]
    return [*out, stream.push(ids), stream.flush(ids)]


CUTS = st.lists(st.integers(0, 200), max_size=12)


@given(st.text(max_size=60), CUTS, st.booleans())
def test_stable_pieces_of_any_text(text, cuts, skip_special):
    tokenizer = Tokenizer(Backend.from_str(backend_json()))
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids, cuts, skip_special)) == tokenizer.decode(ids, skip_special)


@given(st.lists(st.integers(0, 399), max_size=60), CUTS, st.booleans())
def test_stable_pieces_of_any_ids(ids, cuts, skip_special):
    """Ids that a model may produce: broken UTF-8, special tokens in the middle of a character."""
    tokenizer = Tokenizer(Backend.from_str(backend_json()))
    assert "".join(pieces(tokenizer, ids, cuts, skip_special)) == tokenizer.decode(ids, skip_special)


def test_stable_decoder_holds_back_only_the_open_character():
    tokenizer = Tokenizer(Backend.from_str(backend_json()))
    bytes_of = {c: tokenizer.token_id(c) for c in "\u00f0\u0141"}
    assert tokenizer.byte_level and None not in bytes_of.values()
    ids = [*tokenizer.encode("ok"), bytes_of["\u00f0"]]
    stream = StableDecoder(tokenizer)
    assert stream.push(ids) == "ok"
    assert stream.push(ids) == ""
    assert stream.flush(ids) == "\ufffd"


@pytest.mark.parametrize("decoder", [None, decoders.Metaspace(), decoders.ByteFallback()])
def test_stable_decoder_with_other_decoders(decoder):
    words = ["\u2581a", "\u2581b", "<0xE2>", "<0x82>", "<0xAC>", "c"]
    backend = Backend(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="c"))
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = Tokenizer(backend)
    ids = [0, 1, 2, 3, 4, 5, 2, 0]
    given_out = pieces(tokenizer, ids, list(range(9)), True)
    assert "".join(given_out) == tokenizer.decode(ids)


def test_import_needs_no_transformers():
    slow = "{'transformers', 'torch'} & sys.modules.keys()"
    code = f"import sys, flash_dllm.models.tokenizer; sys.exit(bool({slow}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
