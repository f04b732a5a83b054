"""Gate, up and activation in one kernel: against float64 and the definition, wherever it runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_dllm.kernels import gated_linear as op
from flash_dllm.kernels.devices import full_waves
from flash_dllm.kernels.gated_linear import triton as kernel
from flash_dllm.kernels.linear import linear, quantize_int8
from flash_dllm.kernels.silu_mul import silu_mul
from flash_dllm.quant.weights import QuantizedWeight
from tests.interpreter import repair

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = (kernel.Tile(16, 16, 16, 4, 2, 2), kernel.Tile(32, 64, 32, 4, 2, 1), kernel.Tile(64, 32, 16, 4, 3))

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> None:
    """Triton's interpreter multiplies and rounds bfloat16 as a GPU does."""
    repair()


def operands(rows: int, depth: int, width: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator(device=DEVICE).manual_seed(seed)
    h = torch.randn((rows, depth), generator=made, device=DEVICE)
    weight = torch.randn((2 * width, depth), generator=made, device=DEVICE) * depth**-0.5
    return h.to(dtype), weight.to(dtype)


def check(h: Tensor, weight: Tensor, out: Tensor) -> None:
    """No further from float64 than twice the definition in the same dtype."""
    exact = silu_mul(linear(h.double(), weight.double(), impl="ref"), impl="ref")
    plain = silu_mul(linear(h, weight), impl="ref")
    assert out.dtype == h.dtype and out.shape == (len(h), len(weight) // 2)
    assert (out.double() - exact).abs().max() <= 2 * (plain.double() - exact).abs().max() + 1e-6
    assert (out.double() - exact).norm() <= 1.1 * (plain.double() - exact).norm() + 1e-6


@settings(max_examples=25)
@given(
    st.sampled_from([1, 15, 16, 17, 50]), st.sampled_from([16, 40, 72]), st.sampled_from([16, 24, 72]),
    st.sampled_from(SMALL), st.sampled_from([torch.bfloat16, torch.float16]), st.integers(0, 99),
)  # fmt: skip
def test_one_kernel_does_what_two_do(
    rows: int, depth: int, width: int, tile: kernel.Tile, dtype: torch.dtype, seed: int
) -> None:
    h, weight = operands(rows, depth, width, dtype, seed)
    check(h, weight, kernel.gated_linear(h, weight, tile))


def test_rows_stay_alone_and_none_is_fine() -> None:
    h, weight = operands(20, 32, 32, torch.bfloat16)
    clean = kernel.gated_linear(h, weight, SMALL[0])
    h[7] = float("nan")
    dirty = kernel.gated_linear(h, weight, SMALL[0])
    others = [i for i in range(20) if i != 7]
    assert torch.equal(dirty[others], clean[others]) and not dirty[7].isfinite().any()
    assert kernel.gated_linear(h[:0], weight, SMALL[0]).shape == (0, 32)


def test_what_one_kernel_cannot_do_takes_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, a last round of tiles that is nearly empty, a forced product, 8 bits, other dtypes and devices."""
    calls: list[int] = []

    def one(h: Tensor, weight: Tensor) -> Tensor:
        calls.append(len(h))
        return silu_mul(linear(h, weight), impl="ref")

    monkeypatch.setattr(kernel, "gated_linear", one)
    monkeypatch.setattr(op, "streams_tiles", lambda *matrices: True)
    monkeypatch.setattr(op, "full_waves", lambda tiles, device: tiles == 4)
    h, weight = operands(op.MANY, 32, 32, torch.bfloat16)
    assert op.gated_linear(h, weight, gate="triton").shape == (op.MANY, 32)
    assert calls == [op.MANY]
    packed = QuantizedWeight(*quantize_int8(weight))
    more, _ = operands(op.MANY + 128, 32, 32, torch.bfloat16)
    assert op.fits(h, weight) and not op.fits(h, packed) and not op.fits(h, weight[:-2])
    assert not op.fits(h.float(), weight.float())
    for x, matrix, how in (
        (h[1:], weight, {"gate": "triton"}),
        (more, weight, {"gate": "triton"}),
        (h, weight, {"gate": "triton", "product": "library"}),
        (h, weight, {"gate": "triton", "product": "invariant"}),
        (h, weight, {"gate": "ref"}),
        (h, packed, {"gate": "triton"}),
        (h.float(), weight.float(), {"gate": "triton"}),
        (h, weight[:-2], {"gate": "triton"}),
    ):
        assert op.gated_linear(x, matrix, **how).shape == (len(x), matrix.shape[0] // 2)
    assert calls == [op.MANY]
    monkeypatch.undo()
    assert op.fits(h, weight) == (DEVICE == "cuda")


def test_whole_rounds_of_tiles() -> None:
    device = torch.device("cpu")  # counts as an H200, which has 132 multiprocessors
    assert [full_waves(n, device) for n in (121, 122, 132, 133, 242, 243, 264, 6000)] == [
        False, True, True, False, False, True, True, True,
    ]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 127, 512, 513, 1000, 4096])
@pytest.mark.parametrize(("depth", "width"), [(4096, 12288), (3584, 18944), (1000, 1504)])
def test_at_the_sizes_of_real_models(rows: int, depth: int, width: int) -> None:
    h, weight = operands(rows, depth, width, torch.bfloat16)
    assert op.fits(h, weight) and not op.fits(h.float(), weight.float()) and not op.fits(h, weight[:-2])
    check(h, weight, op.in_one(h, weight))
    check(h, weight, op.gated_linear(h, weight))


@pytest.mark.gpu
def test_many_rows_take_one_launch() -> None:
    """Unless the last round of tiles would leave much of the GPU idle, as with 768 rows."""
    h, weight = operands(1024, 512, 12288, torch.bfloat16)
    for rows, launches in ((op.MANY, 1), (op.MANY - 1, 2), (768, 2), (1024, 1)):
        op.gated_linear(h[:rows], weight)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            op.gated_linear(h[:rows], weight)
            torch.cuda.synchronize()
        kernels = [
            e.key for e in profile.key_averages() if "_gate" in e.key or "gemm" in e.key or "nvjet" in e.key
        ]
        assert len(kernels) == launches, kernels
