"""Which trace families have a runner of their own, by the beginning of the file's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flash_dllm.models.layers import Model

from .delta import run_dllm_cache, run_dynamic_dllm
from .dkv import run_dkv, run_freecache, run_guided
from .elastic import run_elastic
from .flash import run_flash
from .freedave import run_freedave

Runner = Callable[[Model, dict[str, Any]], None]
"""Decodes a trace's prompt with ``model`` and asserts that every step is that of the trace."""

RUNNERS: dict[str, Runner] = {
    "flash-dllm-": run_flash,
    "freedave-": run_freedave,
    "elastic-cache-": run_elastic,
    "dllm-cache-": run_dllm_cache,
    "dynamic-dllm-": run_dynamic_dllm,
    "dkv-cache-": run_dkv,
    "flashdlm-freecache-": run_freecache,
    "flashdlm-guided-": run_guided,
}


def runner_for(name: str) -> Runner | None:
    """The runner of the trace called ``name``, if its family has one."""
    return next((runner for prefix, runner in RUNNERS.items() if name.startswith(prefix)), None)
