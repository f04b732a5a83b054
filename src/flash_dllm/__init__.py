"""Flash-dLLM: an inference engine for unmodified masked diffusion language models.

Names load on first use, so that importing the package needs neither torch nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flash_dllm.errors import FlashDLLMError
    from flash_dllm.infill import Gap
    from flash_dllm.llm import LLM
    from flash_dllm.outputs import Certificate, Completion, RequestOutput, StreamEvent
    from flash_dllm.params import EngineArgs, SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Certificate",
    "Completion",
    "EngineArgs",
    "FlashDLLMError",
    "Gap",
    "RequestOutput",
    "SamplingParams",
    "StreamEvent",
]
_HOME = {
    "LLM": "llm",
    "Certificate": "outputs",
    "Completion": "outputs",
    "RequestOutput": "outputs",
    "StreamEvent": "outputs",
    "EngineArgs": "params",
    "SamplingParams": "params",
    "FlashDLLMError": "errors",
    "Gap": "infill",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
