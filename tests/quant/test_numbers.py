"""Rounding to 8 bits against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_dllm.kernels.linear import from_fp8, linear, nbytes, quantize_fp8, quantize_int8, to_fp8
from flash_dllm.kernels.linear.hopper import scaled_linear
from flash_dllm.kernels.linear.ref import fp8_linear, int8_linear
from flash_dllm.quant import QuantizedWeight

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANTIZE = {"int8": quantize_int8, "fp8": quantize_fp8}


def rows(seed: int, shape: tuple[int, int], spread: float = 1.0) -> Tensor:
    """Gaussian numbers whose rows differ in size by powers of ten, with a few large ones."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=made) * 10 ** (spread * torch.randn(shape[0], 1, generator=made))
    return torch.where(torch.rand(shape, generator=made) < 0.01, 30 * x, x)


def made(kind: str, weight: Tensor) -> QuantizedWeight:
    out = QuantizedWeight.empty(kind, tuple(weight.shape), "cpu")  # type: ignore[arg-type]
    out.write(0, weight)
    return out


def loss(kind: str, x: Tensor, scale: Tensor) -> Tensor:
    """The most that rounding may change each of ``x`` [N, d], float64."""
    scale = scale.double()[:, None]
    if kind == "int8":
        return (scale / 2 * 1.001).expand_as(x)
    return torch.maximum(x.double().abs() / 16, scale / 1024) * 1.001


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), spread=st.floats(0, 3), kind=st.sampled_from(("int8", "fp8")))
def test_rounding_stays_within_its_bound(seed: int, spread: float, kind: str) -> None:
    x = rows(seed, (7, 33), spread)
    data, scale = QUANTIZE[kind](x)
    back = data.double() * scale.double()[:, None]
    assert ((back - x.double()).abs() <= loss(kind, x, scale)).all()
    assert (data.float().abs().amax(1) == {"int8": 127, "fp8": 448}[kind]).all(), "the whole range is used"


@pytest.mark.parametrize("kind", QUANTIZE)
def test_zeros_and_rows_of_their_own(kind: str) -> None:
    x = rows(0, (6, 16))
    x[2] = 0
    data, scale = QUANTIZE[kind](x)
    assert scale[2] == 1 and not data[2].float().any()
    for row in range(6):
        alone, its = QUANTIZE[kind](x[row : row + 1])
        assert torch.equal(alone.float()[0], data[row].float()) and its[0] == scale[row]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", QUANTIZE)
def test_products_against_float64(kind: str, dtype: torch.dtype) -> None:
    """Against the exact weights within the rounding of the inputs; against the rounded ones within float32's."""
    weight, bias = rows(1, (48, 64), 0.3), torch.randn(48).to(dtype)
    x = rows(2, (9, 64), 0.3).to(dtype)
    stored = made(kind, weight)
    ours = linear(x, stored, bias)
    assert ours.dtype == dtype and ours.shape == (9, 48)
    wide = x.double()
    weight_loss = loss(kind, weight, stored.scale)
    row_loss = torch.zeros_like(wide)
    if kind == "fp8":
        row_loss = loss("fp8", wide, quantize_fp8(x)[1])
    bound = wide.abs() @ weight_loss.T + row_loss @ (weight.double().abs() + weight_loss).T
    exact = wide @ weight.double().T + bias.double()
    # What is left is the rounding of sums and of the result: a few of the dtype's steps.
    step = torch.finfo(dtype).eps * (wide.abs() @ (weight.double().abs() + weight_loss).T + 1)
    assert ((ours.double() - exact).abs() <= bound + 4 * step).all()
    if kind == "int8":
        rounded = wide @ stored.dequantize().double().T + bias.double()
    else:
        data, scale = quantize_fp8(x)
        rounded = (data.double() * scale.double()[:, None]) @ stored.dequantize().double().T + bias.double()
    assert ((ours.double() - rounded).abs() <= 4 * step).all()


def test_how_much_is_lost() -> None:
    """Relative error of a product of Gaussian matrices: int8 about 1 %, fp8 about 4 %. Both are far from nothing."""
    weight, x = torch.randn(256, 512), torch.randn(64, 512)
    exact = x.double() @ weight.double().T
    for kind, low, high in (("int8", 0.003, 0.015), ("fp8", 0.02, 0.05)):
        off = linear(x, made(kind, weight)).double() - exact
        assert low < float(off.square().mean().sqrt() / exact.square().mean().sqrt()) < high


@pytest.mark.parametrize("kind", QUANTIZE)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_spoils_no_other(kind: str, bad: float) -> None:
    weight, x = torch.randn(16, 32), torch.randn(5, 32)
    good = linear(x, made(kind, weight))
    x[3, 4] = bad
    out = linear(x, made(kind, weight))
    assert not out[3].isfinite().any()
    keep = [0, 1, 2, 4]
    assert torch.equal(out[keep], good[keep])


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_sums_do_not_overflow(dtype: torch.dtype) -> None:
    weight, x = torch.full((4, 4096), 0.5), torch.full((2, 4096), 1.0, dtype=dtype)
    assert torch.equal(linear(x, made("int8", weight)).float(), torch.full((2, 4), 2048.0))


def test_the_call_of_the_scaled_product() -> None:
    """The same call that a GPU gets; torch has it on the CPU too, in recent versions."""
    weight, bias = rows(5, (48, 64), 0.3), torch.randn(48).bfloat16()
    x = rows(6, (16, 64), 0.3).bfloat16()
    stored = made("fp8", weight)
    try:
        ours = scaled_linear(x, stored.data, stored.scale, bias)
    except (RuntimeError, NotImplementedError) as exc:
        pytest.skip(f"no scaled product on this CPU: {exc}")
    theirs = fp8_linear(x, stored.data, stored.scale, bias)
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * float(theirs.abs().max()))
    assert float((ours.float() - theirs.float()).abs().mean()) < 0.004 * float(theirs.float().abs().mean())


def test_keys_and_values_saturate() -> None:
    x = torch.tensor([1e4, -500.0, 448.0, 0.1, float("nan")])
    back = from_fp8(to_fp8(x), x)
    assert back[:3].tolist() == [448.0, -448.0, 448.0]
    assert abs(float(back[3]) - 0.1) <= 0.1 / 16 and back[4].isnan()
    assert from_fp8(x, x) is x


def test_bytes_and_slices() -> None:
    weight = torch.randn(48, 64)
    for kind in QUANTIZE:
        stored = made(kind, weight)
        assert nbytes(stored) == 48 * 64 + 48 * 4 and nbytes(weight) == 48 * 64 * 4
        assert stored.numel() == weight.numel()
        part = stored[-16:]
        assert part.data.data_ptr() == stored.data[-16:].data_ptr()
        assert torch.equal(linear(weight, part), linear(weight, stored)[:, -16:])
        moved = stored.to("cpu", torch.bfloat16)
        assert moved.kind == kind and moved.scale.dtype == torch.float32


@pytest.mark.parametrize("kind", QUANTIZE)
def test_any_number_of_dimensions(kind: str) -> None:
    stored, x = made(kind, torch.randn(16, 32)), rows(3, (24, 32), 2.0)
    assert torch.equal(linear(x.view(4, 6, 32), stored), linear(x, stored).view(4, 6, 16))


def test_int8_linear_does_not_touch_its_inputs() -> None:
    x, data, scale = torch.randn(3, 8), torch.ones(4, 8, dtype=torch.int8), torch.ones(4)
    before = (x.clone(), data.clone(), scale.clone())
    int8_linear(x, data, scale, None)
    assert all(torch.equal(a, b) for a, b in zip((x, data, scale), before, strict=True))
