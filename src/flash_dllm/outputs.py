"""What a request gives back."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Certificate:
    """A bound on how far an answer is from the model's own distribution (docs/verify.md).

    Attributes:
        total_variation: min(1, sum of the step bounds).
        by_confidence, by_verification, unbounded: answer tokens by kind of bound.
        vacuous: the sum reached 1.
        assumes: what the bound takes as given.
    """

    total_variation: float
    by_confidence: int
    by_verification: int
    unbounded: int
    vacuous: bool
    assumes: str


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        text: decoded answer, cut at the stop string or stop token.
        token_ids: the answer's tokens up to, without, the first stop token or cut.
        finish_reason: ``stop`` (a stop token or string), ``length``, or ``error``.
        stop_reason: the stop string or token id that ended it.
        steps, nfe: commit rounds, and forward passes in which a row of this request was read.
        tpf: answer tokens per forward pass.
        rows: rows recomputed over all passes.
        seconds: from the request's first pass to its end; ``queued`` before that.
        log_probs, passes: log confidence at commit and the pass of the commit of each token, where asked for.
        certificate: bound on the distance from the model's own distribution, where the method has one.
        spans: for an infilled template, the text of each gap; ``text`` is then the whole filled text.
        error: what went wrong with this request alone.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    steps: int = 0
    nfe: int = 0
    tpf: float = 0.0
    rows: int = 0
    seconds: float = 0.0
    queued: float = 0.0
    log_probs: list[float] | None = None
    passes: list[int] | None = None
    certificate: Certificate | None = None
    spans: list[str] | None = None
    error: str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its answers.

    ``canvas_ids`` are the ids of the whole canvas of the first answer, prompt included. ``prompt`` is the
    text as it was given (None for token ids), for a chat the rendered conversation.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    canvas_ids: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.outputs[0].text

    @property
    def spans(self) -> list[str] | None:
        """The first answer's gap texts, for an infilled template."""
        return self.outputs[0].spans

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class StreamEvent:
    """What one step changed, in the order of the steps.

    Attributes:
        text: new text of the committed prefix, which later steps do not change; joined, the answer's text.
        positions, tokens, confidences: what was committed in this step, anywhere on the canvas.
        guesses: (position, token, confidence) of the candidates that were not committed.
        step, nfe: commit rounds and forward passes so far.
        output: the finished answer, in the last event only (which has no positions).
    """

    request_id: str
    text: str
    positions: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    guesses: list[tuple[int, int, float]] = field(default_factory=list)
    step: int = 0
    nfe: int = 0
    output: Completion | None = None
