"""What a client is told when a request is not answered."""

from __future__ import annotations

import math
import re
from typing import Any

from flash_dllm.errors import FlashDLLMError
from flash_dllm.params import SamplingParams
from flash_dllm.serve.protocol import TOP_LEVEL

_NAMED = re.compile(r"(\w+)=")
_TYPE = re.compile(r"(?:str|int|bool|float|(?:list|nullable|function-\w+|constrained-\w+)\[.*\])")


class ServeError(Exception):
    """A request that gets no answer.

    Attributes:
        status: HTTP status.
        kind, code, param: ``type``, ``code`` and ``param`` of OpenAI's error object.
        outcome: the word that the metrics and the log use.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        outcome: str,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.outcome = status, message, code, param, outcome
        self.kind = "invalid_request_error" if status in (400, 401, 404, 405, 413) else "server_error"
        self.headers: dict[str, str] = {}
        if retry_after is not None:
            self.headers["Retry-After"] = str(math.ceil(retry_after))
        elif status in (408, 500):
            # The same request would meet the same end; OpenAI's clients repeat these two unless told not to.
            self.headers["x-should-retry"] = "false"

    def body(self) -> dict[str, Any]:
        """OpenAI's error object. Lone surrogates, which no response can carry, are replaced."""
        message = self.message.encode("utf-8", "replace").decode("utf-8")
        param = None if self.param is None else self.param.encode("utf-8", "replace").decode("utf-8")
        return {"error": {"message": message, "type": self.kind, "param": param, "code": self.code}}


def refused(message: str, param: str | None = None, code: str = "invalid_value") -> ServeError:
    """The request is wrong: 400."""
    return ServeError(400, message, code=code, outcome="refused", param=param)


def wrong_input(error: FlashDLLMError) -> ServeError:
    """The library refuses a prompt or option; its message says ``name=value`` of the one to blame."""
    names = (name for name in _NAMED.findall(str(error)) if name in SamplingParams.model_fields)
    name = next(names, None)
    inside = name is not None and name not in (*TOP_LEVEL, "logprobs")
    return refused(str(error), f"diffusion.{name}" if inside else name)


def busy(waiting: int, limit: int, retry_after: float) -> ServeError:
    """The queue is full: 429."""
    message = f"{waiting} answers are waiting and the queue holds {limit}; try again later"
    return ServeError(429, message, code="queue_full", outcome="busy", retry_after=retry_after)


def draining() -> ServeError:
    """The server is about to end: 503."""
    message = "the server is shutting down and takes no new requests"
    return ServeError(503, message, code="draining", outcome="draining", retry_after=1)


def dead(reason: str) -> ServeError:
    """The engine does not work any more: 503."""
    return ServeError(503, f"the engine has failed: {reason}", code="engine_dead", outcome="error")


def too_late(seconds: float) -> ServeError:
    """The deadline has passed: 408."""
    message = f"not answered within {seconds:g} seconds"
    return ServeError(408, message, code="deadline_exceeded", outcome="deadline")


def failed(message: str) -> ServeError:
    """This request failed while it was decoded, and alone: 500."""
    return ServeError(500, message, code="request_failed", outcome="error")


def invalid(errors: list[Any]) -> ServeError:
    """From pydantic's list of what is wrong: the error that went deepest, for a union tries every branch."""
    first = max(errors, key=lambda e: len(e["loc"]))
    kind = first["type"]
    if kind == "json_invalid":
        return refused("the body is not JSON", code="invalid_json")
    own = first.get("ctx", {}).get("field")
    # A branch of a union names itself by its type: list[str], str.
    loc = first["loc"][1:] if first["loc"][:1] == ("body",) else first["loc"]
    path = [str(part) for part in loc if not _TYPE.fullmatch(str(part))]
    param = ".".join([*path, own] if own else path) or None
    if kind == "extra_forbidden":
        return refused(f"unknown field {param!r}", param, "unknown_field")
    if kind == "missing":
        return refused(f"{param or 'body'} is missing", param, "missing_field")
    if kind == "unsupported_field":
        return refused(f"{param} is not supported", param, kind)
    message = " or ".join(dict.fromkeys(e["msg"] for e in errors if len(e["loc"]) == len(first["loc"])))
    shown = "" if own else f"={_short(first.get('input'))}"
    return refused(f"{param or 'body'}{shown}: {message}", param)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
