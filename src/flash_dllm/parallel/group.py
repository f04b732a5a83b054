"""Sums and exchanges between ranks, over torch.distributed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flash_dllm.kernels.ranks import Recordings

from .errors import ParallelError

STALL = 300.0
"""Seconds after which a sum that not all ranks came to is an error. A rank that dies is noticed at once."""

BREAK = 10.0
"""Seconds in which NCCL must break off its sums, once nothing holds them."""


def distributed() -> Any:
    """``torch.distributed``, which some builds of torch lack.

    Raises:
        ParallelError: this one does.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise ParallelError("tensor_parallel_size: this build of torch has no torch.distributed")
    return dist


class Group:
    """The ranks of one model: NCCL between GPUs, gloo between CPUs.

    Both reduce each number on one rank and hand it to the others, so that results are bit-identical.

    Args:
        store: where the processes find each other.
        rank, size: of this process.
        device: of this rank's weights.
    """

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        dist = distributed()
        self.rank, self.size, self.device = rank, size, device
        # Not weakly: the collector clears weak references before it has the ranks part.
        self._holders: dict[int, Recordings] = {}
        self._broken = False
        self._reduce = dist.all_reduce
        # Renamed in torch 2.13.
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", store=dist.PrefixStore("flash-dllm", store),
            rank=rank, world_size=size, timeout=timedelta(seconds=STALL), **options,
        )  # fmt: skip

    def sum(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place where ``x`` is contiguous."""
        x = x.contiguous()
        self._reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """``x`` of every rank, [size, *x.shape]."""
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self._gather(out, x.contiguous())
        return out.view(self.size, *x.shape)

    def before_parting(self, holder: Recordings) -> Callable[[], None]:
        """``holder`` forgets its recordings before this group is left or broken off; returns what withdraws it."""
        self._holders[id(holder)] = holder
        return partial(self._withdraw, id(holder))

    def _withdraw(self, key: int) -> None:
        self._holders.pop(key, None)

    def abort(self) -> None:
        """Break off what waits for a rank that is gone; any thread may call this."""
        if self.device.type == "cuda":
            # A gloo call ends by itself when a connection breaks; a NCCL kernel would wait for good. NCCL first frees
            # its kernels and then waits for the graphs that hold them, so those go meanwhile.
            self._broken = True
            breaking = threading.Thread(target=self._break_off, daemon=True)
            breaking.start()
            self._forget()
            breaking.join(BREAK)

    def close(self) -> None:
        """Leave the group."""
        self._forget()
        if not distributed().is_initialized():
            return
        if self._broken:
            # Nobody answers any more, and NCCL may wait all the same.
            leaving = threading.Thread(target=self._leave, daemon=True)
            leaving.start()
            leaving.join(BREAK)
        else:
            self._leave()

    def _leave(self) -> None:
        with contextlib.suppress(Exception):
            distributed().destroy_process_group()

    def _break_off(self) -> None:
        with contextlib.suppress(Exception):
            distributed().group.WORLD._get_backend(self.device).abort()

    def _forget(self) -> None:
        for holder in list(self._holders.values()):
            # One that fails must not keep the others, or the group, from ending.
            with contextlib.suppress(Exception):
                holder.forget()
