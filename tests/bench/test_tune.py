"""Tuning keeps the fastest right candidate, stores it, and the ops use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from flash_dllm.bench.kernels import Maker, Sizes
from flash_dllm.bench.timing import Timing
from flash_dllm.bench.tune import Tried, candidates, tune
from flash_dllm.kernels import tuned
from flash_dllm.kernels.qkv_rope_write import triton as qkv
from flash_dllm.kernels.row_attention import triton as attention
from flash_dllm.kernels.tuned import Entry, Table, TunedError
from flash_dllm.models.config import SHAPES

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_stored() -> Iterator[None]:
    yield
    tuned.use(Table([]))


def entry(op: str, rows: int, impl: str = "triton", ms: float = 1.0, **same: int) -> Entry:
    return Entry(op, rows, same, impl, {"m": 16, "n": 32}, ms)


def test_the_nearest_size_serves_and_a_far_one_does_not() -> None:
    table = Table([entry("row_attention", 128, width=128), entry("row_attention", 1024, width=128)])
    found = [table.find("row_attention", rows, width=128) for rows in (64, 200, 600, 2048, 4096)]
    assert [e.rows if e else None for e in found] == [128, 128, 1024, 1024, None]
    assert table.find("row_attention", 128, width=16) is None and table.find("silu_mul", 128) is None


def test_what_is_stored_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tiles.json"
    table = Table([entry("row_attention", 128, width=128)])
    tuned.save(table, path, {"device": "test"})
    assert tuned.read(path).entries == table.entries and not list(path.parent.glob("*.partial"))
    path.write_text("{}")
    with pytest.raises(TunedError, match=r"tiles\.json"):
        tuned.read(path)


def test_ops_use_what_is_stored() -> None:
    tiles = {"m": 64, "heads": 1, "pairs": 16, "k": 32}
    tuned.use(Table([
        entry("row_attention", 256, group=1, dim=64, width=128, score=1),
        Entry("qkv_rope_write", 128, {"depth": 64, "width": 192}, "fused", tiles, 1.0),
        Entry("qkv_rope_write", 4096, {"depth": 64, "width": 192}, "triton", {}, 1.0),
    ]))  # fmt: skip
    assert attention.stored_tiles(256, 128, 1, 64, True) == attention.Tiles(16, 32)
    assert attention.stored_tiles(256, 128, 1, 64, False) is None
    assert qkv.stored_tiles(100, torch.Size((192, 64))) == qkv.Tiles(**tiles)
    assert qkv.stored_tiles(4000, torch.Size((192, 64))) is None
    tuned.use(Table([]))
    assert attention.stored_tiles(256, 128, 1, 64, True) is None


@pytest.mark.slow
def test_the_fastest_right_candidate_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that likes one candidate of each case; another one gives wrong numbers and is not even timed."""
    maker = Maker(SHAPES["llada-tiny"], torch.float32, CPU)
    sizes = Sizes((8,), (1,), 8, 20, 2)
    tried: list[Tried] = []
    times = iter(range(10**6))

    def clock(fn: Callable[[], object]) -> Timing:
        ms = 100.0 - next(times)
        return Timing(ms, ms, ms, 1)

    whole = qkv.fused

    def wrong(*args: object, **more: object) -> torch.Tensor:
        return whole(*args, **more) + 1  # type: ignore[arg-type]

    monkeypatch.setattr(qkv, "fused", wrong)
    few = [(case, list(candidates(case, maker))) for case in maker.cases(("qkv_rope_write",), sizes)]
    assert len(few) == 1 and len(few[0][1]) > 4
    table = tune(maker, sizes, clock, ("qkv_rope_write",), tried.append)
    assert len(tried) == len(few[0][1]) and tuned.current() is not table
    assert [e.impl for e in table.entries] == ["triton"] and table.entries[0].rows == 8
    assert all(t.timing is None and "relative error" in t.why for t in tried if t.candidate.impl == "fused")
    monkeypatch.undo()
    table = tune(maker, sizes, clock, ("qkv_rope_write",), tried.append)
    assert table.entries[0].impl == "fused" and table.entries[0].tiles == few[0][1][-1].tiles


def test_an_op_that_writes_no_keys_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier run left in the cache does not count as written."""
    from flash_dllm.bench.kernels import error_of
    from flash_dllm.kernels import qkv_rope_write as op

    (case,) = Maker(SHAPES["llada-tiny"], torch.float32, CPU).cases(
        ("qkv_rope_write",), Sizes((8,), (1,), 8, 20, 2)
    )
    reference = case.checked("ref")
    assert error_of(case.checked("ref"), reference) == 0
    whole = op.qkv_rope_write

    def forgets(h: torch.Tensor, *args: object, **more: object) -> torch.Tensor:
        keys, values = args[4]  # type: ignore[misc]
        kept = (keys.clone(), values.clone())
        out = whole(h, *args, **more)  # type: ignore[arg-type]
        keys.copy_(kept[0])
        values.copy_(kept[1])
        return out

    monkeypatch.setattr(op, "qkv_rope_write", forgets)
    assert error_of(case.checked("ref"), reference) > 0.5
