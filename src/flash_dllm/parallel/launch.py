"""Where ranks come from: processes that ``torchrun`` started, or that rank 0 starts itself."""

from __future__ import annotations

import os
import subprocess
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from .control import Hub, Spoke, end_all
from .errors import ParallelError, RankError
from .group import Group, distributed

MEET = 120.0
"""Seconds for all ranks to start Python, import torch and meet."""

SPAWNED = "FLASH_DLLM_RANK"
"""Set in processes that rank 0 started itself."""


@dataclass(frozen=True)
class Place:
    """Which process of a launch this one is, as ``torchrun`` (or rank 0) says through the environment."""

    rank: int
    size: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> Place | None:
        """None for a process that nobody launched as one of several."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        if any(name not in os.environ for name in names):
            return None
        try:
            return cls(*(int(os.environ[name]) for name in names))
        except ValueError:
            raise ParallelError(
                f"{', '.join(f'{n}={os.environ[n]!r}' for n in names)}: not numbers"
            ) from None


class Team:
    """The ranks of a model: sums, and the line between rank 0 and the others.

    The others end when it is closed, forgotten, or when the process ends.
    """

    def __init__(self, group: Group, control: Hub | Spoke) -> None:
        self.group, self.control = group, control
        self._end = weakref.finalize(self, _end, group, control)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return isinstance(self.control, Hub)

    def ready(self, timeout: float) -> None:
        """This rank has loaded its part; rank 0 waits for the others.

        Raises:
            RankError: one is gone, or not ready in time.
        """
        if isinstance(self.control, Hub):
            self.control.wait_ready(timeout)
        else:
            self.control.report({"ready": True})

    def fail(self, exc: BaseException) -> None:
        """This rank cannot go on: tell the others why, and leave."""
        if isinstance(self.control, Spoke):
            self.control.report({"failed": f"{type(exc).__name__}: {exc}"})
        self.close()

    def close(self) -> None:
        """Rank 0: end the others. All: leave the group."""
        self._end()


def _end(group: Group, control: Hub | Spoke) -> None:
    if isinstance(control, Hub):
        control.close()
    group.close()


def check_world(size: int, device: str) -> Place | None:
    """Refuse a number of ranks that is not what was launched, or for which there are not enough GPUs.

    Raises:
        ParallelError: names both numbers.
    """
    place = Place.from_environment()
    if place is not None and place.size != size:
        raise ParallelError(
            f"tensor_parallel_size={size}: the launcher started {place.size} processes (WORLD_SIZE={place.size})"
        )
    if distributed().is_initialized():
        raise ParallelError(
            f"tensor_parallel_size={size}: torch.distributed is in use in this process; one tensor-parallel model at a "
            "time (close() the first), and no process group of your own"
        )
    kind, _, index = device.partition(":")
    if index:
        raise ParallelError(f"device={device!r}: ranks take one GPU each, from 0 on; say device={kind!r}")
    if kind not in ("cpu", "cuda"):
        raise ParallelError(f"tensor_parallel_size={size}: runs on cuda and cpu, not on device={device!r}")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size)) if place else size
    if kind == "cuda" and torch.cuda.device_count() < here:
        raise ParallelError(
            f"tensor_parallel_size={size}: needs {here} GPUs in this machine, which has {torch.cuda.device_count()}"
        )
    return place


def join(size: int, device: str, command: Sequence[str], options: str) -> Team:
    """Meet the other ranks.

    In a process of a launch this is one of them. In any other it becomes rank 0 and starts the others with
    ``command``; they find ``options`` by :func:`options_of_rank_0`.

    Args:
        size: ranks.
        device: ``cpu`` or ``cuda``.
        options: what the model is loaded with, as text; the same on all ranks.

    Raises:
        ParallelError: this cannot be launched.
        RankError: another rank did not come, died, or was started with other options.
    """
    place = check_world(size, device)
    mine = (
        torch.device(device, place.local_rank if place else 0) if device == "cuda" else torch.device(device)
    )
    if mine.type == "cuda":
        torch.cuda.set_device(mine)
    if place is not None:
        store = _meet(place)
        host = os.environ["MASTER_ADDR"]
        if SPAWNED not in os.environ:
            _agree(store, place, options)
        control = Hub(store, size, host, {}, MEET) if place.rank == 0 else Spoke(store, place.rank, MEET)
        return Team(_connect(store, place.rank, size, mine, control), control)
    store = distributed().TCPStore(
        "127.0.0.1", 0, size, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=MEET)
    )
    store.set("options", options)
    started = {rank: _start(command, rank, size, store.port) for rank in range(1, size)}
    try:
        hub = Hub(store, size, "127.0.0.1", started, MEET)
        return Team(_connect(store, 0, size, mine, hub), hub)
    except BaseException:
        for process in started.values():
            process.kill()
        end_all(list(started.values()))
        raise


def options_of_rank_0() -> str:
    """What :func:`join` was given by the process that started this one."""
    place = Place.from_environment()
    assert place is not None
    return str(_meet(place).get("options").decode())


def _start(command: Sequence[str], rank: int, size: int, port: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        SPAWNED: "1",
    }  # fmt: skip
    # A session of its own: an interrupt at the terminal reaches rank 0 alone, which then ends the others in order.
    return subprocess.Popen(
        list(command),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def _meet(place: Place) -> Any:
    """The store of the launch."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    wait = timedelta(seconds=MEET)
    try:
        if SPAWNED in os.environ:
            return distributed().TCPStore(address, int(port or 0), place.size, is_master=False, timeout=wait)
        store, _, _ = next(distributed().rendezvous("env://", place.rank, place.size, timeout=wait))
    except (RuntimeError, ValueError) as exc:
        reason = next(iter(str(exc).splitlines()), type(exc).__name__)
        raise RankError(
            f"rank {place.rank} of {place.size} finds no other at MASTER_ADDR={address} MASTER_PORT={port} ({reason})"
        ) from exc
    return store


def _agree(store: Any, place: Place, options: str) -> None:
    """All ranks of a launch must have the same options: rank 0's count."""
    if place.rank == 0:
        if store.add("models", 1) > 1:
            raise ParallelError(
                "a launch runs one tensor-parallel model: the other processes ended with the first"
            )
        store.set("options", options)
    elif (theirs := store.get("options").decode()) != options:
        raise RankError(f"rank {place.rank} was started with {options}, rank 0 with {theirs}")


def _connect(store: Any, rank: int, size: int, device: torch.device, control: Hub | Spoke) -> Group:
    """The group, made in a thread: nothing else gets free when another rank dies while they connect."""
    made: list[Group | Exception] = []

    def connect() -> None:
        try:
            made.append(Group(store, rank, size, device))
        except Exception as exc:
            made.append(exc)

    _wait(threading.Thread(target=connect, daemon=True), control.check)
    (result,) = made
    if isinstance(result, Exception):
        raise result
    control.abort, control.leave = result.abort, result.close
    return result


def _wait(thread: threading.Thread, check: Callable[[], None]) -> None:
    thread.start()
    while thread.is_alive():
        thread.join(0.05)
        check()
