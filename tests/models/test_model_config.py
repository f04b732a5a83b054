"""config.json: what is accepted, and what is refused with which words."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

from flash_dllm.models import ModelError, family_of


def parse(raw, mask_id=None):
    return family_of(raw, "config.json").parse(raw, "config.json", mask_id)


def test_llada(make_config):
    config = parse(make_config("llada"))
    assert (config.family, config.n_layers, config.head_dim, config.n_kv_heads) == ("llada", 2, 4, 2)
    assert (config.vocab_size, config.n_tokens, config.mask_id, config.eos_ids) == (48, 40, 1, (2,))
    assert config.rope_fp32 and not (config.shift or config.causal or config.qkv_bias or config.tied_head)


def test_dream(make_config):
    config = parse(make_config("dream"))
    assert config.family == "dream"
    assert config.shift and config.qkv_bias and not (config.rope_fp32 or config.causal)


def test_qwen2_is_a_causal_guide_without_a_mask(make_config):
    config = parse(make_config("qwen2"))
    assert config.family == "qwen2"
    assert config.causal and config.tied_head and not config.shift
    assert config.mask_id is None


def test_illada_is_llada_with_mask_5(make_config):
    assert parse(make_config("llada", mask_token_id=5)).mask_id == 5
    assert parse(make_config("llada", mask_token_id=...), mask_id=5).mask_id == 5
    assert parse(make_config("llada", mask_token_id=None), mask_id=5).mask_id == 5


def test_null_kv_heads_and_null_ffn_width_mean_what_the_public_code_means(make_config):
    config = parse(make_config("llada", n_kv_heads=None, mlp_hidden_size=None, mlp_ratio=4))
    assert (config.n_kv_heads, config.d_ffn) == (4, 64)


def test_newer_spellings_of_qwen2(make_config):
    nested = {"rope_theta": 1e6, "rope_type": "default"}
    raw = make_config("qwen2", rope_theta=..., rope_parameters=nested, layer_types=["full_attention"] * 2)
    assert parse(raw).rope_theta == 1e6
    assert parse(make_config("qwen2", eos_token_id=[2, 3], head_dim=8)).eos_ids == (2, 3)


def test_a_window_that_is_switched_off_is_no_window(make_config):
    assert parse(make_config("dream", sliding_window=131072)).family == "dream"


LLADA_REFUSED = {
    "alibi": True,
    "layer_norm_type": "default",
    "activation_type": "swiglu",
    "block_type": "sequential",
    "rope": False,
    "include_bias": True,
    "attention_layer_norm": True,
    "input_emb_norm": True,
    "scale_logits": True,
    "bias_for_layer_norm": True,
    "multi_query_attention": True,
    "layer_norm_with_affine": False,
    "clip_qkv": 8.0,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "tie_word_embeddings": True,
    "n_kv_heads": 3,
    "n_heads": 3,
    "d_model": -16,
    "n_layers": 2.0,
    "rms_norm_eps": "1e-5",
    "rope_theta": float("inf"),
    "mlp_hidden_size": 0,
    "embedding_size": 32,
    "weight_tying": None,
    "include_qkv_bias": 0,
    "mask_token_id": 40,
    "eos_token_id": 99,
    "pad_token_id": "2",
    "vocab_size": True,
}
DREAM_REFUSED = {
    "hidden_act": "gelu",
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6},
    "partial_rotary_factor": 0.5,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention"],
    "use_mrope": True,
    "attention_bias": False,
    "num_key_value_heads": 3,
    "mask_token_id": -1,
    "tie_word_embeddings": "no",
}


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [("llada", k, v) for k, v in LLADA_REFUSED.items()] + [("dream", k, v) for k, v in DREAM_REFUSED.items()],
)
def test_unsupported_value_is_refused_by_name(make_config, family, key, value):
    with pytest.raises(ModelError) as caught:
        parse(make_config(family, **{key: value}))
    named = {"n_heads": "d_model", "rope_parameters": "rope_type"}.get(key, key)
    assert "config.json" in str(caught.value)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


OPTIONAL = {"alibi", "multi_query_attention", "embedding_size", "pad_token_id", "torch_dtype"}
OPTIONAL |= {"bos_token_id", "max_window_layers", "rope_scaling", "sliding_window", "use_sliding_window"}


@pytest.mark.parametrize("family", ["llada", "dream", "qwen2"])
def test_missing_keys_are_errors_and_never_defaults(make_config, family):
    for key in make_config(family):
        raw = make_config(family, **{key: ...})
        if key in OPTIONAL:
            parse(raw)
        else:
            with pytest.raises(ModelError, match=key):
                parse(raw)


def test_a_window_size_without_its_switch_is_refused(make_config):
    with pytest.raises(ModelError, match="use_sliding_window"):
        parse(make_config("dream", sliding_window=128, use_sliding_window=...))


def test_null_mask_id_names_the_way_out(make_config):
    with pytest.raises(ModelError, match=r"mask_token_id = null.*mask_id"):
        parse(make_config("dream", mask_token_id=None))
    with pytest.raises(ModelError, match=r"mask_id = 40 is outside the vocabulary of 40"):
        parse(make_config("dream"), mask_id=40)


def test_a_guide_takes_no_mask_id(make_config):
    with pytest.raises(ModelError, match="mask_id = 1 given for a causal model"):
        parse(make_config("qwen2"), mask_id=1)


def test_odd_head_size_is_refused(make_config):
    with pytest.raises(ModelError, match="head size 3 is odd"):
        parse(make_config("llada", d_model=12))


def test_unknown_key_is_said_not_swallowed(make_config):
    with pytest.warns(UserWarning, match=r"config.json: .*logit_cap = 30"):
        parse(make_config("llada", logit_cap=30))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for family in ("llada", "dream", "qwen2"):
            parse(make_config(family, transformers_version="4.46.3", unknown_but_null=None))


@pytest.mark.parametrize(
    ("architectures", "model_type", "words"),
    [
        (["LLaDAMoEModelLM"], "lladamoe", "not supported yet"),
        (["LLaDA2MoeModelLM"], "llada2_moe", "not supported yet"),
        (["LlamaForCausalLM"], "llama", "LlamaForCausalLM .*is not supported; supported: LLaDAModelLM"),
        (["LLaDAModelLM"], "Dream", "not supported"),
        ([], "llada", "architectures"),
        (None, "llada", "architectures"),
        ([["LLaDAModelLM"]], "llada", "architectures"),
        (["LLaDAModelLM"], None, "model_type"),
    ],
)
def test_unknown_architecture_is_refused(make_config, architectures, model_type, words):
    with pytest.raises(ModelError, match=words):
        parse(make_config("llada", architectures=architectures, model_type=model_type))


def test_import_needs_no_torch():
    code = "import sys, flash_dllm.models; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
