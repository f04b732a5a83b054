"""Half a minute of many clients that come, go and err: nothing is lost, nothing leaks (benchmarks/soak.py)."""

from __future__ import annotations

import asyncio
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads memory from /proc")
def test_soak(chat_folder: Path) -> None:
    spec = spec_from_file_location("soak", ROOT / "benchmarks" / "soak.py")
    assert spec is not None and spec.loader is not None
    soak = module_from_spec(spec)
    spec.loader.exec_module(soak)
    report = asyncio.run(soak.soak(str(chat_folder), seconds=30.0, clients=200, slots=16))
    assert not soak.faults(report, grow=24.0), report
