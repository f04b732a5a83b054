"""Properties of the reference forward pass, the weights' layout and random models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flash_dllm.models import SHAPES, random_model, rope_tables
from flash_dllm.models.reference import forward, shift_logits

TINY = [name for name in SHAPES if "tiny" in name]


def _ids(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 512, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", TINY)
def test_float32_is_close_to_float64(name: str) -> None:
    model = random_model(SHAPES[name])
    logits = forward(model, _ids(40))
    torch.testing.assert_close(
        logits.double(), forward(model.to(dtype=torch.float64), _ids(40)), atol=1e-3, rtol=0
    )


@pytest.mark.parametrize("name", TINY)
def test_bfloat16_stays_finite_and_near(name: str) -> None:
    model = random_model(SHAPES[name])
    low = forward(model.to(dtype=torch.bfloat16), _ids(40))
    assert low.dtype == torch.bfloat16
    assert (low.float() - forward(model, _ids(40))).abs().median() < 0.5


@pytest.mark.parametrize("name", TINY)
def test_left_padding_changes_no_real_row(name: str) -> None:
    model = random_model(SHAPES[name])
    ids = _ids(30)
    padded = torch.cat([torch.full((1, 7), 510), ids], dim=1)
    mask = torch.cat([torch.zeros(1, 7), torch.ones(1, 30)], dim=1)
    logits = forward(model, padded, mask)
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[:, 7:], forward(model, ids), atol=5e-4, rtol=0)


def test_causal_model_does_not_see_the_future() -> None:
    model = random_model(SHAPES["qwen2-tiny"])
    changed = _ids(20)
    changed[0, 12:] += 1
    torch.testing.assert_close(forward(model, changed % 512)[:, :12], forward(model, _ids(20))[:, :12])


def test_diffusion_model_sees_both_sides() -> None:
    model = random_model(SHAPES["llada-tiny"])
    changed = _ids(20)
    changed[0, 19] = (changed[0, 19] + 1) % 512
    assert (forward(model, changed)[0, 0] - forward(model, _ids(20))[0, 0]).abs().max() > 0.01


def test_logits_depend_on_the_order_of_tokens() -> None:
    model = random_model(SHAPES["dream-tiny"])
    flipped = forward(model, _ids(20).flip(1)).flip(1)
    assert (flipped - forward(model, _ids(20))).abs().max() > 0.1


def test_shift_moves_rows_down_by_one() -> None:
    raw = torch.arange(12.0).view(1, 4, 3)
    assert torch.equal(shift_logits(raw)[0, :, 0], torch.tensor([0.0, 0.0, 3.0, 6.0]))


def test_rope_tables_are_angles_of_position_times_frequency() -> None:
    config = SHAPES["llada-tiny"]
    cos, sin = rope_tables(config, 50)
    assert cos.shape == sin.shape == (50, config.head_dim // 2)
    assert cos.dtype == sin.dtype == torch.float32
    angle = torch.tensor(49 * config.rope_theta ** (-2 * 3 / config.head_dim), dtype=torch.float64)
    assert cos[49, 3].item() == pytest.approx(angle.cos().item(), abs=1e-5)
    assert sin[49, 3].item() == pytest.approx(angle.sin().item(), abs=1e-5)


@pytest.mark.parametrize("name", TINY)
def test_random_model_repeats_and_counts(name: str) -> None:
    model, again = random_model(SHAPES[name], seed=3), random_model(SHAPES[name], seed=3)
    assert all(torch.equal(a, b) for a, b in zip(model.tensors(), again.tensors(), strict=True))
    assert not torch.equal(model.embed, random_model(SHAPES[name], seed=4).embed)
    assert model.n_parameters == SHAPES[name].n_parameters
    assert 2 < forward(model, _ids(20)).std() < 8


def test_tied_head_stays_tied() -> None:
    config = replace(SHAPES["qwen2-tiny"], tied_head=True)
    model = random_model(config).to(dtype=torch.bfloat16)
    assert model.head is model.embed
    assert model.dtype == torch.bfloat16
    assert model.n_parameters == config.n_parameters


def test_published_sizes() -> None:
    assert SHAPES["llada-8b"].n_parameters == 8_015_581_184
    assert SHAPES["llada-8b"].kv_bytes_per_position(2) == 512 * 1024
    assert SHAPES["dream-7b"].n_parameters == 7_615_616_512  # equals Qwen2.5-7B's count
