"""The numbers of the toys as JSON, from the engine's own classes (``flash-dllm explain --export-data``)."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from .cache_toy import DEFAULTS, Setting, run_policy
from .script import BLOCK, LAYERS, PROMPT, WINDOW, default_script
from .verify_toy import EXAMPLE, SEARCH, outcome
from .views_toy import matrices

EPSILON, GAMMA = 0.9, 0.8


def cache_entry(chosen: Setting) -> dict[str, Any]:
    """A setting and what its policy recomputed, as the page reads it."""
    return {"setting": asdict(chosen), **asdict(run_policy(chosen))}


def toy_data() -> dict[str, Any]:
    """Everything the toys start from: schedule, default settings and their results, window, matrices."""
    script = default_script()
    return {
        "cache": {
            "prompt": PROMPT,
            "block": BLOCK,
            "window": WINDOW,
            "layers": LAYERS,
            "script": asdict(script),
            "runs": [cache_entry(chosen) for chosen in DEFAULTS],
        },
        "verify": {
            "window": [asdict(place) for place in EXAMPLE],
            "search": SEARCH,
            "epsilon": EPSILON,
            "gamma": GAMMA,
            "outcome": asdict(outcome(EXAMPLE, EPSILON, GAMMA)),
        },
        "views": {name: asdict(made) for name, made in matrices().items()},
    }


def toy_json() -> str:
    """:func:`toy_data` as text; floats are rounded so that it is the same on every machine."""
    return json.dumps(_rounded(toy_data()), separators=(",", ":"), ensure_ascii=False) + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return value
