"""What clients send: OpenAI's request bodies, with ``diffusion`` for what only these models have.

Every option comes from :class:`flash_dllm.params.SamplingParams`: those that OpenAI knows stand in the body, all
others in ``diffusion``. Unknown and unsupported fields are refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator
from pydantic_core import PydanticCustomError

from flash_dllm.params import SamplingParams

TOP_LEVEL = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n")
"""Fields of SamplingParams that stand in the body itself; ``logprobs`` has OpenAI's own two forms."""
MAX_STOPS = 32
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},),
    "response_format": ({"type": "text"},), "tools": ([],), "tool_choice": ("none",), "functions": ([],),
    "function_call": ("none",), "parallel_tool_calls": (), "metadata": ({},), "store": (False,),
    "modalities": (["text"],), "audio": (), "prediction": (), "reasoning_effort": ("none",), "verbosity": (),
    "service_tier": ("auto", "default"), "web_search_options": (), "prompt_cache_key": (),
    "prompt_cache_retention": (), "safety_identifier": (), "moderation": (),
    "prompt_logprobs": (0,), "min_tokens": (0,), "min_p": (0,), "repetition_penalty": (1,), "length_penalty": (1,),
    "use_beam_search": (False,), "ignore_eos": (False,), "guided_json": (), "guided_regex": (),
    "guided_choice": (), "guided_grammar": (), "structured_outputs": (),
}  # fmt: skip
"""Fields of other servers that are refused, and the values besides null that ask for nothing."""


class Strictly(BaseModel):
    """Types as JSON has them: no number for a text, no text for a number."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, data: Any) -> Any:
        """In JSON 2.0 is an integer like 2; some clients know no other numbers."""
        if not isinstance(data, dict):
            return data
        return {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in data.items()}


def _field(name: str) -> tuple[Any, Any]:
    """An option of SamplingParams as a field that may be left out or null; its bounds come along."""
    source = SamplingParams.model_fields[name]
    kind: Any = source.annotation
    if kind == tuple[str, ...]:
        # Every step looks for each of them, on the thread that serves everybody.
        kind = str | Annotated[list[str], Field(max_length=MAX_STOPS)]
    elif kind == tuple[int, ...] | None:
        kind = list[int]
    for bound in source.metadata:
        kind = Annotated[kind, bound]
    return kind | None, Field(None, description=source.description)


class _Diffusion(Strictly):
    """What only a diffusion model has."""

    method: str | None = Field(None, description="one of the server's methods; default: its first")
    stream: Literal["text", "canvas"] | None = Field(
        None, description="canvas: with stream, what each step did to the canvas, in `diffusion` of a chunk"
    )
    infill: bool | None = Field(
        None, description="completions: the prompt is a template; {{8}} and {{<=8}} are its gaps"
    )
    timeout: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="seconds until the request is given up"
    )


def _rest() -> dict[str, Any]:
    names = (name for name in SamplingParams.model_fields if name not in (*TOP_LEVEL, "logprobs"))
    return {name: _field(name) for name in names}


Diffusion = create_model("Diffusion", __base__=_Diffusion, **_rest())
_TOP: dict[str, Any] = {name: _field(name) for name in TOP_LEVEL}
_Sampling = create_model("_Sampling", __base__=Strictly, **_TOP)


class StreamOptions(Strictly):
    """Of a stream."""

    include_usage: bool | None = Field(None, description="a last chunk with the usage and no choice")
    include_obfuscation: Literal[False] | None = None


class Asked(_Sampling):
    """What both endpoints take."""

    if TYPE_CHECKING:
        max_tokens: int | None

    model: str = Field(max_length=400)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=400, description="goes into the log and the trace")
    diffusion: Diffusion | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        return _without_neutral(data, NEUTRAL)

    @model_validator(mode="after")
    def _stream_fields(self) -> Asked:
        if not self.stream:
            if self.stream_options is not None:
                raise _wrong("stream_options", "goes with stream=true")
            if self.option("stream") is not None:
                raise _wrong("diffusion.stream", "goes with stream=true")
        return self

    def option(self, name: str) -> Any:
        """A field of ``diffusion``, or None."""
        return None if self.diffusion is None else getattr(self.diffusion, name)

    def sampling(self, **more: Any) -> SamplingParams:
        """The options that were given, as the library takes them.

        Raises:
            pydantic.ValidationError: a value that SamplingParams refuses.
        """
        own = {name: getattr(self, name) for name in TOP_LEVEL}
        rest = {name: self.option(name) for name in _rest()}
        values = {name: value for name, value in {**own, **rest, **more}.items() if value is not None}
        return SamplingParams.model_validate(values)


def _prompt_shape(value: Any) -> Any:
    """One of the four forms of a prompt; better told here than by four branches of a union."""

    def ids(x: Any) -> bool:
        return isinstance(x, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in x)

    lists = isinstance(value, list) and bool(value)
    if isinstance(value, str) or (lists and ids(value)):
        return value
    if lists and (all(isinstance(x, str) for x in value) or all(ids(x) and x for x in value)):
        return value
    raise PydanticCustomError(
        "prompt",
        "must be a text, a list of texts, a list of token ids or a list of such lists, and not empty",
    )


class CompletionRequest(Asked):
    """Body of ``/v1/completions``."""

    prompt: Annotated[str | list[str] | list[int] | list[list[int]], BeforeValidator(_prompt_shape)]
    suffix: str | None = Field(None, description="text after the answer: the model fills in between")
    echo: bool | None = Field(None, description="the prompt stands before the answer")
    logprobs: int | None = Field(
        None, ge=0, le=0, description="0: log confidence of each token at its commit; others are not known"
    )

    @model_validator(mode="after")
    def _infilling(self) -> CompletionRequest:
        if self.suffix is not None and self.option("infill"):
            raise _wrong("suffix", "does not go with diffusion.infill, whose template has its own gaps")
        if self.echo and (self.suffix is not None or self.option("infill")):
            raise _wrong("echo", "does not apply to infilling")
        if self.suffix is not None and not (isinstance(self.prompt, str) and self.prompt):
            raise _wrong("suffix", "needs one text as prompt")
        return self

    @property
    def prompts(self) -> list[Any]:
        """One text or list of token ids for each prompt."""
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return list(self.prompt) if several else [self.prompt]


class TextPart(Strictly):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(Strictly):
    """A turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        names = (
            "name",
            "refusal",
            "annotations",
            "audio",
            "function_call",
            "tool_calls",
            "reasoning_content",
        )
        return _without_neutral(data, {**dict.fromkeys(names, ()), "tool_calls": ([],), "annotations": ([],)})

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)


class ChatRequest(Asked):
    """Body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="newer name of max_tokens")
    logprobs: bool | None = Field(None, description="log confidence of each token at its commit")
    top_logprobs: int | None = Field(None, ge=0, le=0, description="0; alternatives are not known")

    @model_validator(mode="after")
    def _together(self) -> ChatRequest:
        if self.option("infill"):
            raise _wrong("diffusion.infill", "belongs to /v1/completions")
        if self.top_logprobs is not None and not self.logprobs:
            raise _wrong("top_logprobs", "goes with logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise _wrong("max_completion_tokens", "contradicts max_tokens")
        return self


def _wrong(field: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("field", "{message}", {"field": field, "message": message})


def _without_neutral(data: Any, known: dict[str, tuple[Any, ...]]) -> Any:
    """Refuse what other servers offer and this one does not; null and neutral values ask for nothing."""
    if not isinstance(data, dict):
        return data
    for name in known.keys() & data.keys():
        value = data[name]
        if value is not None and not any(_same(value, neutral) for neutral in known[name]):
            raise PydanticCustomError(
                "unsupported_field", "{message}", {"field": name, "message": "is not supported"}
            )
    return {name: value for name, value in data.items() if name not in known}


def _same(a: Any, b: Any) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)
