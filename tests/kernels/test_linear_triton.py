"""Triton's matrix product against float64, and its rows in any company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flash_dllm.kernels.linear import linear
from flash_dllm.kernels.linear import triton as kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def operands(rows: int, depth: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    made = torch.Generator(device=DEVICE).manual_seed(rows)
    shapes = ((rows, depth), (width, depth), (width,))
    x, w, b = (torch.randn(shape, generator=made, device=DEVICE) for shape in shapes)
    return tuple(t.to(dtype) for t in (x, w * depth**-0.5, b))


def check(rows: int, depth: int, width: int, dtype: torch.dtype, impl: str, bias: bool) -> None:
    x, w, b = operands(rows, depth, width, dtype)
    exact = x.double() @ w.double().T + (b.double() if bias else 0)
    plain = (linear(x, w, b if bias else None).double() - exact).abs()
    error = (linear(x, w, b if bias else None, impl).double() - exact).abs()
    assert error.max() <= 2 * plain.max() + torch.finfo(dtype).eps


@given(
    st.integers(1, 70), st.sampled_from([16, 40]), st.sampled_from([17, 64]), st.booleans(),
    st.sampled_from(["triton", "invariant"]),
)  # fmt: skip
def test_products(rows: int, depth: int, width: int, bias: bool, impl: str) -> None:
    check(rows, depth, width, torch.float32, impl, bias)


@pytest.mark.parametrize("impl", ["triton", "invariant"])
def test_half_precision(impl: str) -> None:
    check(33, 64, 48, torch.bfloat16, impl, True)


def test_tiles_in_groups_cover_every_output() -> None:
    x, w, _ = operands(50, 32, 70, torch.float32)
    tiles = kernel.Tiles(16, 16, 16, group=3)
    assert torch.allclose(kernel.matmul(x, w, None, False, tiles), x @ w.T, atol=1e-5)
    assert kernel.matmul(x[:0], w, None, True).shape == (0, 70)


def test_a_quantised_matrix_multiplies_in_its_own_way_only() -> None:
    from flash_dllm.quant.weights import QuantizedWeight

    x, w, _ = operands(3, 16, 16, torch.float32)
    packed = QuantizedWeight.__new__(QuantizedWeight)
    with pytest.raises(ValueError, match="'invariant'"):
        linear(x, packed, None, "invariant")
    with pytest.raises(ValueError, match="'fast'"):
        linear(x, w, None, "fast")


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "invariant"])
@pytest.mark.parametrize("rows", [1, 17, 128, 2048])
@pytest.mark.parametrize("shape", [(4096, 12288), (12288, 4096), (4096, 24576)])
def test_at_the_sizes_of_real_models(impl: str, rows: int, shape: tuple[int, int]) -> None:
    check(rows, *shape, torch.bfloat16, impl, False)


@pytest.mark.gpu
def test_a_row_has_the_same_bits_in_any_company() -> None:
    x, w, _ = operands(2048, 4096, 4096, torch.bfloat16)
    whole = linear(x, w, None, "invariant")
    for rows in (1, 16, 100, 1000):
        assert torch.equal(linear(x[5 : 5 + rows], w, None, "invariant"), whole[5 : 5 + rows])
