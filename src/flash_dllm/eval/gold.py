"""A check of the scoring: the data sets' own answers, or nonsense, in place of a model's."""

from __future__ import annotations

from collections.abc import Sequence

from flash_dllm.eval.answers import Answerer, Ask
from flash_dllm.eval.errors import EvalError
from flash_dllm.eval.journal import Answer

FIELDS = {"gsm8k": "answer", "minerva_math": "solution", "humaneval": "canonical_solution", "mbpp": "code"}
"""Where a row has its answer, by the beginning of the task's name."""
NONSENSE = "I do not know ("


class GoldAnswerer(Answerer):
    """Gives the answer that stands in the data. No model takes part, so every cost is 0."""

    def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        """One answer a request.

        Raises:
            EvalError: a task whose rows hold no answer that could be given.
        """
        made = [self._given(ask, self.text(ask)) for ask in asks]
        self.answers += made
        return made

    def text(self, ask: Ask) -> str:
        """What is said."""
        field = next((field for name, field in FIELDS.items() if ask.task.startswith(name)), None)
        if field is None or ask.row is None:
            raise EvalError(f"answers='gold': not known for task {ask.task}; known: {', '.join(FIELDS)}")
        return str(ask.row[field])

    def _given(self, ask: Ask, text: str) -> Answer:
        return Answer("", ask.task, ask.doc, text, text, "stop", 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0)


class BrokenAnswerer(GoldAnswerer):
    """Gives the same nonsense everywhere."""

    def text(self, ask: Ask) -> str:
        """No answer to anything."""
        return NONSENSE
