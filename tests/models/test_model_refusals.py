"""Broken checkpoints: each is refused in one line that names the file and the tensor or key."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from flash_dllm.models import ModelError, load_model

NAME = "model.transformer.blocks.1.up_proj.weight"


@pytest.fixture
def refused(tmp_path):
    def check(*words):
        with pytest.raises(ModelError) as caught:
            load_model(tmp_path)
        message = str(caught.value)
        assert "\n" not in message
        for word in words:
            assert word in message

    return check


@pytest.fixture
def tensors(make_config, make_tensors):
    return make_tensors(make_config("llada"))


@pytest.fixture
def save(tmp_path, make_config, write_checkpoint):
    return lambda tensors, n_shards=0: write_checkpoint(tmp_path, make_config("llada"), tensors, n_shards)


@pytest.mark.parametrize("n_shards", [0, 2])
def test_missing_tensor(save, refused, tensors, n_shards):
    del tensors[NAME]
    save(tensors, n_shards)
    refused("missing tensor", NAME)


@pytest.mark.parametrize("n_shards", [0, 2])
def test_unexpected_tensor(save, refused, tensors, n_shards):
    tensors["model.transformer.blocks.1.q_norm.weight"] = torch.ones(4)
    save(tensors, n_shards)
    refused("unexpected tensor", "blocks.1.q_norm.weight", ".safetensors")


def test_tied_head_beside_a_head(tmp_path, make_config, write_checkpoint, refused, tensors):
    write_checkpoint(tmp_path, make_config("llada", weight_tying=True), tensors)
    refused("unexpected tensor", "model.transformer.ff_out.weight")


@pytest.mark.parametrize("shape", [(16, 24), (24, 17), (25, 16), (24 * 16,), (24, 16, 1)])
def test_misshaped_tensor(save, refused, tensors, shape):
    tensors[NAME] = torch.zeros(shape)
    save(tensors)
    refused(NAME, f"has shape {list(shape)}", "expected [24, 16]", "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_wrong_dtype(save, refused, tensors, dtype):
    tensors[NAME] = torch.zeros(24, 16).to(dtype)
    save(tensors)
    refused(NAME, "model.safetensors")


@pytest.mark.parametrize(
    "quantization", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "int8_rows", "x": 1}, {}]
)
def test_other_quantization(tmp_path, make_config, write_checkpoint, refused, quantization):
    write_checkpoint(tmp_path, make_config("llada", quantization_config=quantization))
    refused("quantization_config", "config.json")


def test_tensor_in_two_shards(tmp_path, save, refused, tensors):
    save(tensors, 2)
    second = tmp_path / "model-00002-of-00002.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    held = {n: t for n, t in tensors.items() if index[n] == second.name}
    elsewhere = next(n for n in tensors if index[n] != second.name)
    save_file({**held, elsewhere: tensors[elsewhere]}, second)
    refused(elsewhere, second.name, "also in")


def edit_index(folder, change):
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def test_missing_shard(tmp_path, save, refused, tensors):
    save(tensors, 3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refused("model-00002-of-00003.safetensors", "missing")


def test_index_names_a_tensor_that_its_shard_lacks(tmp_path, save, refused, tensors):
    save(tensors, 2)
    edit_index(tmp_path, lambda m: m.update({"extra.weight": "model-00001-of-00002.safetensors"}))
    refused("missing tensor extra.weight", "model-00001-of-00002.safetensors")


def test_shard_holds_a_tensor_that_the_index_does_not_name(tmp_path, save, refused, tensors):
    save(tensors, 2)
    edit_index(tmp_path, lambda m: m.pop(NAME))
    refused("unexpected tensor", NAME)


def test_index_places_a_tensor_in_the_wrong_shard(tmp_path, save, refused, tensors):
    save(tensors, 2)

    def swap(weight_map):
        weight_map[NAME] = next(s for s in weight_map.values() if s != weight_map[NAME])

    edit_index(tmp_path, swap)
    refused("missing tensor", NAME)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", 7, None])
def test_index_points_out_of_the_folder(tmp_path, save, refused, tensors, shard):
    save(tensors, 2)
    edit_index(tmp_path, lambda m: m.update({NAME: shard}))
    refused(NAME, "not a file name")


@pytest.mark.parametrize("text", ["{", "[]", '{"metadata": {}}', '{"weight_map": []}', '{"weight_map": {}}'])
def test_bad_index(tmp_path, save, refused, tensors, text):
    save(tensors, 2)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refused("model.safetensors.index.json")


def test_single_file_beside_an_index(save, refused, tensors):
    save(tensors, 2)
    save(tensors)
    refused("both model.safetensors and model.safetensors.index.json")


def test_no_weights(tmp_path, save, refused, tensors):
    save(tensors)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    refused("no model.safetensors")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_truncated_file(tmp_path, save, refused, tensors, keep):
    save(tensors)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(str(file), "not a readable safetensors file")


@pytest.mark.parametrize(
    "content", [b"version https://git-lfs.github.com/spec/v1\noid sha256:00", b"\xff" * 64]
)
def test_file_that_is_no_safetensors(tmp_path, save, refused, tensors, content):
    save(tensors)
    (tmp_path / "model.safetensors").write_bytes(content)
    refused("not a readable safetensors file")


def test_trailing_bytes(tmp_path, save, refused, tensors):
    save(tensors)
    with open(tmp_path / "model.safetensors", "ab") as file:
        file.write(b"\0" * 8)
    refused("not a readable safetensors file")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"a": ' + b"[" * 100_000])
def test_bad_config(tmp_path, save, refused, tensors, content):
    save(tensors)
    (tmp_path / "config.json").write_bytes(content)
    refused("config.json")


def test_no_config(tmp_path, refused):
    refused("config.json", "cannot be read")
