"""Request options against a method: what it does not read, what contradicts, what the engine gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from flash_dllm.core.method import Method
from flash_dllm.core.state import NUMBERS
from flash_dllm.engine.request import RequestError
from flash_dllm.params import AcceptRule, EosPolicy, SamplingParams

RULES: tuple[str, ...] = get_args(AcceptRule)
EOS_POLICIES: tuple[str, ...] = get_args(EosPolicy)
NO_STOP_TOKENS = 3
"""``suppress`` of a template whose gaps all have a fixed length: no stop token is produced."""


class OptionError(RequestError):
    """An option that the method does not read, or options that contradict each other."""


@dataclass(frozen=True)
class Shape:
    """What the option checks need of a canvas: masked positions, positions from the first mask to the end."""

    masked: int
    span: int
    template: bool = False


def check_options(params: SamplingParams, method: Method) -> None:
    """Refuse what ``method`` does not read and what contradicts itself whatever the length.

    Raises:
        OptionError: names the field, its value and the method.
    """
    for name, value in params.given().items():
        if name not in method.options:
            reads = ", ".join(sorted(method.options)) or "none"
            raise OptionError(f"{name}={value!r} is not read by method {method.name}; its options: {reads}")
    if params.temperature == 0 and not method.rule.categorical:
        for name, off in (("top_p", 1.0), ("top_k", 0)):
            if getattr(params, name) != off:
                raise OptionError(
                    f"{name}={getattr(params, name)} has no effect at temperature 0 with method {method.name}"
                )
    noisy = params.temperature > 0 or bool(params.alg_temp) or method.rule.random_order
    if params.n > 1 and not noisy:
        raise OptionError(
            f"n={params.n} at temperature 0 would give {params.n} equal answers; set a temperature"
        )


def numbers_for(params: SamplingParams, method: Method, shape: Shape, seed: int) -> dict[str, float]:
    """The engine's numbers (``core.state.NUMBERS``) of one request.

    Raises:
        OptionError: ``steps`` and ``block_length`` do not fit the length.
    """
    numbers: dict[str, float] = {
        **method.defaults, "seed": seed, "stop_at_eos": params.stop_at_eos and not shape.template
    }  # fmt: skip
    for name, value in params.given().items():
        if name == "eos":
            numbers["suppress"] = EOS_POLICIES.index(value)
        elif name == "rule":
            numbers["rule"] = RULES.index(value)
        else:
            numbers[name] = value
    if "steps" in method.options:
        numbers["steps"] = _steps(params, method, shape)
    return numbers


def _steps(params: SamplingParams, method: Method, shape: Shape) -> int:
    """Steps of a fixed schedule; by default one token a step."""
    if params.steps is not None and params.steps > shape.masked:
        raise OptionError(f"steps={params.steps} is more than the {shape.masked} tokens to decode")
    if "block_length" not in method.options:
        return params.steps or shape.masked
    block = params.block_length or int(NUMBERS["block_length"][1])
    blocks = -(-shape.span // block)
    given = params.steps is not None or params.block_length is not None
    if given and not shape.template and shape.span % block:
        why = "" if params.block_length else " (the default)"
        raise OptionError(f"block_length={block}{why} does not divide max_tokens={shape.span}")
    if params.steps is None:
        return blocks * block
    if params.steps % blocks:
        raise OptionError(f"steps={params.steps} is not a multiple of the {blocks} blocks of {block} tokens")
    return params.steps
