"""Drives an engine for its callers: several of them may wait for, watch or log requests of one engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from flash_dllm.core.step import StepRecord
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.observe import SlotStep, slot_steps
from flash_dllm.engine.request import Finished, Request
from flash_dllm.requests import Job
from flash_dllm.trace import TraceWriter, ranges


class Loop:
    """Submits jobs, runs steps and sorts what comes out by request id.

    Attributes:
        finished: canvases that ended and that nobody has collected yet.
        seen: steps of the watched requests, likewise.
        tracer: where steps are logged, or None.
        meter: called after each step with its record and seconds, or None; it must not read the record's tensors.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.finished: dict[str, Finished] = {}
        self.seen: dict[str, list[SlotStep]] = {}
        self.tracer: TraceWriter | None = None
        self.meter: Callable[[StepRecord, float], None] | None = None
        self._began = 0.0

    def submit(self, job: Job, watch: bool = False) -> None:
        """Queue every request of a job.

        Raises:
            RequestError: the engine refuses it; nothing of the job stays queued.
        """
        try:
            for request in job.requests:
                self.add(job, request, watch)
        except Exception:
            self.drop(job)
            raise

    def add(self, job: Job, request: Request, watch: bool = False) -> None:
        """Queue one request of a job (one of its own, or a fresh copy after a fault)."""
        self.engine.add(request)
        if watch:
            self.seen[request.id] = []
        if self.tracer is not None:
            masked = [i for i, hidden in enumerate(job.masked) if hidden]
            params = job.params.model_dump(exclude_unset=True, mode="json")
            self.tracer.request(request.id, job.ids, masked, params)

    def drop(self, job: Job) -> None:
        """Forget a job: abort what still runs, discard what nobody collected."""
        for request in job.requests:
            self.forget(request.id)

    def forget(self, request_id: str) -> None:
        """The same for one request."""
        self.engine.abort(request_id)
        self.finished.pop(request_id, None)
        self.seen.pop(request_id, None)

    def step(self) -> None:
        """One step of the engine."""
        self._began = time.perf_counter()
        # Looking at a step copies it to the host, so nobody looks unless asked to.
        self.engine.observer = self._look if self.seen or self.tracer else None
        steps = self.engine.totals.steps
        ended = self.engine.step()
        if self.meter is not None and self.engine.last is not None and self.engine.totals.steps > steps:
            self.meter(self.engine.last, time.perf_counter() - self._began)
        for done in ended:
            self.finished[done.request.id] = done
            if self.tracer is not None:
                self.tracer.end(
                    done.request.id, reason=done.reason, steps=done.steps, nfe=done.nfe, rows=done.rows,
                    seconds=round(done.seconds, 6), ids=done.ids, error=done.error,
                )  # fmt: skip

    def _look(self, engine: Engine, record: StepRecord) -> None:
        steps = slot_steps(engine, record)
        ms = 1000 * (time.perf_counter() - self._began)
        for step in steps:
            if step.request_id in self.seen:
                self.seen[step.request_id].append(step)
            if self.tracer is not None:
                marks = [[m.pos, m.token, m.confidence, m.state] for m in step.marks]
                self.tracer.step(step.request_id, step.slot, step.step, ms, _passes(step), marks)


def _passes(step: SlotStep) -> list[dict[str, Any]]:
    return [
        {"kind": p.kind, "full": p.full, "rows": ranges(p.positions), "extra": [list(row) for row in p.extra]}
        for p in step.passes
    ]
