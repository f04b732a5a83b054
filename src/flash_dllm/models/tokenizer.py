"""Text to token ids and back, chat templates, stop tokens. Knows nothing of weights.

Built on `tokenizers` and `jinja2` directly: both import in 0.07 s where transformers' AutoTokenizer takes 1.9
s, and Dream's checkpoint has no tokenizer.json and names its own Python class, which AutoTokenizer only runs
as remote code. The tests compare ids, texts and rendered templates with transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from flash_dllm.models.config import ModelConfig, ModelError, read_json

# Classes whose vocab.json and merges.txt mean Qwen2's byte-level BPE.
_QWEN2_CLASSES = ("DreamTokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast")
_QWEN2_SPLIT = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_SPECIAL_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token", "cls_token", "sep_token")
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_END_OF_TURN = {"llada": "<|eot_id|>", "dream": "<|im_end|>", "qwen2": "<|im_end|>"}


class Tokenizer:
    """A checkpoint's tokenizer. ``chat_template`` is Jinja source or None."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """``special_tokens`` are the template's variables: ``bos_token`` and its like, by name."""
        # A stored truncation or padding would cut or lengthen prompts.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special = dict(special_tokens or {})
        self.chat_template = chat_template
        self.n_tokens: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        """Ids from here on are beyond the tokenizer and must never be produced."""
        kinds = _decoder_kinds(backend)
        self.byte_level = kinds == {"ByteLevel"}
        self.byte_fallback = "ByteFallback" in kinds

    @property
    def has_chat_template(self) -> bool:
        """Whether ``apply_chat`` works."""
        return self.chat_template is not None

    @property
    def bos_id(self) -> int | None:
        """The token that its files name as the first of a text (``bos_token``), or None."""
        return self.token_id(self._special["bos_token"]) if "bos_token" in self._special else None

    def vocabulary(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        known: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return known

    def token_id(self, token: str) -> int | None:
        """The id of one token spelled as in the vocabulary, or None."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids of ``text``; with ``add_special``, also those that the tokenizer adds by itself."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as exc:
            raise ModelError(f"text is not valid Unicode: lone surrogate at character {exc.start}") from exc
        return list(self._backend.encode(text, add_special_tokens=add_special).ids)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of ``text`` and the characters [start, end) that each stands for."""
        found = self._backend.encode(text, add_special_tokens=False)
        return list(found.ids), list(found.offsets)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ``ids``, exactly: no clean-up of spaces. Incomplete UTF-8 gives U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def apply_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ending where the assistant's answer starts.

        A message has ``role`` and ``content``. Raises ModelError without a template, for a malformed message
        and for whatever the template itself refuses.
        """
        return self.encode(self.render_chat(messages))

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text that ``apply_chat`` encodes."""
        if self.chat_template is None:
            raise ModelError("this model has no chat template; give one, or use a plain prompt")
        for message in messages:
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise ModelError(
                    f"chat message {json.dumps(dict(message))} needs a role and a content, both text"
                )
        return _render(self.chat_template, [dict(m) for m in messages], self._special)


def _decoder_kinds(backend: tokenizers.Tokenizer) -> set[str]:
    decoder = json.loads(backend.to_str())["decoder"]
    if decoder is None:
        return set()
    return {part["type"] for part in decoder.get("decoders", [decoder])}


def _render(template: str, messages: list[dict[str, str]], special: Mapping[str, str]) -> str:
    """Render as transformers does: sandboxed, blocks trimmed, its three helper names defined."""
    from datetime import datetime

    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return env.from_string(template).render(
            messages=messages, add_generation_prompt=True, tools=None, documents=None, **special
        )
    except (TemplateError, TypeError) as exc:
        raise ModelError(f"chat template: {exc}") from exc


def load_tokenizer(folder: Path, chat_template: str | Path | None = None) -> Tokenizer | None:
    """The tokenizer of a model folder, or None if the folder has no tokenizer files.

    ``chat_template`` replaces the checkpoint's own: Jinja source, or the Path of a file that holds it.
    Raises ModelError for files that cannot be read and for tokenizers that only remote code could run.
    """
    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file) if config_file.exists() else {}
    backend = _backend(folder, config)
    if backend is None:
        return None
    _add_tokens(backend, config, config_file)
    if isinstance(chat_template, Path):
        chat_template = _read_text(chat_template)
    return Tokenizer(backend, chat_template or _own_template(folder, config), _special_tokens(folder, config))


def _backend(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer | None:
    single, vocab, merges = (folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))
    try:
        if single.exists():
            return tokenizers.Tokenizer.from_file(str(single))
        if vocab.exists() and merges.exists() and config.get("tokenizer_class") in _QWEN2_CLASSES:
            return _qwen2(vocab, merges)
    except Exception as exc:  # tokenizers raises plain Exception
        raise ModelError(f"{folder}: the tokenizer cannot be read ({exc})") from exc
    found = [
        p.name
        for p in (vocab, merges, folder / "tokenizer_config.json", folder / "tokenizer.model")
        if p.exists()
    ]
    if not found:
        return None
    raise ModelError(
        f"{folder}: no tokenizer.json, and {', '.join(found)} with tokenizer_class ="
        f" {config.get('tokenizer_class')!r} cannot be read without remote code"
    )


def _qwen2(vocab: Path, merges: Path) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocab), str(merges)))
    backend.normalizer = tokenizers.normalizers.NFC()
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_QWEN2_SPLIT), "isolated")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], where: Path) -> None:
    """Add the tokens of tokenizer_config.json that the vocabulary lacks, at the ids that it names."""
    try:
        listed = {int(i): dict(token) for i, token in (config.get("added_tokens_decoder") or {}).items()}
        contents = {i: str(listed[i].pop("content")) for i in sorted(listed)}
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise ModelError(f"{where}: key 'added_tokens_decoder' cannot be read ({exc})") from exc
    for token_id, content in contents.items():
        flags = {k: bool(v) for k, v in listed[token_id].items() if k in _TOKEN_FLAGS}
        # Adding a special token again marks it as special, which tokenizer.json may have left out.
        if backend.token_to_id(content) is None or flags.get("special"):
            backend.add_tokens([tokenizers.AddedToken(content, **flags)])
        if backend.token_to_id(content) != token_id:
            raise ModelError(f"{where}: added token {content!r} does not get its id {token_id}")


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    map_file = folder / "special_tokens_map.json"
    merged = {**(read_json(map_file) if map_file.exists() else {}), **config}
    found = {}
    for key in _SPECIAL_KEYS:
        value = merged.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[key] = value
    return found


def _own_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return _read_text(file)
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelError(
            f"{folder / 'tokenizer_config.json'}: key 'chat_template' must be text or a list of named texts"
        )
    return template


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as exc:
        raise ModelError(f"{file}: cannot be read ({exc.strerror or exc})") from exc
    except UnicodeDecodeError as exc:
        raise ModelError(f"{file}: not valid UTF-8 ({exc})") from exc


class StableDecoder:
    """Text of a growing prefix of ids, in pieces that later ids cannot change.

    The pieces and the final ``flush`` concatenated equal ``tokenizer.decode`` of all ids. A character whose
    bytes are not all there is held back. (Exact for byte-level BPE, which every supported family uses; a
    tokenizer with byte fallback rewrites earlier text, so with one everything is held back until ``flush``.)
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._start = 0  # ids before this one are given out and end at a character boundary
        self._given = 0  # characters given out of the text from there on

    def push(self, ids: Sequence[int]) -> str:
        """New stable text for the whole committed prefix ``ids``, which extends that of the last call."""
        if self._tokenizer.byte_fallback:
            return ""
        text = self._text(ids)
        stable = text.rstrip("\ufffd")
        piece = stable[self._given :]
        self._given = len(stable)
        # Bytes of byte-level tokens simply concatenate, so decoding can restart at any character boundary;
        # other decoders treat the first token differently.
        if self._tokenizer.byte_level and len(stable) == len(text):
            self._start, self._given = len(ids), 0
        return piece

    def flush(self, ids: Sequence[int]) -> str:
        """The rest, for the final ids."""
        return self._text(ids)[self._given :]

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids[self._start :], self._skip_special)


def load_generation_defaults(folder: Path) -> dict[str, Any]:
    """What generation_config.json says, without nulls and bookkeeping; empty if there is no such file."""
    file = folder / "generation_config.json"
    raw = read_json(file) if file.exists() else {}
    return {
        k: v
        for k, v in raw.items()
        if v is not None and k != "transformers_version" and not k.startswith("_")
    }


def stop_ids(
    config: ModelConfig,
    tokenizer: Tokenizer | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Ids that end an answer by default: EOS of config and ``generation_config``, then the end of a turn.

    The end of a turn is looked up in the tokenizer. Raises ModelError for an id outside the vocabulary.
    """
    named = (generation_config or {}).get("eos_token_id", [])
    ids = [*config.eos_ids, *(named if isinstance(named, list) else [named])]
    end_of_turn = tokenizer.token_id(_END_OF_TURN[config.family]) if tokenizer else None
    if end_of_turn is not None:
        ids.append(end_of_turn)
    for i in ids:
        if not isinstance(i, int) or not 0 <= i < config.vocab_size:
            raise ModelError(f"stop token id {i!r} is outside the vocabulary of {config.vocab_size}")
    return tuple(dict.fromkeys(ids))
