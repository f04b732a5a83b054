"""The error of wrong input to an evaluation, and of an extra that is not installed."""

from __future__ import annotations

from importlib.util import find_spec

from flash_dllm.errors import FlashDLLMError


class EvalError(FlashDLLMError):
    """Something about tasks, data or options is wrong; the message names it."""


def need(module: str, what: str) -> None:
    """Refuse early where an optional package is missing.

    Raises:
        EvalError: says which extra brings ``module``.
    """
    if find_spec(module) is None:
        raise EvalError(f"{what} needs the package {module}: pip install 'flash-dllm[eval]'")
