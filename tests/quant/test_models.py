"""Whole models in 8 bits."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from flash_dllm import LLM, SamplingParams
from flash_dllm.core.cache import KVCache
from flash_dllm.models.config import ModelError
from flash_dllm.models.layers import MATRICES, Model
from flash_dllm.models.load import Form, load_model, resolve
from flash_dllm.models.reference import forward
from flash_dllm.quant import QuantizedWeight, allocator, check_device, quantized
from flash_dllm.quant.weights import QuantizationError

from ..checkpoints import write_checkpoint
from ..commands import Run
from ..goldens.harness import golden_model

PROMPTS = [[5, 9, 300, 41], [7] * 17, [1, 2, 3, 4, 5, 6, 7, 8, 9]]
FULL = SamplingParams(max_tokens=12, stop_at_eos=False, stop_token_ids=())
KINDS = ("int8", "fp8")


def load(folder: Path | str, kind: str, **options: Any) -> Model:
    return load_model(folder, form=Form(lambda device: allocator(kind, device)), **options)


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, FULL, use_tqdm=False)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("folder", ["llada-tiny-gqa", "dream-tiny"])
def test_loading_is_quantising(golden_dir: Path, folder: str, kind: str) -> None:
    plain, ours = golden_model(golden_dir / folder), load(golden_dir / folder, kind)
    theirs = quantized(plain, kind)
    assert ours.n_parameters == plain.n_parameters == theirs.n_parameters
    for a, b in zip(ours.tensors(), theirs.tensors(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a.float(), b.float())
    assert ours.embed.dtype == ours.head.dtype == ours.dtype == torch.float32
    assert torch.equal(ours.embed, plain.embed) and torch.equal(ours.head, plain.head)
    matrices = sum(getattr(layer, m).numel() for layer in plain.layers for m in MATRICES)
    rows = sum(getattr(layer, m).shape[0] for layer in plain.layers for m in MATRICES)
    assert plain.nbytes - ours.nbytes == 3 * matrices - 4 * rows, "one byte for four, and a scale a row"


def test_no_full_matrix_is_kept(golden_dir: Path) -> None:
    config = golden_model(golden_dir / "llada-tiny").config
    big = config.d_model * config.d_ffn
    before = {id(t) for t in gc.get_objects() if isinstance(t, torch.Tensor)}
    model = load(golden_dir / "llada-tiny", "int8")
    gc.collect()
    new = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and id(t) not in before]
    full = [t for t in new if t.is_floating_point() and t.numel() >= big and t.data_ptr() not in
            (model.embed.data_ptr(), model.head.data_ptr())]  # fmt: skip
    assert model.layers and not full


@pytest.mark.parametrize("kind", KINDS)
def test_logits_against_the_rounded_weights(golden_dir: Path, kind: str) -> None:
    """int8 rounds weights only, so a plain model with the rounded weights gives the same; fp8 rounds rows too."""
    plain, ours = golden_model(golden_dir / "dream-tiny"), load(golden_dir / "dream-tiny", kind)
    rounded = quantized(plain, kind)
    for layer in rounded.layers:
        for name in MATRICES:
            setattr(layer, name, getattr(layer, name).dequantize())
    ids = torch.tensor([PROMPTS[1]])
    mine, theirs, exact = (forward(m, ids) for m in (ours, rounded, plain))
    if kind == "int8":
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert 0 < float((mine - exact).abs().mean()) < 0.1 * float(exact.abs().mean())


def test_bundled_weights_lose_nothing_in_int8() -> None:
    """They are stored in int8 with a scale a row, and the same integers come back."""
    model = load("flash-dllm/tiny-dream", "int8", dtype="float32")
    folder = resolve("flash-dllm/tiny-dream")
    with safe_open(folder / "model.safetensors", "pt") as file:
        for index, layer in enumerate(model.layers):
            stored = [
                file.get_tensor(f"model.layers.{index}.self_attn.{part}_proj.weight")
                for part in ("q", "k", "v")
            ]
            assert torch.equal(layer.wqkv.data, torch.cat(stored))
            down = file.get_tensor(f"model.layers.{index}.mlp.down_proj.weight")
            assert down.dtype == torch.int8 and torch.equal(layer.w_down.data, down)


CASES = [
    {"quantization": "int8"},
    {"quantization": "fp8"},
    {"kv_cache_dtype": "fp8"},
    {"quantization": "fp8", "kv_cache_dtype": "fp8"},
]


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize(
    ("cache", "decoding"),
    [pytest.param("none", "branch", marks=pytest.mark.slow), ("dual", "threshold"), ("flash", "verify")],
)
def test_an_answer_does_not_depend_on_its_mates(
    golden_dir: Path, options: dict[str, Any], cache: str, decoding: str
) -> None:
    three = LLM(golden_dir / "dream-tiny", device="cpu", dtype="float32", max_num_seqs=3, **options)
    llm = three.with_method(cache, decoding)
    together = answers(llm)
    assert [answers(llm, [p])[0] for p in PROMPTS] == together
    plain = LLM(golden_dir / "dream-tiny", device="cpu", dtype="float32", cache=cache, decoding=decoding)
    assert answers(plain) != together or options == {"quantization": "int8"}, (
        "rounding shows in a random model"
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", ["dllm-cache", "elastic", "dynamic", "prefix"])
def test_every_loop_takes_quantised_weights(golden_dir: Path, cache: str, kind: str) -> None:
    llm = LLM(golden_dir / "llada-tiny", device="cpu", cache=cache, decoding="threshold", quantization=kind)
    out = llm.generate(PROMPTS, FULL, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in out] == [12] * 3


def test_the_cache_is_smaller(golden_dir: Path) -> None:
    plain = LLM(golden_dir / "llada-tiny", device="cpu", dtype="float32", max_model_len=64)
    small = LLM(
        golden_dir / "llada-tiny", device="cpu", dtype="float32", max_model_len=64, kv_cache_dtype="fp8"
    )
    caches: list[KVCache] = [llm.engine.decoder.ctx.kv for llm in (plain, small)]
    assert caches[1].keys[0].dtype == caches[1].values[3].dtype == torch.float8_e4m3fn
    assert caches[0].nbytes == 4 * caches[1].nbytes
    caches[1].reserve(20)
    assert caches[1].base == 21 and caches[1].keys[0].dtype == torch.float8_e4m3fn


def test_what_is_read_is_what_was_rounded(golden_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over float8 keys and values is attention over plain ones that hold the rounded numbers."""
    from flash_dllm.core import forward as module

    real, compared = module.attend, 0

    def attend(ctx: Any, q: torch.Tensor, kv: Any, *rest: Any) -> torch.Tensor:
        nonlocal compared
        compared += 1
        assert kv[0].dtype == torch.float8_e4m3fn
        out = real(ctx, q, kv, *rest)
        assert torch.equal(out, real(ctx, q, tuple(t.float() for t in kv), *rest[:2]))
        return out

    monkeypatch.setattr(module, "attend", attend)
    llm = LLM(golden_dir / "dream-tiny", device="cpu", dtype="float32", kv_cache_dtype="fp8")
    for cache, decoding in (("dual", "threshold"), ("flash", "verify"), ("none", "branch")):
        answers(llm.with_method(cache, decoding))
    assert compared > 100


@pytest.mark.parametrize("cache", ["dllm-cache", "dynamic", "elastic"])
def test_caches_that_compare_refuse_float8(golden_dir: Path, cache: str) -> None:
    llm = LLM(golden_dir / "llada-tiny", device="cpu", kv_cache_dtype="fp8")
    with pytest.raises(ModelError, match=f"kv_cache_dtype='fp8': cache='{cache}' compares"):
        llm.with_method(cache, "threshold")


def test_bad_weights_and_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_checkpoint(tmp_path, text=False)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.transformer.blocks.1.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for kind in KINDS:
        with pytest.raises(
            ModelError, match=r"blocks\.1\.up_proj\.weight: holds NaN or infinity.* in " + kind
        ):
            load(folder, kind)
    with pytest.raises(QuantizationError, match="device 'mps' has no float8; use int8"):
        check_device("fp8", "mps")
    check_device("int8", "mps")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(
        QuantizationError, match=r"needs compute capability 8\.9 or later .*A100 has 8\.0; use int8"
    ):
        check_device("fp8", "cuda")


def test_the_command_line(chat_folder: Path, run: Run) -> None:
    plain = run("generate", "-m", str(chat_folder), "--device", "cpu", "the cat")
    ours = run(
        "generate",
        "-m",
        str(chat_folder),
        "--device",
        "cpu",
        "--quantization",
        "fp8",
        "--kv-cache-dtype",
        "fp8",
        "the cat",
    )
    assert plain.code == ours.code == 0, ours.err
    bad = run("generate", "-m", str(chat_folder), "--quantization", "int4", "the cat")
    assert bad.code == 2 and "quantization='int4'" in bad.err


def test_a_quantised_weight_says_what_it_is() -> None:
    weight = QuantizedWeight.empty("int8", (4, 8), "cpu")
    assert weight.shape == (4, 8) and weight.device.type == "cpu" and weight.kind == "int8"
