"""Steps of one request as events, while it runs."""

from __future__ import annotations

from collections.abc import Iterator

from flash_dllm.engine.observe import SlotStep
from flash_dllm.engine.request import RequestError
from flash_dllm.loop import Loop
from flash_dllm.models.tokenizer import Tokenizer
from flash_dllm.outputs import StreamEvent
from flash_dllm.requests import Job
from flash_dllm.results import GrowingText, completion


def watch(loop: Loop, job: Job, tokenizer: Tokenizer | None, mask_id: int) -> Iterator[StreamEvent]:
    """Run a job of one answer; an event for each of its steps, then one with the finished answer.

    Closing the iterator early aborts the request. Other requests of the engine go on meanwhile.
    """
    if len(job.requests) != 1:
        raise RequestError(f"n={job.params.n}: a stream has one answer")
    request = job.requests[0]
    # A template's text grows in many places at once, so it is given whole at the end.
    growing = GrowingText(job, tokenizer) if tokenizer is not None and job.parts is None else None
    nfe = 0
    loop.submit(job, watch=True)
    try:
        while True:
            steps, loop.seen[request.id] = loop.seen[request.id], []
            for seen in steps:
                nfe += len(seen.passes)
                # It may have moved since that step; the slot of a finished request may have a new tenant already.
                slot = loop.engine.scheduler.slot_of(request.id)
                text = (
                    "" if growing is None or slot is None else growing.push(loop.engine.answer_prefix(slot))
                )
                yield _event(seen, text, nfe)
            # Steps that another caller of the engine ran meanwhile are reported before the end, too.
            if request.id in loop.finished and not loop.seen[request.id]:
                break
            if request.id not in loop.finished:
                loop.step()
        answer = completion(job, 0, loop.finished[request.id], tokenizer, mask_id)
        rest = growing.rest(answer.text) if growing else answer.text
        yield StreamEvent(request.id, rest, step=answer.steps, nfe=answer.nfe, output=answer)
    finally:
        loop.drop(job)


def _event(seen: SlotStep, text: str, nfe: int) -> StreamEvent:
    commits = seen.commits()
    return StreamEvent(
        seen.request_id,
        text,
        [m.pos for m in commits],
        [m.token for m in commits],
        [m.confidence for m in commits],
        [(m.pos, m.token, m.confidence) for m in seen.marks if m.state == "guess"],
        seen.step + 1,
        nfe,
    )
