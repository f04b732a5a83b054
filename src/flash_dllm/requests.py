"""From prompts, conversations and templates to requests of the engine."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flash_dllm.core.method import Method
from flash_dllm.core.state import Canvas
from flash_dllm.engine.request import Request, RequestError
from flash_dllm.infill import Gap, Part, Template, parse_template
from flash_dllm.models.config import ModelConfig
from flash_dllm.models.tokenizer import Tokenizer
from flash_dllm.options import NO_STOP_TOKENS, OptionError, Shape, check_options, numbers_for
from flash_dllm.params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, str]
DEFAULT_MAX_TOKENS = 128
"""Answer length where neither the request nor the model's generation_config.json names one."""


@dataclass
class Job:
    """A prompt or template on its way through the engine; ``requests`` has one entry for each answer.

    ``parts`` and ``gaps`` (start and length of each gap on the canvas) belong to a template.
    """

    id: str
    prompt: str | None
    ids: list[int]
    masked: list[bool]
    params: SamplingParams
    stop_ids: tuple[int, ...]
    parts: list[Part] | None = None
    gaps: list[tuple[int, int]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    @property
    def first(self) -> int:
        return self.masked.index(True)

    @property
    def prompt_ids(self) -> list[int]:
        """What was given: all before the answer, or everything of a template that is not a gap."""
        return [token for token, hidden in zip(self.ids, self.masked, strict=True) if not hidden]


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text, token ids or a dict) or several, as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts must be text, token ids, a dict or a list of them, not {type(prompts).__name__}"
        )
    if prompts and all(isinstance(p, int) for p in prompts):
        return [list(prompts)]  # type: ignore[arg-type]
    return list(prompts)  # type: ignore[arg-type]


class Builder:
    """Builds jobs for one model and method.

    Args:
        stop_ids: tokens that end an answer by default.
        max_tokens: default answer length, or None for :data:`DEFAULT_MAX_TOKENS`.
        positions: longest canvas.
        seed: of requests that give none.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        method: Method,
        *,
        stop_ids: tuple[int, ...],
        max_tokens: int | None,
        positions: int,
        seed: int,
    ) -> None:
        assert config.mask_id is not None
        self.config, self.tokenizer, self.method = config, tokenizer, method
        self.mask_id = config.mask_id
        self.stop_ids, self.max_tokens = stop_ids, max_tokens or DEFAULT_MAX_TOKENS
        self.positions, self.seed = positions, seed
        # next() of a count is atomic: a server builds jobs in several threads.
        self._count = itertools.count()

    def prompt(self, prompt: Prompt, params: SamplingParams) -> Job:
        """A job that continues a prompt.

        Raises:
            RequestError: the prompt or its parameters cannot be served.
        """
        text, ids = self._read(prompt)
        return self._job(text, ids, params)

    def chat(self, messages: Sequence[Message], params: SamplingParams) -> Job:
        """A job that answers a conversation (a list of dicts with ``role`` and ``content``)."""
        if not messages:
            raise RequestError("the conversation has no message")
        if not all(isinstance(m, Mapping) for m in messages):
            raise RequestError("a conversation is a list of dicts with role and content")
        tokenizer = self._need_tokenizer("a chat")
        return self._job(tokenizer.render_chat(messages), tokenizer.apply_chat(messages), params)

    def infill(self, template: Template, params: SamplingParams) -> Job:
        """A job that fills the gaps of a template."""
        parts = parse_template(template)
        for name in ("max_tokens", "stop"):
            if getattr(params, name):
                raise OptionError(
                    f"{name}={getattr(params, name)!r} does not apply to a template: its gaps say how long"
                )
        ids: list[int] = []
        masked: list[bool] = []
        gaps = []
        if self.tokenizer is not None and not isinstance(parts[0], list):
            # What the tokenizer puts before a text goes there once: the parts are pieces of one text.
            ids += self.tokenizer.encode("", add_special=True)
            masked += [False] * len(ids)
        for part in parts:
            if isinstance(part, Gap):
                if len(ids) + part.size > self.positions:
                    raise RequestError(
                        f"a gap of {part.size} tokens after {len(ids)} is too long: max_model_len={self.positions}"
                    )
                gaps.append((len(ids), part.size))
                ids += [self.mask_id] * part.size
                masked += [True] * part.size
            else:
                piece = (
                    self._need_tokenizer("text").encode(part) if isinstance(part, str) else self._ids(part)
                )
                ids += piece
                masked += [False] * len(piece)
        text = template if isinstance(template, str) else None
        return self._finish(Job(self._next_id(), text, ids, masked, params, self._stops(params), parts, gaps))

    def _read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            known = {"prompt", "prompt_token_ids"}
            if len(prompt) != 1 or not set(prompt) <= known:
                raise RequestError(
                    f"a prompt dict has one key, prompt or prompt_token_ids, not {sorted(prompt)}"
                )
            return self._read(next(iter(prompt.values())))
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty")
            return prompt, self._need_tokenizer("a text prompt").encode(prompt, add_special=True)
        ids: list[Any] = list(prompt) if isinstance(prompt, Sequence) else [None]
        if not all(isinstance(t, int) and not isinstance(t, bool) for t in ids):
            raise RequestError("a prompt is text or a list of token ids (integers)")
        return None, self._ids(ids)

    def _ids(self, ids: Sequence[Any]) -> list[int]:
        for token in ids:
            if not 0 <= token < self.config.vocab_size:
                raise RequestError(f"token id {token} is outside the vocabulary of {self.config.vocab_size}")
        return list(ids)

    def _job(self, text: str | None, ids: list[int], params: SamplingParams) -> Job:
        if not ids:
            raise RequestError("the prompt is empty")
        length = self._length(len(ids), params.max_tokens)
        masked = [False] * len(ids) + [True] * length
        ids = ids + [self.mask_id] * length
        return self._finish(Job(self._next_id(), text, ids, masked, params, self._stops(params)))

    def _length(self, prompt: int, wanted: int | None) -> int:
        room = self.positions - prompt
        if room < 1:
            raise RequestError(
                f"the prompt has {prompt} tokens; max_model_len={self.positions} leaves no room to answer"
            )
        if wanted is not None and wanted > room:
            raise RequestError(
                f"a prompt of {prompt} tokens and max_tokens={wanted} need {prompt + wanted} positions, "
                f"more than max_model_len={self.positions}"
            )
        return wanted or min(self.max_tokens, room)

    def _finish(self, job: Job) -> Job:
        """Check the options and add the engine's requests, one for each answer."""
        params = job.params
        check_options(params, self.method)
        if params.stop:
            self._need_tokenizer("a stop string")
        shape = Shape(sum(job.masked), len(job.ids) - job.first, job.parts is not None)
        seed = self.seed if params.seed is None else params.seed
        for index in range(params.n):
            numbers = numbers_for(params, self.method, shape, seed + index)
            if job.parts and "eos" not in params.model_fields_set and not _open_ended(job.parts):
                numbers["suppress"] = NO_STOP_TOKENS
            canvas = Canvas(job.ids, job.masked, job.stop_ids, numbers)
            shadow = None
            if numbers.get("cfg_scale", 0) > 0:
                shadow = Canvas([self.mask_id] * len(job.ids), job.masked, job.stop_ids, numbers)
            job.requests.append(Request(f"{job.id}-{index}", canvas, shadow, params.stop))
        return job

    def _stops(self, params: SamplingParams) -> tuple[int, ...]:
        if params.stop_token_ids is None:
            return self.stop_ids
        for token in params.stop_token_ids:
            if not 0 <= token < self.config.vocab_size:
                raise RequestError(
                    f"stop token id {token} is outside the vocabulary of {self.config.vocab_size}"
                )
        return tuple(dict.fromkeys(params.stop_token_ids))

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer, and this checkpoint has none: give token ids")
        return self.tokenizer

    def _next_id(self) -> str:
        return str(next(self._count))


def _open_ended(parts: list[Part]) -> bool:
    return any(isinstance(part, Gap) and part.open_ended for part in parts)
