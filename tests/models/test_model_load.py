"""Loading: what ends up where, from which files, in which dtype, in how much memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch

from flash_dllm.models import ModelError, load, load_model, resolve


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.tensors(), b.tensors(), strict=True))


@pytest.mark.parametrize("family", ["llada", "dream", "qwen2"])
def test_tensors_are_packed_in_order(tmp_path, make_config, make_tensors, write_checkpoint, family):
    raw = make_config(family)
    tensors = make_tensors(raw)
    model = load_model(write_checkpoint(tmp_path, raw, tensors))
    prefix = "model.transformer.blocks.1." if family == "llada" else "model.layers.1."
    inner = "" if family == "llada" else "self_attn."
    layer = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
    packed = torch.cat([layer[f"{inner}{n}_proj.weight"] for n in "qkv"])
    assert torch.equal(model.layers[1].wqkv, packed)
    gate, up = ("ff_proj", "up_proj") if family == "llada" else ("mlp.gate_proj", "mlp.up_proj")
    assert torch.equal(model.layers[1].w_gate_up, torch.cat([layer[f"{gate}.weight"], layer[f"{up}.weight"]]))
    if family != "llada":
        assert torch.equal(
            model.layers[1].bqkv, torch.cat([layer[f"self_attn.{n}_proj.bias"] for n in "qkv"])
        )
    assert (model.head is model.embed) == (family == "qwen2")
    assert model.n_parameters == model.config.n_parameters == sum(t.numel() for t in tensors.values())


@pytest.mark.parametrize("family", ["llada", "dream", "qwen2"])
@pytest.mark.parametrize("n_shards", [1, 3])
def test_shards_equal_a_single_file(tmp_path, make_config, write_checkpoint, family, n_shards):
    raw = make_config(family)
    single = load_model(write_checkpoint(tmp_path / "single", raw))
    assert same(single, load_model(write_checkpoint(tmp_path / "shards", raw, n_shards=n_shards)))


def test_qkv_bias_of_llada(tmp_path, make_config, write_checkpoint):
    model = load_model(write_checkpoint(tmp_path, make_config("llada", include_qkv_bias=True)))
    assert model.layers[0].bqkv.shape == (model.config.qkv_rows,)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtype(tmp_path, make_config, make_tensors, write_checkpoint, stored):
    raw = make_config("llada", torch_dtype="bfloat16")
    folder = write_checkpoint(tmp_path, raw, make_tensors(raw, stored))
    assert load_model(folder).dtype == torch.bfloat16
    assert load_model(folder, dtype="float32").dtype == torch.float32
    assert load_model(folder, dtype=torch.float16).dtype == torch.float16
    with pytest.raises(ModelError, match="dtype = 'int8'"):
        load_model(folder, dtype="int8")
    with pytest.raises(ModelError, match="dtype = 'float64'"):
        load_model(folder, dtype=torch.float64)


def test_auto_dtype_without_the_key_is_the_stored_one(tmp_path, make_config, make_tensors, write_checkpoint):
    raw = make_config("llada", torch_dtype=...)
    tensors = make_tensors(raw, torch.bfloat16)
    assert load_model(write_checkpoint(tmp_path / "a", raw, tensors)).dtype == torch.bfloat16
    assert (
        load_model(write_checkpoint(tmp_path / "b", {**raw, "dtype": "float16"}, tensors)).dtype
        == torch.float16
    )
    tensors["model.transformer.ln_f.weight"] = tensors["model.transformer.ln_f.weight"].float()
    mixed = write_checkpoint(tmp_path / "c", raw, tensors)
    with pytest.raises(ModelError, match="BF16, F32: name a dtype"):
        load_model(mixed)
    assert load_model(mixed, dtype="float32").dtype == torch.float32
    with pytest.raises(ModelError, match="torch_dtype = 'int4'"):
        load_model(write_checkpoint(tmp_path / "d", {**raw, "torch_dtype": "int4"}, tensors))


def quantized(tensors):
    """The int8_rows form of every matrix, and the tensors that it stands for."""
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2:
            stored[name] = meant[name] = tensor
            continue
        scale = tensor.abs().amax(1) / 127
        stored[name] = (tensor / scale[:, None]).round().to(torch.int8)
        stored[f"{name}.scale"] = scale
        meant[name] = stored[name].float() * scale[:, None]
    return stored, meant


INT8 = {"quantization_config": {"quant_method": "int8_rows"}}


@pytest.mark.parametrize("n_shards", [0, 2])
def test_int8_rows(tmp_path, make_config, make_tensors, write_checkpoint, n_shards):
    raw = make_config("llada")
    stored, meant = quantized(make_tensors(raw))
    model = load_model(write_checkpoint(tmp_path / "a", {**raw, **INT8}, stored, n_shards=n_shards))
    assert same(model, load_model(write_checkpoint(tmp_path / "b", raw, meant)))


def test_int8_rows_refusals(tmp_path, make_config, make_tensors, write_checkpoint):
    raw = make_config("llada")
    name = "model.transformer.blocks.0.q_proj.weight"
    stored, _ = quantized(make_tensors(raw))

    def refused(case, config, tensors, match):
        with pytest.raises(ModelError, match=match):
            load_model(write_checkpoint(tmp_path / case, config, tensors))

    refused("unannounced", raw, stored, "unexpected tensor|dtype I8")
    refused(
        "scale", {**raw, **INT8}, {k: t for k, t in stored.items() if k != f"{name}.scale"}, "missing.*scale"
    )
    refused("shape", {**raw, **INT8}, {**stored, f"{name}.scale": torch.ones(3)}, r"scale has shape \[3\]")
    refused(
        "half", {**raw, **INT8}, {**stored, f"{name}.scale": stored[f"{name}.scale"].half()}, "scale.*F16"
    )
    norm = "model.transformer.ln_f.weight"
    refused("norm", {**raw, **INT8}, {**stored, norm: torch.ones(16, dtype=torch.int8)}, "ln_f.weight")
    refused(
        "stray", {**raw, **INT8}, {**stored, f"{norm}.scale": torch.ones(16)}, "unexpected.*ln_f.weight.scale"
    )


def test_mask_id_override(tmp_path, make_config, make_tensors, write_checkpoint):
    folder = write_checkpoint(
        tmp_path, make_config("llada", mask_token_id=...), make_tensors(make_config("llada"))
    )
    assert load_model(folder, mask_id=5).config.mask_id == 5


def test_hub_id_fetches_only_known_files(tmp_path, make_config, write_checkpoint, monkeypatch):
    folder = write_checkpoint(tmp_path, make_config("dream"))
    calls = []

    def fetch(repo_id, *, revision, allow_patterns):
        calls.append((repo_id, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    model = load_model("some-org/Dream-7B", revision="abc123")
    assert model.config.family == "dream"
    repo_id, revision, patterns = calls[0]
    assert (repo_id, revision) == ("some-org/Dream-7B", "abc123")
    assert "config.json" in patterns and "*.safetensors" in patterns
    assert not any(p.endswith((".py", ".bin")) or p == "*" for p in patterns)


def test_hub_failure_is_one_line(monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no route to host\n\nwith much\nmore text")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError) as caught:
        load_model("some-org/some-model", revision="v2")
    assert "some-org/some-model" in str(caught.value) and "no route to host" in str(caught.value)
    assert "'v2'" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("no-such-folder", "no such folder"),
        (Path("some-org/some-model"), "no such folder"),
        ("../up/and/away", "no such folder"),
        ("flash-dllm/unheard-of", "no such bundled model; there are flash-dllm/tiny-llada"),
    ],
)
def test_unknown_source(source, match):
    with pytest.raises(ModelError, match=match):
        resolve(source)


def test_bundled_names(tmp_path, monkeypatch, make_config, write_checkpoint):
    monkeypatch.setattr(load, "_BUNDLED_ROOT", tmp_path)
    with pytest.raises(ModelError, match="flash-dllm/tiny-dream: not part of this installation"):
        resolve("flash-dllm/tiny-dream")
    write_checkpoint(tmp_path / "tiny-dream", make_config("dream"))
    assert load_model("flash-dllm/tiny-dream").config.family == "dream"
    with pytest.raises(ModelError, match="revision 'v1'"):
        resolve("flash-dllm/tiny-dream", revision="v1")


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="is a file"):
        resolve(tmp_path / "model.safetensors")


@pytest.mark.parametrize("device", ["no-such-device", "cuda:99"])
def test_device_that_is_not_there(tmp_path, make_config, write_checkpoint, device):
    with pytest.raises(ModelError, match=f"device = '{device}'"):
        load_model(write_checkpoint(tmp_path, make_config("llada")), device=device)


def test_model_that_does_not_fit(tmp_path, make_config, write_checkpoint, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(load, "empty_model", full)
    with pytest.raises(ModelError, match=r"0.0 GB in torch.float32 do not fit on device cpu"):
        load_model(write_checkpoint(tmp_path, make_config("llada")))


MEASURE = """
import sys, torch
from pathlib import Path
from flash_dllm.models import load_model
status = lambda key: next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key)) * 1024
load_model(Path(sys.argv[1]) / "small")
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
model = load_model(Path(sys.argv[1]) / "large")
print(status("VmHWM") - before, sum(t.nbytes for t in model.tensors()))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's memory high-water mark")
def test_peak_memory_is_the_weights_and_one_shard(tmp_path, make_config, write_checkpoint):
    write_checkpoint(tmp_path / "small", make_config("llada"), n_shards=2)
    raw = make_config(
        "llada", d_model=512, mlp_hidden_size=2048, n_layers=8, embedding_size=4096, vocab_size=4096
    )
    write_checkpoint(tmp_path / "large", raw, n_shards=8)
    largest = max(f.stat().st_size for f in (tmp_path / "large").glob("*.safetensors"))
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    peak, weights = map(
        int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    )
    assert weights > 100e6 and largest < weights / 5
    assert weights <= peak < weights + largest + 16e6
