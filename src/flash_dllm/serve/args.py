"""Options of the server: those of the engine, and its own. The one source of flags, YAML and Python."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from flash_dllm.errors import FlashDLLMError
from flash_dllm.params import EngineArgs


class ServeArgs(EngineArgs):
    """Options of ``flash-dllm serve``."""

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all")
    port: int = Field(8000, ge=0, le=65535, description="0 takes a free one")
    api_key: str | None = Field(
        None, min_length=1, description="clients must send it; default: $FLASH_DLLM_API_KEY, else none"
    )
    served_model_name: tuple[str, ...] = Field((), description="name in the API; repeatable; default: MODEL")
    method: tuple[str, ...] = Field(
        (),
        description="cache+decoding; repeatable: requests pick one by diffusion.method, the first is the default",
    )
    max_queue: int = Field(256, ge=0, description="answers that may wait while all slots are taken")
    request_timeout: float = Field(
        600.0, gt=0, allow_inf_nan=False, description="seconds after which a request is given up"
    )
    drain_timeout: float = Field(
        600.0, ge=0, allow_inf_nan=False, description="seconds that running requests get after SIGTERM"
    )
    max_body: int = Field(4 * 2**20, ge=1024, description="bytes of a request body")
    max_answers: int = Field(128, ge=1, description="answers of one request: prompts times n")
    log_level: str = Field("info", description="debug, info, warning or error")
    log_prompts: bool = Field(False, description="put prompts into the log")
    otel: bool = Field(
        False, description="OpenTelemetry spans, by its own variables (OTEL_TRACES_EXPORTER ...)"
    )

    @field_validator("served_model_name", "method", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("log_level")
    @classmethod
    def _known_level(cls, value: str) -> str:
        if value not in ("debug", "info", "warning", "error"):
            raise ValueError("debug, info, warning or error")
        return value


def methods(args: ServeArgs) -> dict[str, EngineArgs]:
    """The engine's options for each method that is served, by its name; slots are divided between them.

    Raises:
        FlashDLLMError: options that contradict each other, a name twice, or more methods than slots.
    """
    if args.method and (args.cache or args.decoding):
        raise FlashDLLMError("--method already names cache and decoding")
    names = [*args.method, *([args.preset] if args.preset else [])]
    if len(set(names)) < len(names):
        raise FlashDLLMError(f"method {next(n for n in names if names.count(n) > 1)!r} is named twice")
    if len(names) > 1 and args.options:
        name = next(iter(args.options))
        raise FlashDLLMError(f"option {name!r} with {len(names)} methods: options belong to one method")
    base = EngineArgs.model_validate(args.model_dump(include=set(EngineArgs.model_fields)))
    if len(names) < 2:
        return {names[0] if names else "": _one(base, names[0] if names else None, args)}
    return {name: _one(base, name, args) for name in names}


def _one(base: EngineArgs, name: str | None, args: ServeArgs) -> EngineArgs:
    if name is None or (name == args.preset and name not in args.method):
        return base
    cache, _, decoding = name.partition("+")
    return base.model_copy(update={"preset": None, "cache": cache or None, "decoding": decoding or None})
