"""What only a GPU shows: events, the profiler, idle shares, and kernels timed against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_dllm.bench import kernels
from flash_dllm.bench.floors import measure_ceilings
from flash_dllm.bench.step import Place, measure_step
from flash_dllm.bench.synthetic import Setting, weights
from flash_dllm.bench.throughput import Load, measure_load
from flash_dllm.bench.timing import Timer, profile
from flash_dllm.models.config import SHAPES

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def test_events_time_and_the_profiler_sees() -> None:
    a = torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16)
    timing = Timer(DEVICE, 10, 2)(lambda: a @ a)
    assert 0 < timing.low <= timing.ms <= timing.high
    seen = profile(lambda: a @ a, DEVICE, runs=4)
    assert seen is not None and seen.kernels >= 1 and seen.busy_ms > 0
    ceilings = measure_ceilings(DEVICE, torch.bfloat16)
    assert ceilings.copy > 1e11 and ceilings.matmul > 1e12


@pytest.mark.parametrize("method", ["flash+threshold", "flash+verify", "flash+branch"])
def test_a_step_has_an_idle_share_and_a_peak(method: str) -> None:
    model = weights("llada-tiny", torch.bfloat16, DEVICE)
    ceilings = measure_ceilings(DEVICE, torch.bfloat16)
    setting = Setting("llada-tiny", method, {"lookahead": 8, "track": 16}, 2.0)
    row = measure_step(setting, model, Place(4, 30, 200, 10), ceilings)
    assert row["ms"] > 0 and 0 <= row["idle_share"] < 1 and row["peak_gib"] > 0
    assert row["kernels_a_step"] > 0 and row["top_kernels"]


def test_a_load_runs_with_refills() -> None:
    model = weights("llada-tiny", torch.bfloat16, DEVICE)
    setting = Setting("llada-tiny", "flash+threshold", {"lookahead": 8, "track": 16}, 2.0)
    first, warm = measure_load(setting, model, 4, Load(10, (10, 30), (40, 60), 64))
    assert first["answer_tokens"] == warm["answer_tokens"] > 0 and first["failed"] == 0
    assert 0 <= warm["idle_share"] < 1


@pytest.mark.parametrize("op", kernels.OPS)
def test_every_kernel_is_right_before_it_is_timed(op: str) -> None:
    timer, ceilings = Timer(DEVICE, 3, 1), measure_ceilings(DEVICE, torch.bfloat16)
    rows: list[dict[str, Any]] = []
    sizes = kernels.Sizes((17, 128), (1, 3), 32, 127, 4)
    for case in kernels.Maker(SHAPES["llada-tiny-gqa"], torch.bfloat16, DEVICE).cases([op], sizes):
        rows += kernels.measure_case(case, ["ref", "triton"], timer, ceilings, torch.bfloat16)
    assert rows and not [row for row in rows if "failed_with" in row]
    assert all(row["ms"] > 0 for row in rows if row["impl"] == "triton" and "skipped" not in row)
