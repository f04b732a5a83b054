"""What clients get: OpenAI's response objects and chunks, with ``diffusion`` beside OpenAI's own fields."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

from flash_dllm.llm import LLM
from flash_dllm.models.tokenizer import Tokenizer
from flash_dllm.outputs import Completion
from flash_dllm.serve.ticket import Answer, Ticket


@dataclass
class Style:
    """What distinguishes the two endpoints and what the client asked to see.

    Attributes:
        chat: chat completions, else text completions.
        echo: the prompt stands before each answer.
        logprobs: say the log confidence of every token.
    """

    chat: bool
    model: str
    llm: LLM
    echo: bool = False
    logprobs: bool = False
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex

    def reply(self, ticket: Ticket, completions: Sequence[Completion]) -> dict[str, Any]:
        """The whole response."""
        choices = []
        for index, (answer, completion) in enumerate(zip(ticket.answers, completions, strict=True)):
            text = answer.text(completion)
            own = (
                {"message": {"role": "assistant", "content": text, "refusal": None}}
                if self.chat
                else {"text": self.before(answer) + text}
            )
            choices.append({"index": index, **own, **self.ending(answer, completion)})
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": usage(ticket, completions)}

    def chunk(self, index: int, text: str | None, **more: Any) -> dict[str, Any]:
        """A piece of answer ``index``; None begins a chat answer."""
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None}
        if self.chat:
            first = {"role": "assistant", "content": ""}
            choice["delta"] = first if text is None else {"content": text} if text else {}
        else:
            choice["text"] = text or ""
        choice.update(more)
        return {
            **self._head("chat.completion.chunk" if self.chat else "text_completion"),
            "choices": [choice],
        }

    def last_chunk(self, ticket: Ticket, completions: Sequence[Completion]) -> dict[str, Any]:
        """The chunk without a choice that ends a stream with ``include_usage``."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [], "usage": usage(ticket, completions)}

    def before(self, answer: Answer) -> str:
        """The prompt, where it is to be repeated."""
        if not self.echo:
            return ""
        job, tokenizer = answer.job, self.llm.tokenizer
        if job.prompt is not None or tokenizer is None:
            return job.prompt or ""
        return tokenizer.decode(job.prompt_ids, job.params.skip_special_tokens)

    def ending(self, answer: Answer, completion: Completion) -> dict[str, Any]:
        """How an answer ended, and what is to be said of it."""
        logprobs = None
        if self.logprobs:
            logprobs = self._logprobs(answer, completion)
        return {
            "finish_reason": completion.finish_reason,
            "logprobs": logprobs,
            "diffusion": {
                "stop_reason": completion.stop_reason,
                "token_ids": completion.token_ids,
                "nfe": completion.nfe,
                "steps": completion.steps,
                "tpf": round(completion.tpf, 4),
                "rows": completion.rows,
                "queued_seconds": round(completion.queued, 6),
                "decode_seconds": round(completion.seconds, 6),
                "spans": completion.spans,
                "certificate": _certificate(completion),
            },
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _logprobs(self, answer: Answer, completion: Completion) -> dict[str, Any]:
        tokenizer = self.llm.tokenizer
        ids, values = completion.token_ids, completion.log_probs or []
        if self.chat:
            content = [
                {
                    "token": _text(tokenizer, token),
                    "bytes": None if (raw := token_bytes(tokenizer, token)) is None else list(raw),
                    "logprob": value,
                    "top_logprobs": [],
                }
                for token, value in zip(ids, values, strict=True)
            ]
            return {"content": content, "refusal": None}
        given = answer.job.prompt_ids if self.echo else []
        return {
            "tokens": [_legacy(tokenizer, token) for token in [*given, *ids]],
            "token_logprobs": [*([None] * len(given)), *values],
            "top_logprobs": None,
            "text_offset": list(_offsets(tokenizer, [*given, *ids], answer.job.params.skip_special_tokens)),
        }


def usage(ticket: Ticket, completions: Sequence[Completion]) -> dict[str, Any]:
    """Tokens, passes and steps of all answers; a prompt counts once, however many answers it has."""
    prompt = sum(len(job.prompt_ids) for job in ticket.jobs)
    tokens = sum(len(c.token_ids) for c in completions)
    nfe = sum(c.nfe for c in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "nfe": nfe,
        "steps": sum(c.steps for c in completions),
        "tpf": round(tokens / nfe, 4) if nfe else 0.0,
        "certificate": _certificate(completions[0]) if len(completions) == 1 else None,
    }


def _certificate(completion: Completion) -> dict[str, Any] | None:
    return None if completion.certificate is None else asdict(completion.certificate)


def token_bytes(tokenizer: Tokenizer | None, token: int) -> bytes | None:
    """The bytes of one token, which may be a part of a character; None where the tokenizer does not tell."""
    if tokenizer is None:
        return None
    text = tokenizer.decode([token], False)
    if "\ufffd" not in text:
        return text.encode("utf-8")
    if not tokenizer.byte_level:
        return None
    spelled = _spellings(tokenizer).get(token, "")
    table = _byte_of_char()
    return bytes(table[c] for c in spelled) if spelled and all(c in table for c in spelled) else None


@lru_cache(maxsize=8)
def _spellings(tokenizer: Tokenizer) -> dict[int, str]:
    return {token: spelled for spelled, token in tokenizer.vocabulary().items()}


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE spells printable bytes as themselves and the others as characters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {**{chr(b): b for b in plain}, **{chr(0x100 + i): b for i, b in enumerate(others)}}


def _text(tokenizer: Tokenizer | None, token: int) -> str:
    return str(token) if tokenizer is None else tokenizer.decode([token], False)


def _legacy(tokenizer: Tokenizer | None, token: int) -> str:
    """Text completions spell a part of a character as ``bytes:\\xe2``."""
    text = _text(tokenizer, token)
    raw = token_bytes(tokenizer, token) if "\ufffd" in text else None
    return text if raw is None else "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


def _offsets(tokenizer: Tokenizer | None, ids: list[int], skip_special: bool) -> Iterator[int]:
    """Where in the text each token begins; one that goes on with a character begins where that does."""
    if tokenizer is None:
        yield from [0] * len(ids)
        return
    text = tokenizer.decode(ids, skip_special)
    start = at = 0  # tokens and characters that are settled
    for count in range(len(ids)):
        piece = tokenizer.decode(ids[start:count], skip_special)
        # A character that is not complete yet reads as U+FFFD, which is not what stands in the text.
        pairs = enumerate(zip(piece, text[at:], strict=False))
        length = next((i for i, (a, b) in pairs if a != b), min(len(piece), len(text) - at))
        yield at + length
        if tokenizer.byte_level and length == len(piece) and not piece.endswith("\ufffd"):
            start, at = count, at + length
