"""The Triton kernels of 8-bit matrices against their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flash_dllm.kernels.linear import quantize_fp8, quantize_int8
from flash_dllm.kernels.linear import triton8 as kernels
from flash_dllm.kernels.linear.triton import Tiles

from ..interpreter import repair
from .test_numbers import rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Tiles(16, 16, 16, 4, 1, 1)


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> None:
    repair()


@given(
    count=st.integers(1, 40), depth=st.sampled_from([16, 40, 64]), width=st.sampled_from([17, 48]),
    bias=st.booleans(),
)  # fmt: skip
def test_int8_products(count: int, depth: int, width: int, bias: bool) -> None:
    x, weight = rows(count, (count, depth), 0.3).to(DEVICE), rows(depth, (width, depth), 0.3).to(DEVICE)
    data, scale = quantize_int8(weight)
    added = torch.randn(width, device=DEVICE) if bias else None
    exact = x.double() @ (data.double() * scale.double()[:, None]).T + (
        0 if added is None else added.double()
    )
    ours = kernels.int8_linear(x, data, scale, added, SMALL)
    size = x.double().abs() @ (data.double().abs() * scale.double()[:, None]).T + 1
    assert ((ours.double() - exact).abs() <= 4 * torch.finfo(torch.float32).eps * size).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int8_products_in_half_precision(dtype: torch.dtype) -> None:
    x, weight = rows(1, (33, 64), 0.3).to(DEVICE, dtype), rows(2, (48, 64), 0.3).to(DEVICE)
    data, scale = quantize_int8(weight)
    exact = x.double() @ (data.double() * scale.double()[:, None]).T
    ours = kernels.int8_linear(x, data, scale, None, SMALL)
    assert ours.dtype == dtype
    assert (
        (ours.double() - exact).abs() <= torch.finfo(dtype).eps * (exact.abs() + 1e-3 * exact.abs().max())
    ).all()


@given(count=st.integers(1, 9), width=st.sampled_from([16, 33, 512]), spread=st.floats(0, 3))
def test_rows_to_fp8_bit_for_bit(count: int, width: int, spread: float) -> None:
    x = rows(count, (count, width), spread).to(DEVICE)
    x[0] = 0
    for given_rows in (x, x.bfloat16(), x.t().contiguous().t()):
        ours, theirs = kernels.quantize_fp8(given_rows), quantize_fp8(given_rows)
        assert torch.equal(ours[0].view(torch.uint8), theirs[0].view(torch.uint8))
        assert torch.equal(ours[1], theirs[1])


def test_a_row_that_is_not_finite_shows() -> None:
    x = torch.randn(4, 32, device=DEVICE)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    data, scale = kernels.quantize_fp8(x)
    back = data.float() * scale[:, None]
    assert back.isfinite().all(1).tolist() == [True, False, False, True]


def test_no_rows() -> None:
    data, scale = quantize_int8(torch.randn(8, 16, device=DEVICE))
    assert kernels.int8_linear(torch.empty(0, 16, device=DEVICE), data, scale, None).shape == (0, 8)
    assert kernels.quantize_fp8(torch.empty(0, 16, device=DEVICE))[0].shape == (0, 16)
