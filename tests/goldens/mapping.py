"""Which of our methods a trace belongs to."""

from __future__ import annotations

from typing import Any

from .harness import CONFIDENCE_TOLERANCE, ENTROPY_TOLERANCE, Setup

CACHE_OF = {"nocache": "none", "prefix": "prefix", "dual": "dual"}


def setup_for(trace: dict[str, Any], name: str, family: str) -> Setup | None:
    """The setup of a golden-trace/1 file, or None where the method is not implemented."""
    if name.startswith("llada_"):
        return _llada(trace)
    if name.startswith("dream_"):
        return _dream(trace)
    if name.startswith(("fastdllm_", "dinfer_fastdllm_")):
        return _fast_dllm(trace, name) if family == "llada" else _fast_dllm_dream(trace, name)
    return None


def _llada(trace: dict[str, Any]) -> Setup:
    p = trace["parameters"]
    numbers = {k: p[k] for k in ("steps", "block_length", "temperature", "cfg_scale")}
    numbers["suppress"] = 1 if p.get("logits_eos_inf") else 2 if p.get("confidence_eos_eot_inf") else 0
    decoding = "random" if p["remasking"] == "random" else "greedy"
    return Setup("none", decoding, numbers, seed=trace.get("seed"))


def _dream(trace: dict[str, Any]) -> Setup:
    p = trace["parameters"]
    tolerance = ENTROPY_TOLERANCE if p["alg"] == "entropy" else CONFIDENCE_TOLERANCE
    return Setup("none", p["alg"], _dream_numbers(p), seed=trace.get("seed"), tolerance=tolerance)


def _dream_numbers(p: dict[str, Any]) -> dict[str, Any]:
    return {
        "steps": p["steps"],
        "t_end": p["eps"],
        "temperature": p["temperature"],
        "top_p": p["top_p"] or 1.0,
        "top_k": p["top_k"] or 0,
        "alg_temp": p["alg_temp"] or 0.0,
    }


def _fast_dllm_dream(trace: dict[str, Any], name: str) -> Setup:
    p = trace["parameters"]
    cache = CACHE_OF[name.split("_")[1]]
    schedule = None if cache == "none" else "blocks-dream-as-released"
    if cache == "none" and p["alg"] != "confidence_threshold":
        return _dream(trace)
    numbers = _dream_numbers(p)
    if "block_length" in p:
        numbers["block_length"] = p["block_length"]
    if p["alg"] == "confidence_threshold":
        numbers["epsilon"] = p["threshold"]
        decoding = "quota" if cache == "none" else "threshold"
        return Setup(cache, decoding, numbers, schedule=schedule)
    # The public block code ranks by entropy under every other name.
    return Setup(cache, "entropy", numbers, schedule=schedule, tolerance=ENTROPY_TOLERANCE, sure_in_full=True)


def _fast_dllm(trace: dict[str, Any], name: str) -> Setup:
    p = trace["parameters"]
    numbers: dict[str, Any] = {"block_length": p["block_length"]}
    if p.get("factor") is not None:
        decoding, numbers["factor"] = "factor", p["factor"]
    elif p.get("threshold") is not None:
        decoding, numbers["epsilon"] = "threshold", p["threshold"]
    else:
        decoding, numbers["steps"] = "greedy", p["steps"]
    cache = CACHE_OF[name.removeprefix("dinfer_").split("_")[1]]
    # The first public code spends one pass too many on a block that its full pass has finished; later code does not.
    late = name.startswith("dinfer_") or decoding == "factor" or cache == "none"
    return Setup(cache, decoding, numbers, schedule="blocks" if late else "blocks-as-released")
