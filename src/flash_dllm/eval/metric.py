"""The ``code_eval`` metric that the harness's humaneval and mbpp load by name from a hub, as our sandbox."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from flash_dllm.eval.sandbox import pass_rate

TASK_MODULES = ("lm_eval.tasks.humaneval.utils", "lm_eval.tasks.mbpp.utils")


class SandboxedCodeEval:
    """Has the one method of the hub's metric that the tasks call."""

    def compute(
        self, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int] = (1,)
    ) -> tuple[dict[str, float], dict[int, Any]]:
        """``pass@1`` of candidate programs; nothing else than k = 1 is asked for by the tasks here."""
        if list(k) != [1]:
            raise ValueError(f"k={list(k)}: only pass@1 is computed")
        return {"pass@1": pass_rate(references, predictions)}, {}


@contextmanager
def sandboxed_code_eval() -> Iterator[None]:
    """While this holds, ``evaluate.load("code_eval")`` gives ours; no hub is asked and no variable need be set."""
    import evaluate

    original = evaluate.load

    def load(path: str, *args: Any, **kwargs: Any) -> Any:
        return SandboxedCodeEval() if path == "code_eval" else original(path, *args, **kwargs)

    evaluate.load = load
    # A module that was loaded with another metric would keep it.
    for name in TASK_MODULES:
        sys.modules.pop(name, None)
    try:
        yield
    finally:
        evaluate.load = original
