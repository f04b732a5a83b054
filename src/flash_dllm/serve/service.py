"""The engine thread and its door: what comes in from any thread, what is refused, how it ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal

from flash_dllm.llm import LLM
from flash_dllm.serve.errors import ServeError, busy, dead, draining, refused, too_late
from flash_dllm.serve.lane import EngineDeadError, Lane
from flash_dllm.serve.metrics import Metrics
from flash_dllm.serve.ticket import Ticket

log = logging.getLogger("flash_dllm.serve")
State = Literal["new", "ready", "draining", "failed", "closed"]
LONGEST_WAIT = 60.0
"""The most seconds that Retry-After names."""


class Service:
    """Owns the engines of one server and the thread that runs them.

    Every method (``cache+decoding``) has an engine of its own on the same weights; a step is of one engine, so a
    batch holds one method. Engines that have work take turns.

    Args:
        llms: engines by the name under which a request picks one; the first is the default.
        models: names that the model goes by; by default the one it was loaded under.
        max_queue: answers that may wait while all slots are taken.
        timeout: seconds after which a request is given up; a request may ask for fewer.

    Thread-safe, but for ``llms``, which belong to the engine thread from :meth:`start` on.
    """

    def __init__(
        self,
        llms: Mapping[str, LLM],
        *,
        models: tuple[str, ...] = (),
        max_queue: int = 256,
        timeout: float = 600.0,
    ) -> None:
        self.llms = dict(llms)
        self.default = next(iter(self.llms))
        self.models = models or (self.llms[self.default].loaded.name,)
        self.max_queue, self.timeout = max_queue, timeout
        self.metrics = Metrics()
        self.created = int(time.time())
        self.reason: str | None = None
        self._state: State = "new"
        self._wake = threading.Condition()
        self._inbox: list[tuple[Literal["submit", "drop"], Ticket]] = []
        self._unfinished = dict.fromkeys(self.llms, 0)
        self._idle = threading.Event()
        self._idle.set()
        self.lanes = {
            name: Lane(name, llm, self.metrics, self._retirer(name)) for name, llm in self.llms.items()
        }
        self._thread = threading.Thread(target=self._work, name="flash-dllm-engine", daemon=True)

    @property
    def state(self) -> State:
        """``ready`` takes requests; ``draining`` only finishes what it has; ``failed`` never answers again."""
        return self._state

    @property
    def healthy(self) -> bool:
        """Whether the engine works."""
        return self._state in ("ready", "draining")

    @property
    def unfinished(self) -> int:
        """Answers that are queued or being decoded."""
        with self._wake:
            return sum(self._unfinished.values())

    @property
    def waiting(self) -> int:
        """Answers that find no free slot."""
        with self._wake:
            return self._waiting()

    def start(self) -> None:
        """Start the engine thread; a second call does nothing."""
        with self._wake:
            if self._state != "new":
                return
            self._state = "ready"
            self.metrics.healthy.set(1)
        self._thread.start()

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket.

        Raises:
            ServeError: the queue is full, a value cannot be served, or the service is ending or has failed.
        """
        engine = self.llms[ticket.method].engine
        for job in ticket.jobs:
            for request in job.requests:
                engine.check(request)
        count = len(ticket.answers)
        with self._wake:
            self._admit(ticket, count)
            self._unfinished[ticket.method] += count
            self._idle.clear()
            self._inbox.append(("submit", ticket))
            self._wake.notify()

    def abort(self, ticket: Ticket) -> None:
        """Forget a ticket: nobody waits for it any more. Its slots are free before the next step."""
        with self._wake:
            self._inbox.append(("drop", ticket))
            self._wake.notify()

    def check_model(self, name: str) -> None:
        """Refuse a model that is not served.

        Raises:
            ServeError: 404.
        """
        if name not in self.models:
            known = ", ".join(self.models)
            message = f"model {name!r} is not served here; models: {known}"
            raise ServeError(404, message, code="model_not_found", outcome="refused", param="model")

    def pick(self, method: str | None) -> str:
        """The method of a request.

        Raises:
            ServeError: the server has no method of that name.
        """
        if method is None:
            return self.default
        if method not in self.llms:
            raise refused(
                f"method {method!r} is not served here; methods: {', '.join(self.llms)}", "diffusion.method"
            )
        return method

    def allowed(self, timeout: float | None) -> float:
        """Seconds that a request may take.

        Raises:
            ServeError: more than the server allows.
        """
        if timeout is not None and timeout > self.timeout:
            raise refused(
                f"timeout={timeout:g}: this server allows at most {self.timeout:g} seconds",
                "diffusion.timeout",
            )
        return self.timeout if timeout is None else timeout

    def drain(self) -> None:
        """Take nothing new from now on; what runs is finished."""
        with self._wake:
            if self._state == "ready":
                self._state = "draining"

    def wait_idle(self, seconds: float) -> bool:
        """Wait until nothing is unfinished; False if that took longer."""
        return self._idle.wait(seconds)

    def close(self, seconds: float = 10.0) -> None:
        """End the engine thread. Whoever still waits is answered with an error."""
        with self._wake:
            running = self._state in ("ready", "draining")
            if self._state != "failed":
                self._state = "closed"
                self.metrics.healthy.set(0)
            self._wake.notify()
        if running:
            self._thread.join(seconds)

    def _admit(self, ticket: Ticket, count: int) -> None:
        if self._state == "failed":
            raise dead(self.reason or "unknown")
        if self._state != "ready":
            raise draining()
        slots = self.llms[ticket.method].engine.slots
        if count > slots + self.max_queue:
            raise refused(
                f"{count} answers in one request; this server holds {slots + self.max_queue} at most", "n"
            )
        free = max(0, slots - self._unfinished[ticket.method])
        waiting = self._waiting()
        if count > free and waiting + count - free > self.max_queue:
            wait = waiting * self.lanes[ticket.method].pace / slots
            raise busy(waiting, self.max_queue, min(LONGEST_WAIT, max(1.0, wait)))

    def _waiting(self) -> int:
        return sum(max(0, n - self.llms[name].engine.slots) for name, n in self._unfinished.items())

    def _retirer(self, name: str) -> Callable[[int], None]:
        def retire(count: int) -> None:
            with self._wake:
                self._unfinished[name] -= count
                if not any(self._unfinished.values()):
                    self._idle.set()

        return retire

    def _work(self) -> None:
        try:
            while self._turn():
                pass
            self._abandon(draining())
        except EngineDeadError as exc:
            self._die(str(exc))
        except BaseException as exc:
            log.critical("the engine thread has failed", exc_info=exc)
            self._die(type(exc).__name__)

    def _turn(self) -> bool:
        """Hear what came in, then one step of each engine that has work; False at the end."""
        with self._wake:
            while not (self._inbox or self._state == "closed" or any(x.busy for x in self.lanes.values())):
                self._wake.wait()
            if self._state == "closed":
                return False
            inbox, self._inbox = self._inbox, []
        for action, ticket in inbox:
            lane = self.lanes[ticket.method]
            if action == "submit":
                lane.submit(ticket)
            else:
                lane.drop(ticket)
        now = time.monotonic()
        for lane in self.lanes.values():
            for ticket in lane.tickets:
                if now > ticket.deadline:
                    lane.fail(ticket, too_late(ticket.allowed))
            if lane.busy:
                lane.step()
            lane.gauge()
        self.metrics.waiting.set(self.waiting)
        return True

    def _die(self, reason: str) -> None:
        log.critical("the engine is beyond repair: %s", reason)
        with self._wake:
            self._state, self.reason = "failed", reason
            self.metrics.healthy.set(0)
        self._abandon(dead(reason))

    def _abandon(self, error: ServeError) -> None:
        """Answer everybody with an error, without touching the engines."""
        with self._wake:
            inbox, self._inbox = self._inbox, []
        for action, ticket in inbox:
            if action == "submit":
                self.lanes[ticket.method].submit(ticket)
        for lane in self.lanes.values():
            lane.abandon(error)
