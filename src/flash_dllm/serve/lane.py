"""One method's engine and the tickets that wait for it. Runs on the engine thread alone."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from flash_dllm.core.state import Canvas
from flash_dllm.engine.observe import SlotStep
from flash_dllm.engine.request import Finished, Request
from flash_dllm.llm import LLM
from flash_dllm.results import completion
from flash_dllm.serve.errors import ServeError, failed
from flash_dllm.serve.metrics import Metrics
from flash_dllm.serve.ticket import Answer, Ended, Event, Progress, TextChangedError, Ticket
from flash_dllm.trace import ranges

log = logging.getLogger("flash_dllm.serve")
Seat = tuple[Ticket, Answer]


class EngineDeadError(Exception):
    """The engine cannot decode any more, whatever the request."""


class Lane:
    """Seats the answers of tickets in the slots of one engine and reports what its steps do.

    A step that raises takes no batch mate down: every seated answer starts again, alone in the engine and one
    after the other. One that makes a step raise again is answered with an error; the others come out as if
    nothing had happened, since an answer depends on its own seed and canvas only. Then the batch goes on.

    Args:
        retired: called when answers of a ticket need nothing more, with their number.
    """

    def __init__(self, name: str, llm: LLM, metrics: Metrics, retired: Callable[[int], None]) -> None:
        self.name, self.llm, self.metrics, self._retired = name, llm, metrics, retired
        self.loop = llm.loop
        self.loop.meter = lambda record, seconds: metrics.step(name, record, seconds)
        self.waiting: deque[Seat] = deque()
        self.seated: dict[str, Seat] = {}
        self.suspects: deque[Seat] = deque()
        self.alone = False
        self.pace = 1.0  # seconds of an answer, lately
        metrics.slots.labels(name).set(llm.engine.slots)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.seated or self.suspects)

    @property
    def tickets(self) -> list[Ticket]:
        """Everybody who waits for something of this lane, once each."""
        seats = (*self.seated.values(), *self.suspects, *self.waiting)
        return list({id(ticket): ticket for ticket, _ in seats}.values())

    def submit(self, ticket: Ticket) -> None:
        """Queue the answers of a ticket."""
        if ticket.open:
            self.waiting.extend((ticket, answer) for answer in ticket.answers)

    def drop(self, ticket: Ticket) -> None:
        """Forget a ticket; its slots are free for the next step."""
        if not ticket.open:
            return
        ticket.open = False
        for answer in ticket.answers:
            if self.seated.pop(answer.id, None) is not None:
                self.loop.forget(answer.id)
        for queue in (self.waiting, self.suspects):
            kept = [seat for seat in queue if seat[0] is not ticket]
            queue.clear()
            queue.extend(kept)
        self._retired(ticket.left)

    def fail(self, ticket: Ticket, error: ServeError) -> None:
        """End a ticket with an error."""
        if ticket.open:
            self.drop(ticket)
            self._tell(ticket, error)

    def abandon(self, error: ServeError) -> None:
        """End every ticket with an error and leave the engine as it is."""
        for ticket in self.tickets:
            ticket.open = False
            self._retired(ticket.left)
            self._tell(ticket, error)
        self.seated.clear()
        self.suspects.clear()
        self.waiting.clear()

    def step(self) -> None:
        """Seat what waits, run one step, report.

        Raises:
            EngineDeadError: no step will succeed any more.
        """
        self._seat()
        try:
            self.loop.step()
        except Exception as exc:
            self._fault(exc)
            return
        finally:
            self.gauge()
        self._report()

    def gauge(self) -> None:
        """Put the state of the slots into the metrics."""
        engine = self.llm.engine
        self.metrics.busy.labels(self.name).set(len(engine.scheduler.busy))
        self.metrics.cache_bytes.labels(self.name).set(engine.decoder.ctx.kv.nbytes)

    def _seat(self) -> None:
        if self.suspects and not self.seated:
            self.alone = True
            self._start(*self.suspects.popleft())
        if self.alone:
            self.alone = bool(self.seated)
        if self.alone or self.suspects:
            return
        scheduler = self.llm.engine.scheduler
        free = scheduler.free
        while self.waiting and (needed := self.waiting[0][1].request.slots_needed) <= free:
            free -= needed
            self._start(*self.waiting.popleft())

    def _start(self, ticket: Ticket, answer: Answer) -> None:
        answer.begin(self.llm.tokenizer, ticket.show != "nothing")
        self.seated[answer.id] = (ticket, answer)
        try:
            # A copy: the engine changes a request, and a fault may need it again as it was.
            self.loop.add(answer.job, replace(answer.request), watch=ticket.show == "canvas")
        except Exception as exc:
            log.error("%s cannot seat an answer", self.name, exc_info=exc)
            self.fail(ticket, failed(_reason(exc)))
            return
        if ticket.show == "canvas":
            canvas = {"event": "start", **geometry(answer.job.masked)}
            self._tell(ticket, Progress(ticket.answers.index(answer), "", canvas))

    def _report(self) -> None:
        scheduler = self.llm.engine.scheduler
        slots = {r.id: s for s in scheduler.main_slots() if (r := scheduler.seated[s]) is not None}
        for name, (ticket, answer) in list(self.seated.items()):
            if name not in self.seated:
                continue  # its ticket failed a moment ago, by another of its answers
            try:
                if name in slots:
                    self._progress(ticket, answer, slots[name])
                elif name in self.loop.finished:
                    self._finish(ticket, answer)
            except TextChangedError:
                self.fail(ticket, failed("a fault interrupted the answer, and decoded again it differs"))
            except Exception as exc:
                log.error("an answer of %s cannot be reported", self.name, exc_info=exc)
                self.fail(ticket, failed(_reason(exc)))

    def _progress(self, ticket: Ticket, answer: Answer, slot: int) -> None:
        if ticket.show == "nothing":
            return
        text = answer.push(self.llm.engine.answer_prefix(slot)) if answer.growing else ""
        self._show(ticket, answer, text)

    def _show(self, ticket: Ticket, answer: Answer, text: str) -> None:
        """Send the steps that the client wants to see, and new text if there is any."""
        if text and ticket.first_text is None:
            ticket.first_text = time.monotonic() - ticket.arrived
            self.metrics.first_text.labels(self.name).observe(ticket.first_text)
        index = ticket.answers.index(answer)
        steps = self.loop.seen.get(answer.id, [])
        for step in steps[:-1]:
            self._tell(ticket, Progress(index, "", self._canvas(step)))
        if steps:
            self._tell(ticket, Progress(index, text, self._canvas(steps[-1])))
            self.loop.seen[answer.id] = []
        elif text:
            self._tell(ticket, Progress(index, text))

    def _finish(self, ticket: Ticket, answer: Answer) -> None:
        llm = self.llm
        done: Finished = self.loop.finished[answer.id]
        index = answer.job.requests.index(answer.request)
        result = completion(answer.job, index, done, llm.tokenizer, llm.mask_id)
        if result.error is not None:
            self.fail(ticket, failed(result.error))
            return
        if ticket.show != "nothing":
            self._show(ticket, answer, answer.rest(result))
        self.loop.forget(answer.id)
        del self.seated[answer.id]
        answer.done = True
        self.pace += (result.seconds - self.pace) / 8
        self.metrics.answer(self.name, result, len(answer.job.prompt_ids))
        self._tell(ticket, Ended(ticket.answers.index(answer), result))
        self._retired(1)
        if not ticket.left:
            ticket.open = False

    def _canvas(self, step: SlotStep) -> dict[str, Any]:
        tokenizer = self.llm.tokenizer
        marks = step.marks
        return {
            "event": "step",
            "step": step.step + 1,
            "positions": [m.pos for m in marks],
            "tokens": [m.token for m in marks],
            "texts": [tokenizer.decode([m.token], False) for m in marks] if tokenizer else None,
            "confidences": [round(m.confidence, 6) if math.isfinite(m.confidence) else None for m in marks],
            "states": [m.state for m in marks],
            "passes": [{"kind": p.kind, "full": p.full, "rows": ranges(p.positions)} for p in step.passes],
        }

    def _tell(self, ticket: Ticket, event: Event) -> None:
        try:
            ticket.deliver(event)
        except RuntimeError:
            # The event loop of the client's connection is gone; so is the client.
            self.drop(ticket)

    def _fault(self, exc: Exception) -> None:
        """Clean up after a step that raised; see the class."""
        log.error("a step of %s raised; its answers start again, one at a time", self.name, exc_info=exc)
        self.metrics.faults.labels(self.name).inc()
        if isinstance(exc, torch.OutOfMemoryError) and torch.cuda.is_available():
            torch.cuda.empty_cache()
        seats = list(self.seated.values())
        self.seated.clear()
        try:
            self.llm.engine.reset()
        except Exception as again:
            self._keep(seats)
            raise EngineDeadError(f"{type(exc).__name__}; clearing its slots raised too") from again
        for _, answer in seats:
            self.loop.forget(answer.id)
        if not self.alone:
            self.suspects.extend(seats)
            return
        self.alone = False
        ((ticket, _),) = seats
        self.fail(ticket, failed(_reason(exc)))
        self._probe()

    def _keep(self, seats: list[Seat]) -> None:
        """Leave the tickets where whoever ends them finds them."""
        self.suspects.extendleft(reversed(seats))

    def _probe(self) -> None:
        """Decode one token of a harmless canvas: tells a bad request from an engine that is beyond repair."""
        engine, mask = self.llm.engine, self.llm.mask_id
        token = next(i for i in range(2) if i != mask)
        engine.add(Request("probe", Canvas([token, mask], [False, True])))
        try:
            while not engine.idle:
                ended = engine.step()
                if any(done.error for done in ended):
                    raise EngineDeadError("even a harmless request gives non-finite logits")
        except EngineDeadError:
            raise
        except Exception as exc:
            raise EngineDeadError(f"even a harmless request raises {type(exc).__name__}") from exc


def geometry(masked: list[bool]) -> dict[str, Any]:
    """Length of a canvas and the positions to fill in, as [start, end) pairs."""
    return {"length": len(masked), "masked": ranges(i for i, hidden in enumerate(masked) if hidden)}


def _reason(exc: Exception) -> str:
    if isinstance(exc, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(exc):
        return "out of memory while decoding this request alone; ask for fewer tokens"
    return f"the engine failed on this request, alone and again: {type(exc).__name__}"
