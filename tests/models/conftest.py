"""Small checkpoints on disk, whole or broken, for the tests of the loader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flash_dllm.models import family_of

LLADA = {
    "activation_type": "silu",
    "alibi": False,
    "architectures": ["LLaDAModelLM"],
    "block_type": "llama",
    "d_model": 16,
    "embedding_size": 48,
    "eos_token_id": 2,
    "include_bias": False,
    "include_qkv_bias": False,
    "layer_norm_type": "rms",
    "mask_token_id": 1,
    "max_sequence_length": 64,
    "mlp_hidden_size": 24,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": 4,
    "n_kv_heads": 2,
    "n_layers": 2,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-5,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "vocab_size": 40,
    "weight_tying": False,
}
DREAM = {
    "architectures": ["DreamModel"],
    "bos_token_id": 2,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 24,
    "mask_token_id": 1,
    "max_position_embeddings": 64,
    "max_window_layers": 2,
    "model_type": "Dream",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_sliding_window": False,
    "vocab_size": 40,
}
QWEN2 = {
    **{k: v for k, v in DREAM.items() if k != "mask_token_id"},
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "tie_word_embeddings": True,
}
CONFIGS = {"llada": LLADA, "dream": DREAM, "qwen2": QWEN2}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """A valid config.json of a family; a change to ``...`` removes the key."""
    merged = {**CONFIGS[family], **changes}
    return {k: v for k, v in merged.items() if v is not ...}


def tensors_of(raw: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Random tensors of the names and shapes that a checkpoint with this config holds."""
    from flash_dllm.models.layers import tensor_map

    family = family_of(raw, "test")
    slots = tensor_map(family.parse(raw, "test"), family.NAMES)
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(slot.shape, generator=generator).to(dtype) for name, slot in slots.items()}


def write(
    folder: Path, raw: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None, n_shards: int = 0
) -> Path:
    """Write a checkpoint: one file, or an index and ``n_shards`` shards with the tensors dealt in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = tensors_of(raw) if tensors is None else tensors
    if not n_shards:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {
        n: f"model-{i % n_shards + 1:05}-of-{n_shards:05}.safetensors" for i, n in enumerate(tensors)
    }
    for shard in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == shard}, folder / shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def make_config() -> Callable[..., dict[str, Any]]:
    return config_of


@pytest.fixture
def make_tensors() -> Callable[..., dict[str, torch.Tensor]]:
    return tensors_of


@pytest.fixture
def write_checkpoint() -> Callable[..., Path]:
    return write
