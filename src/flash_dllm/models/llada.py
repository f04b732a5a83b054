"""LLaDA-8B, LLaDA-1.5 and iLLaDA-8B, differing in weights and mask id only: config keys and tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flash_dllm.models.config import ConfigReader, ModelConfig, ModelError, check_heads, divide_heads
from flash_dllm.models.layers import TensorNames

# In a block ff_proj is the gate and ff_out the down projection; the LM head has the leaf name ff_out as well.
NAMES = TensorNames(
    embed="model.transformer.wte",
    norm="model.transformer.ln_f",
    head="model.transformer.ff_out",
    layer="model.transformer.blocks.{}.",
    attn_norm="attn_norm",
    q="q_proj",
    k="k_proj",
    v="v_proj",
    o="attn_out",
    ffn_norm="ff_norm",
    gate="ff_proj",
    up="up_proj",
    down="ff_out",
)


def parse(raw: Mapping[str, Any], where: str, mask_id: int | None = None) -> ModelConfig:
    """The config of a LLaDA checkpoint. Errors name ``where``; ``mask_id`` overrides ``mask_token_id``.

    Raises ModelError, naming key and value, for a missing key or a value that this code does not compute.
    """
    r = ConfigReader(raw, where)
    _refuse_other_architectures(r)
    d_model, n_heads = r.integer("d_model"), r.integer("n_heads")
    n_tokens, rows = r.integer("vocab_size"), r.optional_integer("embedding_size", 1)
    vocab_size = rows or n_tokens
    if vocab_size < n_tokens:
        raise r.error("embedding_size", f"smaller than vocab_size = {n_tokens}")
    config = ModelConfig(
        family="llada",
        n_layers=r.integer("n_layers"),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=r.integer_or_null("n_kv_heads") or n_heads,
        head_dim=divide_heads(r, d_model, n_heads, ("d_model", "n_heads")),
        d_ffn=_ffn_width(r, d_model),
        vocab_size=vocab_size,
        n_tokens=n_tokens,
        max_positions=r.integer("max_sequence_length"),
        rms_eps=r.positive("rms_norm_eps"),
        rope_theta=r.positive("rope_theta"),
        rope_fp32=r.boolean("rope_full_precision"),
        qkv_bias=r.boolean("include_qkv_bias"),
        tied_head=r.boolean("weight_tying"),
        shift=False,
        causal=False,
        mask_id=r.mask_id(n_tokens, mask_id),
        eos_ids=r.token_ids("eos_token_id", n_tokens),
        pad_id=r.optional_integer("pad_token_id"),
        bos_id=r.optional_integer("bos_token_id"),
    )
    r.warn_unread()
    return check_heads(r, config, "n_kv_heads")


def _refuse_other_architectures(r: ConfigReader) -> None:
    # The public config class can describe any OLMo-like model, and its class defaults are not LLaDA's:
    # keys whose default is another architecture must be there.
    r.only("block_type", "llama")
    r.only("layer_norm_type", "rms")
    r.only("activation_type", "silu")
    r.only("rope", True)
    r.only("include_bias", False)
    for key in ("alibi", "attention_layer_norm", "input_emb_norm", "scale_logits"):
        r.only(key, False, absent=True)
    r.only("bias_for_layer_norm", False, None, absent=True)
    r.only("multi_query_attention", False, None, absent=True)
    r.only("layer_norm_with_affine", True, absent=True)
    for key in ("clip_qkv", "rope_scaling", "sliding_window"):
        r.only(key, None, absent=True)
    # Describes the norm of queries and keys, which attention_layer_norm = false leaves out.
    r.skip("attention_layer_norm_with_affine")
    r.only("tie_word_embeddings", r.raw.get("weight_tying"), absent=True)


def _ffn_width(r: ConfigReader, d_model: int) -> int:
    ratio = r.optional_integer("mlp_ratio", 1)
    width = r.integer_or_null("mlp_hidden_size")
    if width is None and ratio is None:
        raise ModelError(f"{r.where}: mlp_hidden_size = null needs the key 'mlp_ratio'")
    return width or d_model * (ratio or 1)
