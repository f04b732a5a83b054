"""Facts about a checkpoint without loading it."""

from __future__ import annotations

import json

import huggingface_hub
import pytest
import torch

from flash_dllm.models import SHAPES, ModelError, inspect_checkpoint, memory_estimate


def test_local_checkpoint(tmp_path, make_config, make_tensors, write_checkpoint):
    raw = make_config("llada", torch_dtype="float16")
    facts = inspect_checkpoint(write_checkpoint(tmp_path, raw, make_tensors(raw, torch.bfloat16), n_shards=2))
    parameters = sum(t.numel() for t in make_tensors(raw).values())
    assert facts["family"] == "llada"
    assert facts["parameters"] == parameters
    assert facts["weight_bytes"] == {
        "float32": 4 * parameters,
        "bfloat16": 2 * parameters,
        "float16": 2 * parameters,
    }
    assert facts["stored_bytes"] == {"BF16": 2 * parameters}
    assert facts["dtype"] == "float16"
    # 2 layers, keys and values of 2 heads of 4
    assert facts["kv_bytes_per_position"]["bfloat16"] == 2 * 2 * 2 * 4 * 2
    json.dumps(facts)


def test_local_checkpoint_is_checked(tmp_path, make_config, make_tensors, write_checkpoint):
    raw = make_config("llada")
    tensors = make_tensors(raw)
    tensors.popitem()
    with pytest.raises(ModelError, match="missing tensor"):
        inspect_checkpoint(write_checkpoint(tmp_path, raw, tensors))


def test_hub_checkpoint_fetches_no_weights(tmp_path, make_config, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(make_config("dream")))

    def fetch(repo_id, *, revision, allow_patterns):
        assert not any("safetensors" in p for p in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    facts = inspect_checkpoint("some-org/Dream-7B", revision="abc")
    assert facts["family"] == "dream"
    assert facts["stored_bytes"] is None and facts["dtype"] is None


def test_memory_of_llada_8b():
    parts = memory_estimate(SHAPES["llada-8b"], torch.bfloat16, max_num_seqs=32, max_model_len=1024)
    assert parts["weights"] == 16_031_162_368
    assert parts["kv_cache"] == 16 * 2**30
    assert parts["total"] == sum(v for k, v in parts.items() if k != "total")
    half = memory_estimate(SHAPES["llada-8b"], torch.bfloat16, max_num_seqs=16, max_model_len=1024)
    # 8,192 rows pass at a time, however many there are; a single longer canvas passes whole.
    assert half["activations"] == parts["activations"] == 8192 * 65536 * 2
    few = memory_estimate(SHAPES["llada-8b"], torch.bfloat16, max_num_seqs=4, max_model_len=1024)
    assert few["activations"] * 2 == parts["activations"]
