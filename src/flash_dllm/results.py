"""From finished canvases to answers, and the text of a canvas that is still growing."""

from __future__ import annotations

from collections.abc import Sequence

from flash_dllm.engine.engine import tokens_before
from flash_dllm.engine.request import Finished
from flash_dllm.infill import Gap
from flash_dllm.models.tokenizer import StableDecoder, Tokenizer
from flash_dllm.outputs import Certificate, Completion
from flash_dllm.requests import Job


def raw_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Text with special tokens, in which stop strings are looked for."""
    return tokenizer.decode(ids, skip_special=False)


def completion(job: Job, index: int, done: Finished, tokenizer: Tokenizer | None, mask_id: int) -> Completion:
    """The answer that a finished canvas holds."""
    if job.parts is not None:
        return _filled(job, index, done, tokenizer)
    first = job.first
    ids = done.ids[first : done.end]
    text = ""
    if isinstance(done.stop_reason, str):
        assert tokenizer is not None
        text = _cut(job, done, tokenizer, mask_id, len(ids))
    elif tokenizer is not None and done.error is None:
        text = tokenizer.decode(ids, job.params.skip_special_tokens)
    return _answer(
        index, done, text, ids, list(range(first, first + len(ids))), done.reason, job.params.logprobs
    )


def _answer(
    index: int, done: Finished, text: str, ids: list[int], places: list[int], reason: str, logprobs: bool
) -> Completion:
    failed = done.error is not None
    return Completion(
        index=index,
        text=text,
        token_ids=[] if failed else ids,
        finish_reason=reason,
        stop_reason=done.stop_reason if reason == "stop" else None,
        steps=done.steps,
        nfe=done.nfe,
        tpf=0.0 if failed or not done.nfe else len(ids) / done.nfe,
        rows=done.rows,
        seconds=done.seconds,
        queued=done.queued,
        log_probs=[done.log_probs[p] for p in places] if logprobs and not failed else None,
        passes=[done.passes[p] for p in places] if logprobs and not failed else None,
        certificate=None if failed else _certificate(done),
        error=done.error,
    )


def _certificate(done: Finished) -> Certificate | None:
    """The sum of the step bounds, where the method has one."""
    if done.assumes is None:
        return None
    return Certificate(
        total_variation=min(1.0, done.bound),
        by_confidence=done.by_confidence - done.unbounded,
        by_verification=done.by_verify,
        unbounded=done.unbounded,
        vacuous=done.bound >= 1,
        assumes=done.assumes,
    )


def _cut(job: Job, done: Finished, tokenizer: Tokenizer, mask_id: int, kept: int) -> str:
    """Text up to the stop string, which may begin inside a token: ``kept`` tokens and a part of the next."""
    assert isinstance(done.stop_reason, str)
    prefix = committed_prefix(done.ids[job.first :], mask_id, job)
    raw = raw_text(tokenizer, prefix)
    whole = raw_text(tokenizer, prefix[:kept])
    text = tokenizer.decode(prefix[:kept], job.params.skip_special_tokens)
    return text + raw[len(whole) : raw.index(done.stop_reason)]


def committed_prefix(ids: Sequence[int], mask_id: int, job: Job) -> list[int]:
    """Answer tokens up to the first that is still MASK or a stop token, behind which an answer has no text."""
    ends = {mask_id, *job.stop_ids}
    size = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    return list(ids[:size])


def _filled(job: Job, index: int, done: Finished, tokenizer: Tokenizer | None) -> Completion:
    """The whole text of a template. A gap with max_tokens is cut at the first stop token in it."""
    assert job.parts is not None
    spans: list[str] = []
    pieces: list[str] = []
    places: list[int] = []
    ended = False
    gaps = iter(job.gaps)

    def text(ids: list[int]) -> str:
        if tokenizer is None or done.error:
            return ""
        return tokenizer.decode(ids, job.params.skip_special_tokens)

    for part in job.parts:
        if not isinstance(part, Gap):
            pieces.append(part if isinstance(part, str) else text(part))
            continue
        start, size = next(gaps)
        span = done.ids[start : start + size]
        kept = _span_length(part, span, job.stop_ids)
        ended |= kept < size
        places += range(start, start + kept)
        spans.append(text(span[:kept]))
        pieces.append(spans[-1])
    reason = "error" if done.error else "stop" if ended else "length"
    ids = [done.ids[p] for p in places]
    answer = _answer(index, done, "".join(pieces), ids, places, reason, job.params.logprobs)
    return Completion(**{**answer.__dict__, "spans": spans, "stop_reason": None})


def _span_length(gap: Gap, span: list[int], stop_ids: tuple[int, ...]) -> int:
    if not gap.open_ended:
        return len(span)
    return next((i for i, token in enumerate(span) if token in stop_ids), len(span))


class GrowingText:
    """Pieces of an answer's text that no later step changes, for streaming.

    Held back: characters whose bytes are not all there, and an end that a stop string may begin with.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._stops = tokenizer, job.params.stop
        self._decoder = StableDecoder(tokenizer, job.params.skip_special_tokens)
        self._given = 0

    def push(self, prefix: list[int]) -> str:
        """New text for the committed prefix of the answer."""
        if self._stops:
            raw = raw_text(self._tokenizer, prefix).rstrip("\ufffd")
            held = max(_overlap(raw, stop) for stop in self._stops)
            decode = self._tokenizer
            prefix = prefix[: tokens_before(lambda ids: raw_text(decode, ids), prefix, len(raw) - held)]
        piece = self._decoder.push(prefix)
        self._given += len(piece)
        return piece

    def rest(self, text: str) -> str:
        """What is missing of the finished ``text``."""
        return text[self._given :]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with, all of ``stop`` included."""
    return next((n for n in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:n])), 0)
