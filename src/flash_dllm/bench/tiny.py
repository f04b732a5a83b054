"""The bundled model's own tasks as jobs with checkers."""

from __future__ import annotations

from typing import Any

from flash_dllm.infill import Gap
from flash_dllm.llm import LLM
from flash_dllm.params import SamplingParams
from flash_dllm.requests import Job

ANSWER_TOKENS = 160


def job_of(llm: LLM, sample: Any, params: SamplingParams) -> Job:
    """A task's job: its rendered prompt, or its text with the gaps masked."""
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(sample.prompt_text)
    if not sample.gaps:
        if params.max_tokens is None:
            params = params.model_copy(update={"max_tokens": ANSWER_TOKENS})
        return llm.job({"prompt_token_ids": ids}, params)
    hidden = params.model_copy(update={"max_tokens": None})
    # In training the text of a canvas is followed by the stop token, too.
    stop = llm.tokenizer.encode(sample.stop)
    return llm.job([ids, *_parts(llm, sample), stop], hidden, template=True)


def _parts(llm: LLM, sample: Any) -> list[list[int] | Gap]:
    """Token runs and gaps: a token that overlaps a gap is hidden, as in training."""
    assert llm.tokenizer is not None
    ids, spans = llm.tokenizer.encode_with_offsets(sample.answer_text)
    parts: list[list[int] | Gap] = []
    for token, (start, end) in zip(ids, spans, strict=True):
        hide = any(start < b and end > a for a, b in sample.gaps)
        last = parts[-1] if parts else None
        if hide and isinstance(last, Gap):
            parts[-1] = Gap(last.size + 1)
        elif hide:
            parts.append(Gap(1))
        elif isinstance(last, list):
            last.append(token)
        else:
            parts.append([token])
    return parts
