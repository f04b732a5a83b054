"""Ranks as threads of one process: cheap, and all of their states can be looked at."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flash_dllm.kernels.ranks import Recordings
from flash_dllm.models.layers import Model
from flash_dllm.models.load import Form, load_model
from flash_dllm.parallel import split, with_sums


class Hall:
    """Where threads meet; a sum is taken in the order of ranks, so all of them get the same bits."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.slots = (
            size,
            threading.Barrier(size, timeout=120),
            [torch.empty(0)] * size,
        )
        self.sums = self.gathers = 0
        self.largest = 0


class ThreadRanks:
    """One thread's side."""

    def __init__(self, hall: Hall, rank: int) -> None:
        self.hall, self.rank, self.size = hall, rank, hall.size
        self.holders: list[Recordings] = []

    def _all(self, x: Tensor) -> list[Tensor]:
        self.hall.slots[self.rank] = x.clone()
        self.hall.barrier.wait()
        seen = list(self.hall.slots)
        self.hall.barrier.wait()
        return seen

    def sum(self, x: Tensor) -> Tensor:
        self.hall.sums += self.rank == 0
        total, *others = self._all(x)
        for other in others:
            total = total + other
        return total

    def gather(self, x: Tensor) -> Tensor:
        self.hall.gathers += self.rank == 0
        self.hall.largest = max(self.hall.largest, x[0].numel() if x.shape[0] else 0)
        return torch.stack(self._all(x))

    def before_parting(self, holder: Recordings) -> Callable[[], None]:
        self.holders.append(holder)
        return partial(self.holders.remove, holder)


def on_ranks(size: int, work: Callable[[ThreadRanks], Any], hall: Hall | None = None) -> list[Any]:
    """``work`` on each rank; an exception of any of them is raised."""
    hall = hall or Hall(size)
    out: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                out[rank] = work(ThreadRanks(hall, rank))
        except BaseException as exc:
            errors.append(exc)
            hall.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return out


def part_of(folder: Path, ranks: ThreadRanks, **options: Any) -> Model:
    """A rank's part of a checkpoint."""
    form = Form(options.pop("matrix", None), partial(split, ranks=ranks))
    return with_sums(load_model(folder, form=form, **{"dtype": "float32", **options}))
