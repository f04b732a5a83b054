"""A stand-in for a CUDA graph on the CPU: what was recorded plays again on the very tensors that it was recorded with.

Unlike running the step again, this shows what a graph would get wrong: a number that the host knew when the step was
recorded, a tensor that was allocated anew since, Python that runs once. Reads of the host and tensors made from its
numbers are errors while a step is recorded, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flash_dllm.core.step import StepRecord

READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal")


@contextmanager
def nothing_from_the_host() -> Iterator[None]:
    """A recorded step would copy what the host held when it was recorded."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a tensor was made from Python numbers in a steady step")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("tensor", "as_tensor", "from_numpy"):
            patch.setattr(torch, name, refuse)
        yield


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if str(func).startswith(READS):
            raise AssertionError(f"{func} reads the device in a recorded step")
        if str(func).startswith(("aten.index.", "aten.index_put")):
            assert all(t.dtype != torch.bool for t in _tensors(args[1])), "as many rows as are True"
        known = {t.untyped_storage().data_ptr() for t in _tensors((args, given))}
        out = func(*args, **given)
        # What is a view of, or was written into, what there was is up to date when it plays; the rest is copied there.
        fresh = [t for t in _tensors(out) if t.untyped_storage().data_ptr() not in known]
        self.calls.append((func, args, given, fresh))
        return out


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, dict):
        yield from _tensors(tuple(x.values()))
    elif isinstance(x, (list, tuple)):
        for each in x:
            yield from _tensors(each)


class Replayed:
    """A tape that plays the operations of ``step``."""

    def __init__(self, step: Callable[[], StepRecord]) -> None:
        self.dropped, recording = False, _Recording()
        with nothing_from_the_host(), torch.inference_mode(), recording:
            self._record = step()
        # Recording has run the step once.
        self._calls, self._ran = recording.calls, True

    def play(self) -> StepRecord:
        assert not self.dropped
        if self._ran:
            self._ran = False
            return self._record
        with torch.inference_mode():
            for func, args, kwargs, fresh in self._calls:
                again = func(*args, **kwargs)
                if fresh:
                    for old, new in zip(fresh, _tensors(again), strict=True):
                        old.copy_(new)
        return self._record

    def drop(self) -> None:
        self.dropped, self._calls = True, []
