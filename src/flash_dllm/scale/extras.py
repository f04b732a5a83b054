"""Optional packages: one clear line where one is missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from flash_dllm.errors import FlashDLLMError


class ScaleError(FlashDLLMError):
    """A batch, a deployment or a plan that cannot be done as it was asked for."""


def need(module: str, what: str, extra: str) -> Any:
    """Import a package of an extra.

    Raises:
        ScaleError: it is not installed; the message says how to install it.
    """
    try:
        return import_module(module)
    except ImportError as exc:
        raise ScaleError(
            f"{what} needs {module.partition('.')[0]}: pip install 'flash-dllm[{extra}]'"
        ) from exc
