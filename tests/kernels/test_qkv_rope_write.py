"""QKV projection, rotation and cache write: both kernels against the definition in float64, wherever they run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_dllm.kernels.qkv_rope_write import FUSED, SCATTERED, STREAMED, qkv_rope_write, streamed
from flash_dllm.kernels.qkv_rope_write import triton as kernel
from flash_dllm.kernels.row_attention.groups import BlockTables, Group

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")
IMPLS = (SCATTERED, FUSED)
HALF = (*IMPLS, STREAMED)
"""Those that know 16-bit numbers."""


class Case:
    """Rows of random inputs, each with a place of its own, but for the last two, which go to the trash place."""

    def __init__(
        self, rows: int, depth: int, heads: tuple[int, int], dim: int, bias: bool, seed: int = 0
    ) -> None:
        made, drawn = torch.Generator().manual_seed(seed), torch.Generator(device=DEVICE).manual_seed(seed)
        self.slots, self.places = 2, rows + 2

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=drawn, dtype=torch.float64, device=DEVICE) * std

        width = (heads[0] + 2 * heads[1]) * dim
        self.h, self.weight = normal(rows, depth), normal(width, depth, std=depth**-0.5)
        self.bias = normal(width) if bias else None
        angle = normal(rows, dim // 2, std=3.0).float()
        self.angles = (angle.cos(), angle.sin())
        self.slot = torch.randint(0, 2, (rows,), generator=made).to(DEVICE)
        self.place = torch.randperm(rows, generator=made).to(DEVICE) + 1
        self.place[-2:] = 0
        self.kv_shape = (self.slots, self.places, heads[1], dim)

    def run(self, dtype: torch.dtype, impl: str, in_float32: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        keys = torch.full(self.kv_shape, NAN, dtype=dtype, device=DEVICE)
        values = torch.full(self.kv_shape, NAN, dtype=dtype, device=DEVICE)
        bias = None if self.bias is None else self.bias.to(dtype)
        out = qkv_rope_write(
            self.h.to(dtype), self.weight.to(dtype), bias, self.angles, (self.slot, self.place), (keys, values),
            in_float32, impl,
        )  # fmt: skip
        return out, keys, values

    def exact(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """In float64, from inputs rounded to ``dtype``."""
        rounded = Case.__new__(Case)
        rounded.__dict__.update(self.__dict__)
        rounded.h, rounded.weight = self.h.to(dtype).double(), self.weight.to(dtype).double()
        rounded.bias = None if self.bias is None else self.bias.to(dtype).double()
        rounded.angles = (self.angles[0].double(), self.angles[1].double())
        return rounded.run(torch.float64, "ref", False)


def check(case: Case, dtype: torch.dtype, impl: str, in_float32: bool = True, bound: float = 2.0) -> None:
    exact, plain = case.exact(dtype), case.run(dtype, "ref", in_float32)
    for got, want, usual in zip(case.run(dtype, impl, in_float32), exact, plain, strict=True):
        if got.ndim == 4:
            # Trash holds either of two rows; what nobody wrote still holds NaN.
            got, want, usual = got[:, 1:], want[:, 1:], usual[:, 1:]
            assert torch.equal(got.isnan(), want.isnan())
        error, limit = (got.double() - want).abs().nan_to_num(0), (usual.double() - want).abs().nan_to_num(0)
        floor = torch.finfo(dtype).eps
        assert error.max() <= bound * limit.max() + floor and error.mean() <= bound * limit.mean() + floor


@settings(max_examples=16)
@given(
    st.integers(1, 40), st.sampled_from([16, 40]), st.sampled_from([((2, 2), 16), ((4, 2), 8), ((7, 1), 24)]),
    st.booleans(), st.sampled_from(IMPLS), st.integers(0, 99),
)  # fmt: skip
def test_every_row_goes_to_its_place(
    rows: int, depth: int, shape: tuple[tuple[int, int], int], bias: bool, impl: str, seed: int
) -> None:
    check(Case(rows, depth, *shape, bias, seed), torch.float32, impl)


@pytest.mark.parametrize("impl", HALF)
@pytest.mark.parametrize("in_float32", [True, False])
def test_half_precision(impl: str, in_float32: bool) -> None:
    check(Case(33, 64, (4, 2), 16, True), torch.bfloat16, impl, in_float32)


@pytest.mark.parametrize("impl", HALF)
def test_keys_and_values_in_8_bits(impl: str) -> None:
    """They differ from the definition's by one step of the format at most, where the input rounds differently."""
    case = Case(20, 32, (4, 2), 16, False)
    case.h[3] *= 1000
    if DEVICE == "cuda":  # Triton's interpreter makes a number of it.
        case.h[4] = NAN
    written = []
    for which in ("ref", impl):
        keys, values = (torch.zeros(case.kv_shape, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
        qkv_rope_write(
            case.h.bfloat16(), case.weight.bfloat16(), None, case.angles, (case.slot, case.place), (keys, values),
            True, which,
        )  # fmt: skip
        written.append(torch.stack([keys, values])[:, :, 1:].float())
    ref, got = written
    assert torch.equal(ref.isnan(), got.isnan()) and ref.nan_to_num(0).abs().max() == 448
    assert (ref - got).nan_to_num(0).abs().max() <= (ref.nan_to_num(0).abs() / 8 + 2**-9).max()
    assert ((ref != got) & ~ref.isnan()).float().mean() < 0.1


@pytest.mark.parametrize("impl", IMPLS)
def test_expanded_columns_are_read_as_what_they_mean(impl: str) -> None:
    case = Case(12, 16, (2, 2), 16, False)
    case.slot = torch.ones(1, dtype=torch.int64, device=DEVICE).expand(12)
    check(case, torch.float32, impl)


@pytest.mark.parametrize("tiles", [
    kernel.Tiles(16, 1, 16, 16), kernel.Tiles(32, 2, 32, 32, group=1), kernel.Tiles(16, 4, 32, 16, group=3),
])  # fmt: skip
def test_tiles_of_parts_and_of_several_heads(tiles: kernel.Tiles) -> None:
    case = Case(50, 48, (4, 2), 64, True)
    keys, values = (torch.zeros(case.kv_shape, device=DEVICE) for _ in range(2))
    bias = None if case.bias is None else case.bias.float()
    target = (case.slot, case.place)
    got = kernel.fused(
        case.h.float(), case.weight.float(), bias, case.angles, target, (keys, values), True, tiles
    )
    want, want_keys, want_values = case.run(torch.float32, "ref")
    assert torch.allclose(got, want, atol=1e-5)
    assert torch.allclose(keys[target][:-2], want_keys[target][:-2], atol=1e-5)
    assert torch.allclose(values[target][:-2], want_values[target][:-2], atol=1e-5)


def test_rows_in_chunks_are_the_same_rows() -> None:
    case = Case(21, 16, (2, 2), 16, False)
    whole = case.run(torch.float32, "triton")
    keys, values = (torch.full(case.kv_shape, NAN, device=DEVICE) for _ in range(2))
    target = (case.slot, case.place)
    out = kernel.scattered(
        case.h.float(), case.weight.float(), None, case.angles, target, (keys, values), True, chunk=8
    )
    assert torch.allclose(out, whole[0], atol=1e-6)
    assert torch.equal(keys[:, 1:].isnan(), whole[1][:, 1:].isnan())


def test_a_block_table_covers_each_row_once_and_is_kept() -> None:
    tables, device = BlockTables(keep=2), torch.device("cpu")
    groups = (Group((0, 2), 0, 5, 9), Group((1,), 10, 3, 7), Group((2,), 13, 2, 9))
    table = tables.get(groups, 4, device)
    rows = [(slot, first + i) for slot, first, count, _, _ in table.tolist() for i in range(count)]
    assert rows == [(0, i) for i in range(5)] + [(2, i) for i in range(5, 10)] + [(1, i) for i in range(10, 13)] + [
        (2, 13), (2, 14),
    ]  # fmt: skip
    assert [line[4] for line in table.tolist()] == [1, 0, 1, 0, 1, 0]
    assert tables.get(groups, 4, device) is table and tables.get(groups, 8, device) is not table
    tables.get(groups[:1], 4, device)
    assert tables.get(groups, 4, device) is not table


@settings(max_examples=12)
@given(
    st.integers(1, 40), st.sampled_from([16, 40]), st.sampled_from([((2, 2), 16), ((5, 1), 32), ((7, 1), 16)]),
    st.booleans(), st.booleans(),
    st.sampled_from([streamed.Tile(16, 16, 4, 2, 2), streamed.Tile(64, 32, 4, 2)]), st.integers(0, 99),
)  # fmt: skip
def test_tiles_of_many_rows(
    rows: int,
    depth: int,
    shape: tuple[tuple[int, int], int],
    bias: bool,
    in_float32: bool,
    tile: streamed.Tile,
    seed: int,
) -> None:
    case = Case(rows, depth, *shape, bias, seed)
    plain = streamed.TILE
    streamed.streamed.__defaults__ = (tile,)
    try:
        check(case, torch.bfloat16, STREAMED, in_float32)
    finally:
        streamed.streamed.__defaults__ = (plain,)


@pytest.mark.parametrize("impl", HALF)
def test_a_value_that_is_not_finite_stays_alone(impl: str) -> None:
    """Values do not turn, so the other half of the head knows nothing of it."""
    case = Case(8, 16, (2, 2), 16, True)
    assert case.bias is not None
    case.bias[-16] = float("inf")
    queries, _, values = case.run(torch.bfloat16, impl, False)
    written = values[case.slot, case.place][:-2, 1]
    assert written[:, 0].isinf().all() and written[:, 1:].isfinite().all()
    assert queries.isfinite().all()


def test_what_streams_not() -> None:
    with pytest.raises(ValueError, match=r"'streamed' takes 16-bit numbers.*torch\.float32 and 16"):
        Case(4, 32, (2, 2), 16, False).run(torch.float32, STREAMED)
    with pytest.raises(ValueError, match=r"torch\.bfloat16 and 24"):
        Case(4, 32, (2, 2), 24, False).run(torch.bfloat16, STREAMED)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", *HALF])
@pytest.mark.parametrize("rows", [1, 17, 128, 1000, 4096])
@pytest.mark.parametrize("shape", [((32, 32), 128, False), ((28, 4), 128, True), ((12, 2), 64, True)])
def test_at_the_sizes_of_real_models(impl: str, rows: int, shape: tuple[tuple[int, int], int, bool]) -> None:
    heads, dim, bias = shape
    check(Case(rows + 2, heads[0] * dim, heads, dim, bias), torch.bfloat16, impl, not bias)


def test_tables_that_a_recorded_step_reads_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, device = BlockTables(keep=2), torch.device("cpu")
    groups = (Group((0,), 0, 5, 9),)
    early = tables.get(groups, 4, device)
    with tables.held():
        assert tables.get(groups, 4, device) is early
    for rows in range(5, 40):
        tables.get(groups, rows, device)
    assert tables.get(groups, 4, device) is early
