"""What the host sees of a step: a copy of the state on the host, which may be read while the next step runs."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_dllm.core.state import State, lines

from .request import Request

GRIDS = ("ids", "log_prob")


class Mirror:
    """The state after one step.

    On the CPU it is the state itself. Of a GPU it is a copy in pinned memory that is under way until :meth:`wait`
    returns, so that reading it waits for its own step and not for those that were launched since.

    Attributes:
        tenants: who sat in each slot when the step was launched; some may sit elsewhere by now.
        bad: [S] bool, the step's confidences were not finite.
        ids, committed_at, log_prob, pass_at: [S, L], and the lines, [S], as in the state.
    """

    ids: Tensor
    committed_at: Tensor
    log_prob: Tensor
    pass_at: Tensor
    phase: Tensor
    step: Tensor
    nfe: Tensor
    rows: Tensor
    stop_pos: Tensor
    bound: Tensor
    by_confidence: Tensor
    by_verify: Tensor
    unbounded: Tensor

    def __init__(self, state: State, copies: bool) -> None:
        self.tenants: list[Request | None] = []
        self._copies = copies
        self._done: torch.cuda.Event | None = None
        self._pinned = copies and state.device.type == "cuda"
        for name in GRIDS:
            setattr(self, name, self._like(getattr(state, name)))
        # Both stamps are one copy, and so are all lines of a dtype.
        self._stamps = self._like(state.stamps)
        self.pass_at, self.committed_at = self._stamps[..., : state.positions]
        self._packed = {dtype: self._like(block) for dtype, block in state.packed.items()}
        for name, line in lines(self._packed).items():
            setattr(self, name, line)
        self.bad = torch.empty(state.slots, dtype=torch.bool, pin_memory=self._pinned)

    def _like(self, source: Tensor) -> Tensor:
        """Room on the host for a copy, or the tensor itself where nothing is copied."""
        if not self._copies:
            return source
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=self._pinned)

    def look(self, state: State, bad: Tensor, tenants: list[Request | None]) -> None:
        """Start to copy the state as the work queued so far leaves it."""
        self.tenants = list(tenants)
        if not self._copies:
            self.bad = bad
            return
        for name in GRIDS:
            getattr(self, name).copy_(getattr(state, name), non_blocking=True)
        self._stamps.copy_(state.stamps, non_blocking=True)
        for dtype, block in self._packed.items():
            block.copy_(state.packed[dtype], non_blocking=True)
        self.bad.copy_(bad, non_blocking=True)
        if state.device.type == "cuda":
            self._done = torch.cuda.Event()
            self._done.record()

    def slot_of(self, request: Request) -> int | None:
        """Where ``request`` sat in the step, or None if it did not take part."""
        return next((slot for slot, tenant in enumerate(self.tenants) if tenant is request), None)

    def move(self, source: int, target: int) -> None:
        """The state has moved a canvas; a copy of it has not, the state itself has."""
        if not self._copies and self.tenants:
            self.tenants[target], self.tenants[source] = self.tenants[source], None

    def wait(self) -> None:
        """Until the copy is there."""
        if self._done is not None:
            self._done.synchronize()
