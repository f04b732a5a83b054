"""Attention, projection and matrix product, compiled for GPUs that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.ahead_attention import CHIPS

ROOT = Path(__file__).parents[2]
STACK = 64
"""Bytes a thread that the assembler may put aside; float32, which is there to be exact, may take more."""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_every_tile_fits_its_gpu(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.ahead_attention"],
        cwd=ROOT, env={**env, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=1100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    built = [json.loads(line) for line in done.stdout.splitlines()]
    assert {case["arch"] for case in built} == set(CHIPS)
    for case in built:
        assert case["shared"] <= CHIPS[case["arch"]].shared, case
        assert case["spilled"] <= STACK or "fp32" in case["name"], case
        if case["arch"] == 90 and "m=128" in case["name"]:
            assert case["wgmma"], case
