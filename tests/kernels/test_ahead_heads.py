"""The kernels of the LM head, RMSNorm and the gated activation, compiled for GPUs that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flash_dllm.kernels.devices import A100, ADA, H200
from flash_dllm.kernels.head_confidence.tiles import HOPPER, INVARIANT, WIDE, tile_for

ROOT = Path(__file__).parents[2]
SHARED = {90: H200.shared, 80: A100.shared, 89: ADA.shared}
STACK = 32
"""Bytes a thread that the assembler may put aside, once a tile and never in the loop over the depth."""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_every_tile_fits_its_gpu(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Every tile that can be chosen; with ``--variants`` those that are only to be measured, too."""
    variants = ("--variants",) if request.config.getoption("--variants") else ()
    # Triton does not compile where it interprets, and one process does one or the other.
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.ahead_heads", *variants],
        cwd=ROOT, env={**env, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=1100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    built = [json.loads(line) for line in done.stdout.splitlines()]
    assert {case["arch"] for case in built} == {80, 89, 90}
    assert any(case["variant"] for case in built) == bool(variants)
    for case in built:
        assert case["shared"] <= SHARED[case["arch"]], case
        assert case["spilled"] <= (3 * STACK if case["variant"] else STACK), case
        if case["arch"] == 90 and case["name"].startswith("Tile") and "bf16" in case["name"]:
            assert case["wgmma"], case


def test_a_tile_hangs_on_rows_dtype_and_device() -> None:
    assert tile_for(16, 2, False, H200) == HOPPER[0][1]
    assert tile_for(17, 2, False, H200) == HOPPER[1][1]
    assert tile_for(10**6, 2, False, H200) == HOPPER[-1][1]
    assert tile_for(16, 4, True, ADA) == WIDE[0][1]
    for rows in (1, 100, 5000):
        assert tile_for(rows, 2, rows > 50, A100, invariant=True) == INVARIANT
        assert tile_for(rows, 4, False, H200, invariant=True) == WIDE[-1][1]
    for chip in (H200, A100, ADA):
        for rows in (1, 17, 33, 65, 129):
            for noisy in (False, True):
                tile = tile_for(rows, 2, noisy, chip)
                assert tile.shared(2) <= chip.shared
                assert not tile.descriptor or chip is H200
