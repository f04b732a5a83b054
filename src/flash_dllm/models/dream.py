"""Dream-v0-7B and the causal Qwen2 guide: config keys and tensor names, which the two share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flash_dllm.models.config import ConfigReader, ModelConfig, ModelError, check_heads, divide_heads
from flash_dllm.models.layers import TensorNames

NAMES = TensorNames(
    embed="model.embed_tokens",
    norm="model.norm",
    head="lm_head",
    layer="model.layers.{}.",
    attn_norm="input_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    o="self_attn.o_proj",
    ffn_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)


def parse(raw: Mapping[str, Any], where: str, mask_id: int | None = None) -> ModelConfig:
    """The config of a Dream or Qwen2 checkpoint (told apart by ``model_type``); only Dream has a mask id.

    ``where`` is named in errors; ``mask_id`` overrides ``mask_token_id``.
    Raises ModelError, naming key and value, for a missing key or a value that this code does not compute.
    """
    r = ConfigReader(raw, where)
    _refuse_other_architectures(r)
    guide = raw.get("model_type") == "qwen2"
    if guide and mask_id is not None:
        raise ModelError(f"{where}: mask_id = {mask_id} given for a causal model, which has no mask token")
    d_model, n_heads = r.integer("hidden_size"), r.integer("num_attention_heads")
    vocab_size = r.integer("vocab_size")
    head_dim = r.optional_integer("head_dim", 1)
    config = ModelConfig(
        family="qwen2" if guide else "dream",
        n_layers=r.integer("num_hidden_layers"),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=r.integer("num_key_value_heads"),
        head_dim=head_dim or divide_heads(r, d_model, n_heads, ("hidden_size", "num_attention_heads")),
        d_ffn=r.integer("intermediate_size"),
        vocab_size=vocab_size,
        n_tokens=vocab_size,
        max_positions=r.integer("max_position_embeddings"),
        rms_eps=r.positive("rms_norm_eps"),
        rope_theta=_rope_theta(r),
        rope_fp32=False,
        qkv_bias=True,
        tied_head=r.boolean("tie_word_embeddings"),
        shift=not guide,
        causal=guide,
        mask_id=None if guide else r.mask_id(vocab_size, mask_id),
        eos_ids=r.token_ids("eos_token_id", vocab_size),
        pad_id=r.optional_integer("pad_token_id"),
        bos_id=r.optional_integer("bos_token_id"),
    )
    r.warn_unread()
    return check_heads(r, config, "num_key_value_heads")


def _refuse_other_architectures(r: ConfigReader) -> None:
    r.only("hidden_act", "silu")
    r.only("rope_scaling", None, absent=True)
    r.only("partial_rotary_factor", 1, None, absent=True)
    for key in ("use_mrope", "mlp_bias"):
        r.only(key, False, absent=True)
    r.only("attention_bias", True, absent=True)
    # Qwen2.5 configs carry a window size next to use_sliding_window = false; without that key it would count.
    r.only("use_sliding_window", False, absent=r.raw.get("sliding_window") is None)
    r.skip("sliding_window")
    r.only("layer_types", None, ["full_attention"] * r.integer("num_hidden_layers"), absent=True)


def _rope_theta(r: ConfigReader) -> float:
    """``rope_theta``, which transformers 5 writes inside ``rope_parameters``."""
    nested = r.optional_object("rope_parameters")
    if nested is None:
        return r.positive("rope_theta")
    inner = ConfigReader(nested, f"{r.where}, rope_parameters")
    inner.only("rope_type", "default")
    inner.only("partial_rotary_factor", 1, absent=True)
    theta = inner.positive("rope_theta")
    r.only("rope_theta", theta, absent=True)
    return theta
