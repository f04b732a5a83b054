"""A request as the engine sees it: token ids in, token ids out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from flash_dllm.core.state import Canvas
from flash_dllm.errors import FlashDLLMError


class RequestError(FlashDLLMError):
    """A request that cannot be served; the message names the value that is wrong."""


@dataclass
class Request:
    """One canvas to fill.

    Attributes:
        id: unique in the engine.
        canvas: ids and mask of the whole canvas, and its numbers.
        shadow: the unconditional canvas of a guided request.
        stop_strings: texts that end the answer.
        partials: report commits of every step.
    """

    id: str
    canvas: Canvas
    shadow: Canvas | None = None
    stop_strings: tuple[str, ...] = ()
    partials: bool = False
    arrived: float = field(default_factory=time.perf_counter)
    started: float | None = None

    @property
    def slots_needed(self) -> int:
        return 1 if self.shadow is None else 2


@dataclass
class Finished:
    """How a canvas ended.

    ``ids`` are the ids of the whole canvas (MASK where nothing was decoded); ``log_probs`` and ``passes`` run over
    the canvas likewise. ``end`` is the first position past the answer. ``notes`` is what the rule reports beside
    (``guide_passes`` of ``guided``).
    """

    request: Request
    ids: list[int]
    end: int
    reason: str
    stop_reason: str | int | None
    steps: int
    nfe: int
    rows: int
    seconds: float
    queued: float
    log_probs: list[float]
    passes: list[int]
    bound: float
    by_confidence: int
    by_verify: int
    unbounded: int = 0
    assumes: str | None = None
    error: str | None = None
    notes: dict[str, float] = field(default_factory=dict)
