"""Every option, in one place. Command line, YAML, Python and HTTP fields all come from these models.

Unknown names are refused; an option that the method does not read is refused where the method is known.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

MOST = 2**31 - 1
"""Largest whole number of a request's options, which the engine keeps as 64-bit integers."""
EosPolicy = Literal["keep", "suppress_logits", "suppress_confidence"]
AcceptRule = Literal["product", "paper"]


class SamplingParams(BaseModel):
    """Options of one request.

    Fields that are left out take the default of the model (``max_tokens``) or of the decoding method; giving
    a field that the method does not read is an error (a neutral value such as ``temperature=0`` is none).
    ``seed``: a request's noise depends on its seed, the step and the position only, never on the clock, so
    without a seed the answer is the same every time. With ``n`` answers the seeds are seed, seed + 1, ...
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: int | None = Field(
        None, ge=1, le=MOST, description="answer length in tokens; default: the model's own"
    )
    temperature: float = Field(0.0, ge=0.0, le=100.0, description="0 takes the most probable token")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="nucleus: smallest set of tokens with this mass")
    top_k: int = Field(0, ge=0, le=MOST, description="keep the k most probable tokens; 0 keeps all")
    seed: int | None = Field(
        None,
        ge=0,
        lt=2**62,
        description="of the request's own noise; default: the engine's (same seed, same answer)",
    )
    stop: tuple[str, ...] = Field((), description="strings that end the answer (cut before them)")
    stop_token_ids: tuple[int, ...] | None = Field(
        None, description="default: the model's EOS and end of turn"
    )
    stop_at_eos: bool = Field(True, description="end once everything before the first stop token is there")
    n: int = Field(1, ge=1, le=128, description="answers per prompt (seeds seed, seed + 1, ...)")
    logprobs: bool = Field(False, description="report log confidence at commit and the pass of each commit")
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the text")

    steps: int | None = Field(
        None, ge=1, le=MOST, description="fixed schedules: number of steps; default one a token"
    )
    block_length: int | None = Field(None, ge=1, le=MOST, description="semi-autoregressive block, in tokens")
    epsilon: float | None = Field(None, gt=0.0, le=1.0, description="confidence that commits a token at once")
    gamma: float | None = Field(
        None, gt=0.0, le=2.0, description="verification threshold; above 1: accept none"
    )
    rule: AcceptRule | None = Field(None, description="how verification accepts drafts")
    factor: float | None = Field(None, gt=0.0, le=1e6, description="Fast-dLLM's factor f")
    alg_temp: float | None = Field(
        None, ge=0.0, le=1e3, description="Dream: noise in the choice of positions"
    )
    t_end: float | None = Field(None, gt=0.0, lt=1.0, description="Dream: eps, where its time schedule ends")
    cfg_scale: float | None = Field(None, ge=0.0, le=1e3, description="classifier-free guidance strength")
    eos: EosPolicy = Field("keep", description="EOS as it comes, never produced, or committed last")

    @field_validator("stop", mode="before")
    @classmethod
    def _one_string(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _no_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not s for s in value):
            raise ValueError("an empty stop string would end every answer at once")
        return value

    def given(self) -> dict[str, Any]:
        """The method options that differ from "nothing asked for", by name."""
        fields = type(self).model_fields
        values = {name: getattr(self, name) for name in sorted(METHOD_FIELDS)}
        return {name: value for name, value in values.items() if value != fields[name].default}


METHOD_FIELDS = frozenset(
    {
        "temperature", "top_p", "top_k", "steps", "block_length", "epsilon", "gamma", "rule", "factor",
        "alg_temp", "t_end", "cfg_scale", "eos",
    }
)  # fmt: skip
"""Fields of :class:`SamplingParams` whose use depends on the method."""


class EngineArgs(BaseModel):
    """Options of an engine.

    ``options`` are those of the method (``window``, ``lookahead``, ``track``, ...); each method names its own
    and refuses others.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field("flash-dllm/tiny-llada", description="folder, hub id or bundled name")
    revision: str | None = Field(None, description="branch, tag or commit of a hub id")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="of the weights")
    quantization: Literal["fp8", "int8"] | None = Field(
        None, description="keep the layers' weights in 8 bits; fp8 multiplies in fp8 too"
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="of keys and values: auto is that of the weights"
    )
    tensor_parallel_size: int = Field(1, ge=1, le=256, description="GPUs (processes) that share the model")
    device: str = Field("auto", description="cpu, cuda, cuda:1, mps; auto takes a GPU if there is one")
    cache: str | None = Field(None, description="cache policy; default: see `flash-dllm methods`")
    decoding: str | None = Field(None, description="decoding; default: see `flash-dllm methods`")
    preset: str | None = Field(None, description="settings of the paper by task, or the released code's")
    kernels: Literal["auto", "ref", "triton", "fused"] = Field(
        "auto",
        description="auto takes Triton on a GPU; ref is plain PyTorch; fused projects and writes keys in one kernel",
    )
    deterministic: bool = Field(
        False, description="a request's numbers do not depend on the batch, bit for bit (GPU, slower)"
    )
    enforce_eager: bool = Field(False, description="no CUDA graphs, for debugging")
    gpu_memory_utilization: float = Field(
        0.9, gt=0.0, le=1.0, description="share of a GPU's memory that weights, keys and values may take"
    )
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="slots decoded at the same time; default: what fits, at most 32 (CPU: 4)",
    )
    max_model_len: int | None = Field(None, ge=2, description="longest canvas (prompt and answer), in tokens")
    chat_template: str | None = Field(None, description="file or text that replaces the model's own")
    seed: int = Field(0, ge=0, lt=2**62, description="seed of requests that give none")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the method")
