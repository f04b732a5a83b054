"""Rows through one engine: as many at a time as keep its slots busy, answers as they are finished."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from flash_dllm.llm import LLM
from flash_dllm.options import check_options
from flash_dllm.outputs import Completion
from flash_dllm.params import SamplingParams
from flash_dllm.requests import Job
from flash_dllm.results import completion
from flash_dllm.scale.rows import BadRow, Row, RowError, reason_of

Answer = dict[str, Any]
"""A row of the output."""
Pair = tuple[Row, Job]
FAILURES = 3
"""Rows on which the engine fails one after the other, each alone, before it is taken to be the engine's fault."""


class Answerer:
    """Answers rows with the engine of an ``llm``, which nobody else uses meanwhile.

    A text prompt is asked through the model's chat template if it has one; ``raw`` continues it as it is.

    Raises:
        OptionError: ``params``, which hold for every row, do not fit the method.
    """

    def __init__(self, llm: LLM, params: SamplingParams, raw: bool = False) -> None:
        # A wrong option of the run would make every row a bad one.
        check_options(params, llm.method)
        self.llm, self.params, self.raw = llm, params, raw
        self._loop = llm.loop
        self._failures = 0

    def answers(self, rows: Iterable[Row]) -> Iterator[Answer | BadRow]:
        """What becomes of each row, in order of completion. Rows are taken as slots become free.

        Closing the iterator early aborts what runs. A step that raises costs the row that makes it raise again alone.

        Raises:
            Exception: the engine itself does not work.
        """
        source = iter(rows)
        waiting: list[Pair] = []
        # Twice the slots, so that a slot that becomes free finds the next row checked already.
        limit = 2 * self.llm.max_num_seqs
        try:
            while True:
                while len(waiting) < limit and (row := next(source, None)) is not None:
                    try:
                        job = self._job(row)
                        self._loop.submit(job)
                    except Exception as exc:  # whatever one row does, the others are answered
                        yield BadRow(row.id, row.where, reason_of(exc), row.record())
                    else:
                        waiting.append((row, job))
                if not waiting:
                    return
                try:
                    self._loop.step()
                except Exception:
                    self._clear(waiting)
                    failed, waiting = waiting, []
                    yield from (self._alone(row) for row, _ in failed)
                    continue
                ended = [self._ended(job) for _, job in waiting]
                ready = [self._collect(*pair) for pair, over in zip(waiting, ended, strict=True) if over]
                waiting = [pair for pair, over in zip(waiting, ended, strict=True) if not over]
                yield from ready
        finally:
            for _, job in waiting:
                self._loop.drop(job)

    def _clear(self, pairs: list[Pair]) -> None:
        for _, job in pairs:
            self._loop.drop(job)
        self.llm.engine.reset()

    def _alone(self, row: Row) -> Answer | BadRow:
        """Answer a row that was in the engine when a step raised, with nobody beside it.

        Raises:
            Exception: that of the step, if rows fail one after the other: then it is the engine.
        """
        job = self._job(row)
        try:
            self._loop.submit(job)
            while not self._ended(job):
                self._loop.step()
        except Exception as exc:
            self._clear([(row, job)])
            self._failures += 1
            if self._failures >= FAILURES:
                raise
            return BadRow(row.id, row.where, f"the engine failed on this row: {reason_of(exc)}", row.record())
        self._failures = 0
        return self._collect(row, job)

    def _job(self, row: Row) -> Job:
        params, value = row.params(self.params), row.value
        if row.kind == "prompt" and self.llm.has_chat_template and not self.raw and value:
            value = [{"role": "user", "content": value}]
        elif row.kind == "prompt_token_ids":
            value = {"prompt_token_ids": value}
        elif row.kind == "messages" and not value:
            raise RowError("the conversation has no message")
        elif row.kind == "messages" and not all(isinstance(m, dict) for m in value):
            raise RowError("a conversation is a list of objects with role and content")
        return self.llm.job(value, params, template=row.kind == "template")

    def _ended(self, job: Job) -> bool:
        return all(request.id in self._loop.finished for request in job.requests)

    def _collect(self, row: Row, job: Job) -> Answer | BadRow:
        done = [self._loop.finished.pop(request.id) for request in job.requests]
        llm = self.llm
        answers = [completion(job, i, d, llm.tokenizer, llm.mask_id) for i, d in enumerate(done)]
        errors = [answer.error for answer in answers if answer.error]
        if errors:
            return BadRow(row.id, row.where, errors[0], row.record())
        prompt = len(job.prompt_ids)
        record = {"id": row.id, **answer_record(answers[0], prompt)}
        if len(answers) > 1:
            record["choices"] = [answer_record(answer, prompt) for answer in answers]
        if row.metadata:
            record["metadata"] = row.metadata
        return record


def answer_record(answer: Completion, prompt_tokens: int) -> Answer:
    """One answer as plain data; ``usage`` counts as :class:`Completion` does."""
    tokens = len(answer.token_ids)
    record: Answer = {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "usage": {
            "prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens,
            "nfe": answer.nfe, "steps": answer.steps, "tpf": answer.tpf,
        },
        "token_ids": answer.token_ids,
    }  # fmt: skip
    optional = {
        "spans": answer.spans, "log_probs": answer.log_probs, "passes": answer.passes,
        "certificate": asdict(answer.certificate) if answer.certificate else None,
    }  # fmt: skip
    return {**record, **{name: value for name, value in optional.items() if value is not None}}
