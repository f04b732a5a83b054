"""Writes a trained model as a Hugging Face folder: int8 rows with scales, configuration, tokenizer,
defaults.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from flash_dllm.train.checkpoint import quantize_rows
from flash_dllm.train.model import Shape
from flash_dllm.train.tokenizer import BOS, EOS, EOT, MASK

_FILES = ("tokenizer.json", "tokenizer_config.json")


def named_weights(shape: Shape, masters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The stacked weights under the family's Hugging Face names, float32 on the CPU."""
    w = {name: tensor.detach().float().cpu() for name, tensor in masters.items()}
    llada = shape.layout == "llada"
    top = (
        ("model.transformer.wte", "model.transformer.ln_f", "model.transformer.ff_out")
        if llada
        else ("model.embed_tokens", "model.norm", "lm_head")
    )
    named = {f"{name}.weight": w[key] for name, key in zip(top, ("embed", "norm", "head"), strict=True)}
    for i in range(shape.layers):
        base = f"model.transformer.blocks.{i}" if llada else f"model.layers.{i}"
        attention = base if llada else f"{base}.self_attn"
        ffn = base if llada else f"{base}.mlp"
        names = (
            ("attn_norm", "ff_norm", "attn_out", "ff_proj", "up_proj", "ff_out")
            if llada
            else (
                "input_layernorm",
                "post_attention_layernorm",
                "o_proj",
                "gate_proj",
                "up_proj",
                "down_proj",
            )
        )
        gate, up = w["gate_up"][i].chunk(2)
        for kind, stack in (("weight", "qkv"), ("bias", "qkv_bias")):
            if stack in w:
                parts = torch.split(w[stack][i], shape.qkv_rows)
                named |= {f"{attention}.{n}_proj.{kind}": p for n, p in zip("qkv", parts, strict=True)}
        owners = (base, base, attention, ffn, ffn, ffn)
        rest = (w["attn_norm"][i], w["ffn_norm"][i], w["out"][i], gate, up, w["down"][i])
        for owner, name, part in zip(owners, names, rest, strict=True):
            named[f"{owner}.{name}.weight"] = part
    return named


def round_to_int8(masters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The stacked weights as the int8 file will give them back (norms and biases unchanged)."""
    rounded = {}
    for name, tensor in masters.items():
        if name.endswith(("norm", "bias")):
            rounded[name] = tensor
        else:
            values, scale = quantize_rows(tensor)
            rounded[name] = values.float() * scale[..., None]
    return rounded


def config(shape: Shape) -> dict[str, Any]:
    """config.json of the layout."""
    common = {
        "vocab_size": shape.vocab,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "bos_token_id": BOS,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.eps,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "int8_rows"},
    }
    if shape.layout == "llada":
        return {
            "architectures": ["LLaDAModelLM"],
            "model_type": "llada",
            **common,
            "mask_token_id": MASK,
            "d_model": shape.d_model,
            "n_layers": shape.layers,
            "n_heads": shape.heads,
            "n_kv_heads": shape.kv_heads,
            "mlp_hidden_size": shape.ffn,
            "mlp_ratio": 4,
            "embedding_size": shape.vocab,
            "max_sequence_length": shape.max_length,
            "layer_norm_type": "rms",
            "activation_type": "silu",
            "block_type": "llama",
            "rope": True,
            "rope_full_precision": True,
            "include_bias": False,
            "include_qkv_bias": False,
            "weight_tying": False,
            "scale_logits": False,
            "input_emb_norm": False,
            "alibi": False,
            "attention_layer_norm": False,
            "block_group_size": 1,
        }
    names = ("DreamModel", "Dream") if shape.layout == "dream" else ("Qwen2ForCausalLM", "qwen2")
    result = {
        "architectures": [names[0]],
        "model_type": names[1],
        **common,
        "hidden_size": shape.d_model,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.ffn,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_length,
        "max_window_layers": shape.layers,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "rope_scaling": None,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
    }
    if shape.layout == "dream":
        result["mask_token_id"] = MASK
    return result


def generation_config(shape: Shape) -> dict[str, Any]:
    """generation_config.json: stop at EOS and EoT, 192 new tokens, blocks of 32, confidence threshold 0.9."""
    values: dict[str, Any] = {
        "bos_token_id": BOS,
        "eos_token_id": [EOS, EOT],
        "pad_token_id": EOS,
        "max_new_tokens": 192,
        "temperature": 0.0,
    }
    if not shape.causal:
        values |= {"mask_token_id": MASK, "block_length": 32, "threshold": 0.9}
    return values


def export(shape: Shape, masters: dict[str, Tensor], folder: Path, tokenizer: Path) -> None:
    """Writes config.json, model.safetensors, generation_config.json and the tokenizer files to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, weight in named_weights(shape, masters).items():
        if weight.dim() == 2:
            tensors[name], tensors[f"{name}.scale"] = (t.contiguous() for t in quantize_rows(weight))
        else:
            tensors[name] = weight.to(torch.float32).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name, values in (
        ("config.json", config(shape)),
        ("generation_config.json", generation_config(shape)),
    ):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    for name in _FILES:
        if (tokenizer / name).resolve() != (folder / name).resolve():
            shutil.copyfile(tokenizer / name, folder / name)
