"""A request on its way through the server: what it asks, what was sent, who hears of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from flash_dllm.engine.request import Request
from flash_dllm.models.tokenizer import Tokenizer
from flash_dllm.outputs import Completion
from flash_dllm.requests import Job
from flash_dllm.results import GrowingText
from flash_dllm.serve.errors import ServeError

Show = Literal["nothing", "text", "canvas"]


@dataclass(frozen=True)
class Progress:
    """New text of answer ``index`` that no later step changes, and what its step did to the canvas."""

    index: int
    text: str
    canvas: dict[str, Any] | None = None


@dataclass(frozen=True)
class Ended:
    """Answer ``index`` is there."""

    index: int
    completion: Completion


Event = Progress | Ended | ServeError
"""A ServeError ends the whole ticket."""


class TextChangedError(Exception):
    """A request was decoded again after a fault and came out differently from what its stream has sent."""


@dataclass(eq=False)
class Answer:
    """One answer of a ticket.

    Attributes:
        sent: text that the client has.
        replayed: text of the present run; after a fault a run starts again and repeats what was sent.
        span_only: the text is that of the job's only gap (prompt and suffix of a completion).
    """

    job: Job
    request: Request
    span_only: bool = False
    sent: str = ""
    replayed: str = ""
    growing: GrowingText | None = None
    done: bool = False

    @property
    def id(self) -> str:
        return self.request.id

    def begin(self, tokenizer: Tokenizer | None, stream: bool) -> None:
        """A run starts, for the first time or again."""
        # The text of a template grows in many places at once, so it is given whole at the end.
        grows = stream and tokenizer is not None and (self.job.parts is None or self.span_only)
        self.growing = GrowingText(self.job, tokenizer) if grows and tokenizer is not None else None
        self.replayed = ""

    def push(self, prefix: list[int]) -> str:
        """New text for the committed ``prefix`` of the answer."""
        if self.growing is None:
            return ""
        if self.job.parts is not None:
            size = self.job.gaps[0][1]
            ends = (i for i, token in enumerate(prefix[:size]) if token in self.job.stop_ids)
            prefix = prefix[: next(ends, size)]
        return self._beyond(self.replayed + self.growing.push(prefix))

    def rest(self, completion: Completion) -> str:
        """What is missing of the finished text."""
        return self._beyond(self.text(completion))

    def text(self, completion: Completion) -> str:
        """The text that the client gets."""
        if self.span_only and completion.spans is not None:
            return completion.spans[0]
        return completion.text

    def _beyond(self, text: str) -> str:
        self.replayed = text
        if not (text.startswith(self.sent) or self.sent.startswith(text)):
            raise TextChangedError
        new = text[len(self.sent) :]
        self.sent += new
        return new


@dataclass(eq=False)
class Ticket:
    """One HTTP request: one or several answers of one method.

    Attributes:
        deliver: hears each event, on the engine thread; it must not block.
        deadline: of ``time.monotonic``; ``allowed`` are the seconds it stands for.
    """

    method: str
    jobs: list[Job]
    show: Show
    deliver: Callable[[Event], None]
    allowed: float
    span_only: bool = False
    arrived: float = field(default_factory=time.monotonic)
    answers: list[Answer] = field(default_factory=list)
    open: bool = True
    first_text: float | None = None

    def __post_init__(self) -> None:
        self.answers = [Answer(job, request, self.span_only) for job in self.jobs for request in job.requests]

    @property
    def deadline(self) -> float:
        return self.arrived + self.allowed

    @property
    def left(self) -> int:
        """Answers that are still to come."""
        return sum(not answer.done for answer in self.answers)
