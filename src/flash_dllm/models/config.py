"""What a checkpoint says about its architecture, read without defaults. Knows nothing of torch or tensors."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flash_dllm.errors import FlashDLLMError


class ModelError(FlashDLLMError):
    """Something is wrong with a checkpoint. The message is one line that names file, key and value."""


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of one dense decoder-shaped transformer.

    ``vocab_size`` is the number of rows of the embedding and of the LM head; ``n_tokens <= vocab_size`` of
    them are ids that mean something, the others are padding and must never be produced. ``rope_fp32``: q and
    k are rotated in float32 (LLaDA); otherwise cos and sin are cast to the activation dtype first. ``shift``:
    output i predicts the token at i + 1 (Dream). ``causal``: a left-to-right model (the Qwen2 guide).
    """

    family: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ffn: int
    vocab_size: int
    n_tokens: int
    max_positions: int
    rms_eps: float
    rope_theta: float
    rope_fp32: bool
    qkv_bias: bool
    tied_head: bool
    shift: bool
    causal: bool
    mask_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    bos_id: int | None

    @property
    def qkv_rows(self) -> int:
        """Rows of the packed query, key and value projection."""
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        heads = self.n_heads * self.head_dim
        projections = self.qkv_rows * (self.d_model + self.qkv_bias) + self.d_model * heads
        return projections + 3 * self.d_ffn * self.d_model + 2 * self.d_model

    @property
    def n_parameters(self) -> int:
        """Parameters of the whole model; a tied head counts once."""
        tables = self.vocab_size * self.d_model * (1 if self.tied_head else 2)
        return self.n_layers * self.layer_parameters + tables + self.d_model

    def kv_bytes_per_position(self, itemsize: int) -> int:
        """Bytes of one position's keys and values over all layers, at ``itemsize`` bytes a number."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * itemsize


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ModelError if the file is missing, not UTF-8, not JSON or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ModelError(f"{path}: cannot be read ({exc.strerror or exc})") from exc
    except (ValueError, RecursionError) as exc:
        raise ModelError(f"{path}: not valid UTF-8 JSON ({exc})") from exc
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


# Keys that describe training, bookkeeping or generation defaults: no value of them changes a forward pass.
_HARMLESS = frozenset(
    """
    _attn_implementation_autoset _commit_hash _name_or_path alibi_bias_max architectures attention_dropout
    auto_map block_group_size chunk_size_feed_forward dtype embedding_dropout flash_attention id2label
    init_cutoff_factor init_device init_fn init_std initializer_range is_encoder_decoder label2id
    max_window_layers model_type output_attentions output_hidden_states precision problem_type
    quantization_config residual_dropout return_dict torch_dtype transformers_version use_cache
    """.split()  # noqa: SIM905
)


class ConfigReader:
    """Reads a config.json key by key. No defaults: a missing key is an error unless a call says otherwise."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where
        self._seen: set[str] = set()

    def error(self, key: str, why: str) -> ModelError:
        """The error for ``key``, naming the file and the value found there."""
        found = f"{key} = {json.dumps(self.raw[key])}" if key in self.raw else f"key '{key}' is missing"
        return ModelError(f"{self.where}: {found}{': ' if why else ''}{why}")

    def _get(self, key: str) -> Any:
        self._seen.add(key)
        if key not in self.raw:
            raise self.error(key, "")
        return self.raw[key]

    def integer(self, key: str, minimum: int = 1) -> int:
        """An integer of at least ``minimum``."""
        value = self._get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(key, f"must be an integer of at least {minimum}")
        return value

    def optional_integer(self, key: str, minimum: int = 0) -> int | None:
        """An integer, or None where the key is null or absent."""
        self._seen.add(key)
        return None if self.raw.get(key) is None else self.integer(key, minimum)

    def integer_or_null(self, key: str) -> int | None:
        """A positive integer or null; the key itself must be there."""
        return None if self._get(key) is None else self.integer(key)

    def positive(self, key: str) -> float:
        """A number above zero."""
        value = self._get(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(key, "must be a positive number")
        return float(value)

    def boolean(self, key: str) -> bool:
        """True or false."""
        value = self._get(key)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def only(self, key: str, *allowed: Any, absent: bool = False) -> None:
        """Refuse every value but ``allowed``. ``absent``: the key may be missing, meaning an allowed one."""
        self._seen.add(key)
        if key not in self.raw and absent:
            return
        value = self._get(key)
        # bool is an int in Python: without the type test, 1 would pass for true.
        if not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
            raise self.error(key, f"not supported, only {' or '.join(json.dumps(a) for a in allowed)}")

    def optional_object(self, key: str) -> Mapping[str, Any] | None:
        """A JSON object, or None where the key is null or absent."""
        self._seen.add(key)
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, "must be an object")
        return value

    def skip(self, key: str) -> None:
        """Mark a key as known: no value of it matters next to the other keys that were checked."""
        self._seen.add(key)

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One token id, a list of them or null, each inside the vocabulary."""
        value = self._get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for i in ids:
            if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size:
                raise self.error(key, f"must be token ids inside the vocabulary of {vocab_size}")
        return tuple(ids)

    def mask_id(self, vocab_size: int, override: int | None) -> int:
        """The id of MASK: the argument if given, else ``mask_token_id``, which then must be there."""
        self._seen.add("mask_token_id")
        if override is None and self.raw.get("mask_token_id") is None:
            raise self.error("mask_token_id", "the id of the mask token is needed (or give it as mask_id)")
        value = self.integer("mask_token_id", 0) if override is None else override
        if not 0 <= value < vocab_size:
            source = "mask_token_id" if override is None else "mask_id"
            raise ModelError(f"{self.where}: {source} = {value} is outside the vocabulary of {vocab_size}")
        return value

    def warn_unread(self) -> None:
        """Warn about keys that nobody read and that are not known as harmless: none is ignored silently."""
        unread = sorted(
            k for k in self.raw if k not in self._seen and k not in _HARMLESS and self.raw[k] is not None
        )
        if unread:
            listed = ", ".join(f"{k} = {json.dumps(self.raw[k])}" for k in unread)
            warnings.warn(f"{self.where}: not known to this project and ignored: {listed}", stacklevel=3)


def divide_heads(reader: ConfigReader, d_model: int, n_heads: int, keys: tuple[str, str]) -> int:
    """Head size d_model / n_heads. ``keys`` names the two for the error message."""
    if d_model % n_heads:
        raise reader.error(keys[0], f"not divisible by {keys[1]} = {n_heads}")
    return d_model // n_heads


def check_heads(reader: ConfigReader, config: ModelConfig, kv_key: str) -> ModelConfig:
    """Refuse head counts that do not group and head sizes that cannot be rotated in halves."""
    if config.n_heads % config.n_kv_heads:
        raise reader.error(kv_key, f"does not divide the {config.n_heads} query heads")
    if config.head_dim % 2:
        raise ModelError(
            f"{reader.where}: head size {config.head_dim} is odd, rotary embedding needs an even one"
        )
    return config


_LLADA_8B = ModelConfig(
    family="llada", n_layers=32, d_model=4096, n_heads=32, n_kv_heads=32, head_dim=128, d_ffn=12288,
    vocab_size=126464, n_tokens=126464, max_positions=4096, rms_eps=1e-5, rope_theta=500000.0, rope_fp32=True,
    qkv_bias=False, tied_head=False, shift=False, causal=False,
    mask_id=126336, eos_ids=(126081,), pad_id=126081, bos_id=None,
)  # fmt: skip
_DREAM_7B = ModelConfig(
    family="dream", n_layers=28, d_model=3584, n_heads=28, n_kv_heads=4, head_dim=128, d_ffn=18944,
    vocab_size=152064, n_tokens=152064, max_positions=131072, rms_eps=1e-6, rope_theta=1000000.0,
    rope_fp32=False, qkv_bias=True, tied_head=False, shift=True, causal=False,
    mask_id=151666, eos_ids=(151643,), pad_id=151643, bos_id=151643,
)  # fmt: skip
_LLADA_TINY = replace(
    _LLADA_8B, n_layers=4, d_model=128, n_heads=4, n_kv_heads=4, head_dim=32, d_ffn=256,
    vocab_size=512, n_tokens=512, max_positions=1024, mask_id=511, eos_ids=(510,), pad_id=510,
)  # fmt: skip
_DREAM_TINY = replace(
    _DREAM_7B, n_layers=4, d_model=128, n_heads=4, n_kv_heads=2, head_dim=32, d_ffn=256,
    vocab_size=512, n_tokens=512, max_positions=2048, mask_id=511, eos_ids=(510,), pad_id=510, bos_id=510,
)  # fmt: skip

SHAPES: dict[str, ModelConfig] = {
    "llada-8b": _LLADA_8B,
    "dream-7b": _DREAM_7B,
    "llada-tiny": _LLADA_TINY,
    "llada-tiny-gqa": replace(_LLADA_TINY, n_kv_heads=2),
    "dream-tiny": _DREAM_TINY,
    "qwen2-tiny": replace(_DREAM_TINY, family="qwen2", shift=False, causal=True, mask_id=None),
}
"""Named architectures for random initialisation (measurements and tests that need no checkpoint)."""
