"""A small random checkpoint with a tokenizer and a chat template, for tests that need text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from flash_dllm.models import family_of
from flash_dllm.models.layers import tensor_map

SPECIAL = (
    "<|endoftext|>",
    "<|mdm_mask|>",
    "<|startoftext|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
)
EOS, MASK, BOS, EOT = range(4)
TEMPLATE = (
    "{{ '<|startoftext|>' }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n"
)
CORPUS = [
    "the cat sat on the mat and the dog ran to the house",
    "ein Fünfer für Öl ☃ naïve",
    "1 + 2 = 3\nso 4",
] * 8


def tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE with a few dozen merges."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def config(vocab: int, **changes: Any) -> dict[str, Any]:
    values = {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "activation_type": "silu",
        "alibi": False,
        "block_type": "llama",
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 2,
        "mlp_hidden_size": 48,
        "embedding_size": vocab,
        "vocab_size": vocab,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "mask_token_id": MASK,
        "include_bias": False,
        "include_qkv_bias": False,
        "layer_norm_type": "rms",
        "rms_norm_eps": 1e-5,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": 10000.0,
        "max_sequence_length": 256,
        "weight_tying": False,
        "torch_dtype": "float32",
        "multi_query_attention": None,
    }
    return {k: v for k, v in {**values, **changes}.items() if v is not ...}


def write_checkpoint(
    folder: Path, *, text: bool = True, max_new_tokens: int | None = 24, **changes: Any
) -> Path:
    """A model folder. Its weights are random but large, so that the model is sure of some tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizer()
    raw = config(made.get_vocab_size(), **changes)
    (folder / "config.json").write_text(json.dumps(raw))
    family = family_of(raw, "test")
    slots = tensor_map(family.parse(raw, "test"), family.NAMES)
    generator = torch.Generator().manual_seed(1)
    tensors = {n: 0.35 * torch.randn(s.shape, generator=generator) for n, s in slots.items()}
    tensors = {n: torch.ones_like(t) if t.dim() == 1 else t for n, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if text:
        made.save(str(folder / "tokenizer.json"))
        settings = {"chat_template": TEMPLATE, "bos_token": SPECIAL[BOS], "eos_token": SPECIAL[EOS]}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if max_new_tokens:
        (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": max_new_tokens}))
    return folder
