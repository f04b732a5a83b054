"""Ranks part: what was recorded goes first, since NCCL waits for good for graphs that hold its sums."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flash_dllm.engine.engine import Engine
from flash_dllm.engine.request import Request
from flash_dllm.engine.runner import Runner
from flash_dllm.parallel import group as group_module
from flash_dllm.parallel.group import Group
from tests.test_pairs import make_cases
from tests.test_runner import Again

from .test_engine_on_ranks import engine_of
from .threads import ThreadRanks, on_ranks, part_of


def test_a_runner_forgets(golden_dir: Path) -> None:
    """It tells the ranks that it records; once it forgot, steps run op by op and give the same."""

    def work(ranks: ThreadRanks) -> Any:
        engine = engine_of(Engine, part_of(golden_dir / "llada-tiny-gqa", ranks), slots=1)
        assert ranks.holders == [], "nothing is recorded on a CPU"
        engine.runner = Runner(engine.decoder, Again)
        assert ranks.holders == [engine.runner]
        answers, tapes = [], []
        for _ in range(2):
            engine.add(Request("a", make_cases("parting", "threshold", 1)[0]))
            while not engine.idle:
                answers += [f.ids for f in engine.step()]
            tapes += engine.runner.tapes.values()
            engine.runner.forget()
        return answers, tapes, engine.runner

    for answers, tapes, runner in on_ranks(2, work):
        assert answers[0] == answers[1]
        assert [tape.dropped for tape in tapes] == [True], "recorded in the first round only"
        assert runner.tapes == {} and not runner.records and runner.played < runner.eager


class Holder:
    """What a runner is to a group."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def forget(self) -> None:
        self.log.append("forget")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order in which a group's end happens."""
    log: list[str] = []
    destroy = dist.destroy_process_group
    monkeypatch.setattr(dist, "destroy_process_group", lambda: (log.append("leave"), destroy()))
    return log


@pytest.fixture
def alone(log: list[str]) -> Any:
    group = Group(dist.HashStore(), 0, 1, torch.device("cpu"))
    yield group
    group.close()


def on_a_gpu(group: Group, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if NCCL, which ``backend`` stands for, connected GPUs."""
    group.device = torch.device("cuda")
    world = SimpleNamespace(_get_backend=lambda device: backend)
    fake = SimpleNamespace(
        group=SimpleNamespace(WORLD=world),
        is_initialized=dist.is_initialized,
        destroy_process_group=dist.destroy_process_group,
    )
    monkeypatch.setattr(group_module, "distributed", lambda: fake)


def test_recordings_go_before_the_group(alone: Group, log: list[str]) -> None:
    kept, gone = Holder(log), Holder(log)
    alone.before_parting(kept)
    alone.before_parting(gone)
    del gone
    alone.close()
    assert log == ["forget", "leave"], "a holder that is gone is not asked"


def test_sums_are_broken_off_while_recordings_go(
    alone: Group, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's abort frees its kernels first and then waits for the graphs."""
    forgotten = threading.Event()

    class Slow(Holder):
        def forget(self) -> None:
            super().forget()
            forgotten.set()

    class Backend:
        def abort(self) -> None:
            log.append("begins" if not forgotten.wait(20) else "ends")

    kept = Slow(log)
    alone.before_parting(kept)
    on_a_gpu(alone, Backend(), monkeypatch)
    alone.abort()
    assert log == ["forget", "ends"]


def test_an_abort_that_never_returns(alone: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()

    class Backend:
        def abort(self) -> None:
            never.wait(60)

    monkeypatch.setattr(group_module, "BREAK", 0.05)
    on_a_gpu(alone, Backend(), monkeypatch)
    alone.abort()
    never.set()


STUCK = """
import threading
from flash_dllm.parallel import control
control.GRACE = 0.2
alive, never = control.Liveness(), threading.Event()
alive.abort = never.wait
with alive:
    threading.Thread(target=alive.lose, args=("rank 1 is gone",), daemon=True).start()
    never.wait()
"""


def test_a_process_whose_sums_cannot_be_broken_off_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "rank 1 is gone; this process, stuck in a sum, ends" in done.stderr
