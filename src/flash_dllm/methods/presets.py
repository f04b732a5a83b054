"""Named settings: the paper's by task (Flash-dLLM, arXiv 2609.26796, Table 3), and the released code as it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flash_dllm.core.method import Method

from . import MethodError, build_method
from .flash_reference import reference


@dataclass(frozen=True)
class Preset:
    """A method with its options and the defaults of its per-request numbers."""

    cache: str
    decoding: str
    summary: str
    options: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)


def _task(summary: str, gamma: float, track: int = 64) -> Preset:
    options = {"window": 16, "lookahead": 48, "track": track}
    return Preset("flash", "verify", summary, options, {"epsilon": 0.9, "gamma": gamma})


PRESETS: dict[str, Preset] = {
    "gsm8k": _task("Table 3, GSM8K: track 64, gamma 0.8", 0.8),
    "math": _task("Table 3, MATH: track 64, gamma 0.85", 0.85),
    "humaneval": _task("Table 3, HumanEval: track 64, gamma 0.85", 0.85),
    "mbpp": _task("Table 3, MBPP: track 48, gamma 0.8", 0.8, track=48),
    "reference": Preset(
        "flash-reference", "verify", "the released code, quirks included; what its traces hold"
    ),
}


def build_preset(
    name: str,
    *,
    family: str,
    eos_id: int | None,
    cache: str | None,
    decoding: str | None,
    options: dict[str, Any],
) -> Method:
    """Construct the method of a preset; ``cache``, ``decoding`` and ``options`` override parts of it.

    Args:
        eos_id: end-of-text token; the reference preset fills the rows past the answer with it.

    Raises:
        MethodError: an unknown preset, or an override that it does not take.
    """
    if name not in PRESETS:
        raise MethodError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    preset = PRESETS[name]
    if name == "reference":
        if family != "llada":
            raise MethodError(
                f"preset 'reference' is the released code, which is for LLaDA; this is a {family} model"
            )
        return _reference(eos_id, cache, decoding, options)
    method = build_method(
        cache or preset.cache,
        decoding or preset.decoding,
        family=family,
        **_merged(preset, cache, decoding, options),
    )
    known = {k: v for k, v in preset.numbers.items() if k in method.options}
    method.preset = {**method.preset, **known}
    return method


def _merged(
    preset: Preset, cache: str | None, decoding: str | None, options: dict[str, Any]
) -> dict[str, Any]:
    """The preset's options that the overriding parts still read, then the given ones."""
    if cache not in (None, preset.cache):
        return options
    return {**preset.options, **options}


def _reference(
    eos_id: int | None, cache: str | None, decoding: str | None, options: dict[str, Any]
) -> Method:
    if cache not in (None, "flash"):
        raise MethodError(f"preset 'reference' is Flash-Cache as released; it does not take cache={cache!r}")
    if decoding not in (None, "verify", "threshold"):
        raise MethodError(f"preset 'reference' has decodings verify and threshold, not {decoding!r}")
    if eos_id is None:
        raise MethodError("preset 'reference' needs a model with an end-of-text token")
    unread = set(options) - {"window", "track_num", "mask_num"}
    if unread:
        raise MethodError(
            f"option {sorted(unread)[0]!r} is not read by preset 'reference'; its options: window, track_num, mask_num"
        )
    return reference(eos_id, verify=decoding != "threshold", **options)
