"""Ranks part: what was recorded goes first, since NCCL waits for good for graphs that hold its sums."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flash_dllm.core.step import StepRecord, Vocabulary
from flash_dllm.core.types import Lanes
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.request import Request
from flash_dllm.engine.runner import Key, Runner, Tapes
from flash_dllm.methods import build_method
from flash_dllm.parallel import group as group_module
from flash_dllm.parallel.control import Hub
from flash_dllm.parallel.group import Group
from flash_dllm.parallel.launch import Team
from tests.goldens.harness import EOS, EOT, MASK
from tests.test_pairs import N_TOKENS, POSITIONS, make_cases
from tests.test_runner import Again

from .test_engine_on_ranks import engine_of
from .threads import ThreadRanks, on_ranks, part_of


def test_a_runner_forgets(golden_dir: Path) -> None:
    """It tells the ranks that it records; once it forgot, steps run op by op and give the same."""

    def work(ranks: ThreadRanks) -> Any:
        engine = engine_of(Engine, part_of(golden_dir / "llada-tiny-gqa", ranks), slots=1)
        assert ranks.holders == [], "nothing is recorded on a CPU"
        engine.runner = Runner(engine.decoder, Again)
        assert ranks.holders == [engine.runner.tapes]
        answers, tapes = [], []
        for _ in range(2):
            engine.add(Request("a", make_cases("parting", "threshold", 1)[0]))
            while not engine.idle:
                answers += [f.ids for f in engine.step()]
            tapes += engine.runner.tapes.values()
            engine.runner.tapes.forget()
        return answers, tapes, engine.runner

    for answers, tapes, runner in on_ranks(2, work):
        assert answers[0] == answers[1]
        assert [tape.dropped for tape in tapes] == [True], "recorded in the first round only"
        assert runner.tapes == {} and not runner.records and runner.played < runner.eager


def test_a_runner_that_goes_withdraws(golden_dir: Path) -> None:
    def work(ranks: ThreadRanks) -> Any:
        engine = engine_of(Engine, part_of(golden_dir / "llada-tiny-gqa", ranks), slots=1)
        engine.runner = Runner(engine.decoder, Again)
        tape = engine.runner.tapes[Key(1, 4, 0, ())] = Again(lambda: None)  # type: ignore[arg-type,return-value]
        engine.runner = Runner(engine.decoder, None)
        gc.collect()
        return tape.dropped, ranks.holders

    assert on_ranks(2, work) == [(True, [])] * 2


def test_what_is_recorded_meanwhile_is_dropped() -> None:
    tapes, late = Tapes(), Again(lambda: None)  # type: ignore[arg-type,return-value]
    tapes.forget()
    with pytest.raises(RuntimeError, match="given up"):
        tapes.keep(Key(1, 4, 0, ()), late)
    assert late.dropped and not tapes


class Holder:
    """What recorded steps are to a group."""

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
    # Not by the group itself, which a test may have made believe anything.
    if dist.is_initialized():
        dist.destroy_process_group()


def on_a_gpu(
    group: Group, backend: Any, monkeypatch: pytest.MonkeyPatch, leave: Callable[[], None] | None = None
) -> None:
    """As if NCCL, which ``backend`` stands for, connected GPUs."""
    group.device = torch.device("cuda")
    world = SimpleNamespace(_get_backend=lambda device: backend)
    fake = SimpleNamespace(
        group=SimpleNamespace(WORLD=world),
        is_initialized=dist.is_initialized,
        destroy_process_group=leave or dist.destroy_process_group,
    )
    monkeypatch.setattr(group_module, "distributed", lambda: fake)


def test_recordings_go_before_the_group(alone: Group, log: list[str]) -> None:
    kept, gone = Holder(log), Holder(log)
    alone.before_parting(kept)
    alone.before_parting(gone)()
    alone.close()
    assert log == ["forget", "leave"], "one that withdrew is not asked"


def test_recordings_go_before_the_group_when_all_is_collected_at_once(log: list[str]) -> None:
    """The collector clears weak references in a cycle before it calls anybody."""
    group = Group(dist.HashStore(), 0, 1, torch.device("cpu"))
    team: Any = Team(group, Hub.__new__(Hub))
    team.control.lines, team.control.processes, team.control.lost = {}, {}, None
    team.runner = Holder(log)
    team.runner.team = team  # type: ignore[attr-defined]
    group.before_parting(Holder(log))
    del team, group
    gc.collect()
    assert log == ["forget", "leave"]


def test_one_that_fails_to_forget_keeps_nobody(alone: Group, log: list[str]) -> None:
    class Broken(Holder):
        def forget(self) -> None:
            super().forget()
            raise RuntimeError("no")

    for holder in (Broken(log), Holder(log)):
        alone.before_parting(holder)
    alone.close()
    assert log == ["forget", "forget", "leave"]


def test_sums_are_broken_off_while_recordings_go(
    alone: Group, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's abort frees its kernels first and then waits for the graphs, whose end may wait for the kernels."""
    begun, forgotten = threading.Event(), threading.Event()

    class Playing(Holder):
        def forget(self) -> None:
            assert begun.wait(20), "the kernels of a graph that plays end by the abort"
            super().forget()
            forgotten.set()

    class Backend:
        def abort(self) -> None:
            log.append("begins")
            begun.set()
            log.append("ends" if forgotten.wait(20) else "waited for good")

    alone.before_parting(Playing(log))
    on_a_gpu(alone, Backend(), monkeypatch)
    alone.abort()
    assert log == ["begins", "forget", "ends"]


def test_an_abort_and_an_end_that_never_return(alone: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    never, waiting = threading.Event(), []

    class Backend:
        def abort(self) -> None:
            waiting.append("abort")
            never.wait(60)

    def leave() -> None:
        waiting.append("leave")
        never.wait(60)

    monkeypatch.setattr(group_module, "BREAK", 0.05)
    on_a_gpu(alone, Backend(), monkeypatch, leave)
    began = time.monotonic()
    alone.abort()
    alone.close()
    assert waiting == ["abort", "leave"] and time.monotonic() - began < 30 and not never.is_set()
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


@pytest.mark.parametrize("method", [("none", "threshold"), ("flash", "verify"), ("dllm-cache", "threshold")])
def test_ranks_warm_up_alike(golden_dir: Path, method: tuple[str, str]) -> None:
    """What requests may not ask for where the vocabulary is split is not compiled either."""

    def work(ranks: ThreadRanks) -> Any:
        model, orders = part_of(golden_dir / "llada-tiny", ranks), []
        words = Vocabulary(N_TOKENS, MASK, (EOS,), (EOS, EOT))
        engine = Engine(model, build_method(*method, family="llada"), words, slots=3, positions=POSITIONS)
        engine.runner, step = Runner(engine.decoder, Again), engine.decoder.step

        def seen(lanes: Lanes) -> StepRecord:
            orders.append((dict(vars(lanes)), dict(vars(engine.decoder.hints))))
            return step(lanes)

        engine.decoder.step = seen  # type: ignore[method-assign]
        list(engine.warm_up())
        return orders

    first, second = on_ranks(2, work)
    assert first == second and any(hints["suppress"] for _, hints in first)
    assert not any(hints["filters"] for _, hints in first)
