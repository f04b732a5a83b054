"""Models: weights, tokenizers and the checkpoints they come from. Names load on first use: torch is slow."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flash_dllm.models.config import SHAPES, ModelConfig, ModelError

if TYPE_CHECKING:
    from flash_dllm.models.inspection import inspect_checkpoint, memory_estimate
    from flash_dllm.models.layers import LayerWeights, Model, random_model, rope_tables
    from flash_dllm.models.load import load_model, resolve
    from flash_dllm.models.tokenizer import (
        StableDecoder,
        Tokenizer,
        load_generation_defaults,
        load_tokenizer,
        stop_ids,
    )

__all__ = [
    "SHAPES",
    "LayerWeights",
    "Model",
    "ModelConfig",
    "ModelError",
    "StableDecoder",
    "Tokenizer",
    "family_of",
    "inspect_checkpoint",
    "load_generation_defaults",
    "load_model",
    "load_tokenizer",
    "memory_estimate",
    "random_model",
    "resolve",
    "rope_tables",
    "stop_ids",
]

_HOME = {
    "LayerWeights": "layers",
    "Model": "layers",
    "random_model": "layers",
    "rope_tables": "layers",
    "load_model": "load",
    "resolve": "load",
    "inspect_checkpoint": "inspection",
    "memory_estimate": "inspection",
    "StableDecoder": "tokenizer",
    "Tokenizer": "tokenizer",
    "load_generation_defaults": "tokenizer",
    "load_tokenizer": "tokenizer",
    "stop_ids": "tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


# (architecture, model_type) as config.json writes them -> module with `parse` and `NAMES`.
FAMILIES = {
    ("LLaDAModelLM", "llada"): "llada",
    ("DreamModel", "Dream"): "dream",
    ("Qwen2ForCausalLM", "qwen2"): "dream",
}
_NOT_YET = {("LLaDAMoEModelLM", "lladamoe"), ("LLaDA2MoeModelLM", "llada2_moe")}


def family_of(raw: Mapping[str, Any], where: str) -> ModuleType:
    """The module that reads checkpoints of config ``raw``, with ``parse(raw, where, mask_id)`` and ``NAMES``.

    Raises ModelError, with the supported architectures, for anything else. ``where`` is named in the error.
    """
    named, model_type = raw.get("architectures"), raw.get("model_type")
    architecture = named[0] if isinstance(named, list) and len(named) == 1 else None
    if not isinstance(architecture, str) or not isinstance(model_type, str):
        found = f"architectures = {named!r}, model_type = {model_type!r}"
        raise ModelError(f"{where}: {found}: must name one architecture and its model type")
    key = (architecture, model_type)
    if key in FAMILIES:
        return import_module(f"{__name__}.{FAMILIES[key]}")
    known = ", ".join(f"{a} ({t})" for a, t in FAMILIES)
    why = "not supported yet" if key in _NOT_YET else "not supported"
    raise ModelError(f"{where}: architecture {key[0]} (model_type {model_type}) is {why}; supported: {known}")
