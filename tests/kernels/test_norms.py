"""RMSNorm and the gated activation: the Triton kernels against the definitions, wherever they run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_dllm.kernels.choice import choose
from flash_dllm.kernels.rms_norm import rms_norm
from flash_dllm.kernels.rms_norm import triton as norm_kernel
from flash_dllm.kernels.silu_mul import silu_mul
from flash_dllm.kernels.silu_mul import triton as gate_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
WIDTHS = [1, 3, 16, 100, 257, 1500, 3584]


pytestmark = [
    pytest.mark.usefixtures("poisoned_outputs"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def randn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


def exact_gate(packed: Tensor) -> Tensor:
    gate, up = packed.double().chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def within_twice(out: Tensor, plain: Tensor, exact: Tensor) -> bool:
    """Errors at most twice those of the plain computation in the same dtype."""
    mine, theirs = ((t.double() - exact).abs() for t in (out, plain))
    # Where the plain computation happens to be exact, one rounding of the largest number is allowed.
    floor = torch.finfo(out.dtype).eps * exact.abs().max()
    return bool(mine.max() <= 2 * theirs.max() + floor)


def check_norm(rows: int, width: int, dtype: torch.dtype, add: bool, seed: int = 0) -> None:
    x, delta = (randn(rows, width, dtype=dtype, seed=seed + i) for i in range(2))
    weight = randn(width, dtype=dtype, seed=seed + 2)
    change = delta if add else None
    out, residual = rms_norm(x, weight, 1e-5, change, impl="triton")
    plain, plain_residual = rms_norm(x, weight, 1e-5, change, impl="ref")
    assert torch.equal(residual, plain_residual)
    assert out.shape == plain.shape and out.dtype == dtype
    assert within_twice(out, plain, exact_norm(residual, weight, 1e-5))
    # The sum of squares may round differently; then a few numbers land one step away.
    assert (out != plain).float().mean() <= (0.02 if dtype != torch.float32 else 1.0)


@settings(max_examples=25)
@given(
    st.integers(1, 19), st.sampled_from(WIDTHS), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 99)
)
def test_rms_norm_rounds_where_the_definition_rounds(
    rows: int, width: int, dtype: torch.dtype, add: bool, seed: int
) -> None:
    check_norm(rows, width, dtype, add, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [3584, 4096, 8192, 5000])
@pytest.mark.parametrize("rows", [1, 17, 128, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_at_real_sizes(rows: int, width: int, dtype: torch.dtype) -> None:
    check_norm(rows, width, dtype, True)
    check_norm(rows, width, dtype, False)


@pytest.mark.parametrize("tile", norm_kernel.VARIANTS, ids=str)
def test_every_norm_tile_gives_the_same(tile: norm_kernel.Tile) -> None:
    x, delta = (randn(5, 48, dtype=torch.bfloat16, seed=i) for i in range(2))
    weight = randn(48, dtype=torch.bfloat16, seed=2)
    out, residual = norm_kernel.rms_norm(x, weight, 1e-5, delta, tile)
    plain, plain_residual = rms_norm(x, weight, 1e-5, delta, impl="ref")
    assert torch.equal(residual, plain_residual)
    assert torch.allclose(out.float(), plain.float(), rtol=2**-7)


def test_rms_norm_takes_any_leading_shape_and_strided_rows() -> None:
    x = randn(6, 40, dtype=torch.float32, seed=0)[:, :24].unflatten(0, (2, 3))
    weight = randn(24, dtype=torch.float32, seed=1)
    out, residual = rms_norm(x, weight, 1e-6, impl="triton")
    assert residual is x
    assert torch.allclose(out, rms_norm(x, weight, 1e-6, impl="ref")[0], atol=1e-6)
    assert rms_norm(x[:0], weight, 1e-6, impl="triton")[0].shape == (0, 3, 24)


def test_a_row_that_is_not_finite_stays_alone() -> None:
    x, weight = randn(3, 20, dtype=torch.bfloat16, seed=0), randn(20, dtype=torch.bfloat16, seed=1)
    x[1, 4] = float("nan")
    out, _ = rms_norm(x, weight, 1e-5, impl="triton")
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@settings(max_examples=25)
@given(
    st.integers(1, 9), st.sampled_from([1, 7, 64, 1100, 2049]), st.sampled_from(DTYPES), st.integers(0, 99)
)
def test_silu_mul_rounds_where_the_definition_rounds(
    rows: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    check_gate(rows, width, dtype, seed)


def check_gate(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> None:
    packed = randn(rows, 2 * width, dtype=dtype, seed=seed) * 3
    out, plain = (silu_mul(packed, impl=impl) for impl in ("triton", "ref"))
    assert out.shape == plain.shape and out.dtype == dtype
    assert within_twice(out, plain, exact_gate(packed))
    assert (out != plain).float().mean() <= (0.02 if dtype != torch.float32 else 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_at_real_sizes(rows: int, dtype: torch.dtype) -> None:
    check_gate(rows, 12288, dtype)
    check_gate(rows, 18944, dtype)


def test_silu_mul_of_extremes_and_odd_shapes() -> None:
    packed = torch.tensor([[-1e4, 1e4, float("nan"), 0.0, 2.0, 2.0, 2.0, 2.0]], device=DEVICE)
    out = silu_mul(packed, impl="triton")
    assert out[0, [0, 1, 3]].tolist() == [0.0, 2e4, 0.0] and out[0, 2].isnan()
    strided = randn(6, 50, dtype=torch.float32, seed=0)[:, :22].unflatten(0, (2, 3))
    assert torch.allclose(silu_mul(strided, impl="triton"), silu_mul(strided, impl="ref"), atol=1e-6)
    assert silu_mul(strided[:0], impl="triton").shape == (0, 3, 11)


@pytest.mark.parametrize("tile", gate_kernel.VARIANTS, ids=str)
def test_every_gate_tile_gives_the_same(tile: gate_kernel.Tile) -> None:
    packed = randn(2, 2 * 700, dtype=torch.bfloat16, seed=3)
    assert torch.allclose(
        gate_kernel.silu_mul(packed, tile).float(), silu_mul(packed, impl="ref").float(), rtol=2**-7
    )


def test_a_kernel_that_cannot_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"'cuda-magic'.*ref, triton"):
        rms_norm(x, x[0], 1e-5, impl="cuda-magic")
    monkeypatch.setattr("flash_dllm.kernels.choice._interprets", lambda: False)
    with pytest.raises(ValueError, match=r"'triton' needs a GPU.*cpu"):
        silu_mul(x, impl="triton")
    assert choose(None, x) == "ref"
