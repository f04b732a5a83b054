"""Answers on disk as soon as they are there, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from flash_dllm.eval.errors import EvalError


@dataclass(frozen=True)
class Answer:
    """One answer and what it cost.

    Attributes:
        key: of the request: task, prompt tokens and sampling parameters.
        text: cut at the first stop string; ``full_text`` is what was decoded up to the first stop token.
        prompt_tokens: of the prompt that the model saw; ``cut_tokens`` were taken off its beginning.
        answer_tokens: decoded up to, without, the first stop token; ``kept_tokens`` of them are before the stop string.
        nfe, steps, rows: forward passes in which the request took part, commit rounds, rows recomputed.
        seconds, queued: from its first pass to its end, and before.
        elapsed: seconds from the start of ``run`` (number of the process that answered) to the answer's end.
        error: why there is no answer.
    """

    key: str
    task: str
    doc: int
    text: str
    full_text: str
    finish_reason: str
    prompt_tokens: int
    cut_tokens: int
    answer_tokens: int
    kept_tokens: int
    nfe: int
    steps: int
    rows: int
    seconds: float
    queued: float
    elapsed: float
    run: int
    error: str | None = None


class Journal:
    """The answers of a run, in a file of JSON Lines whose first line holds the run's settings.

    Args:
        path: the file, or None to keep nothing.
        settings: what an answer depends on. A file of other settings is refused.

    Raises:
        EvalError: the file belongs to other settings, or is no journal.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self.path = path
        self.answers: dict[str, Answer] = {}
        self.run = 0
        self._file = None
        settings = json.loads(json.dumps(settings))
        if path is None:
            return
        if path.exists() and path.stat().st_size:
            self._read(path, settings)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"settings": settings}, ensure_ascii=False) + "\n", encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")

    def _read(self, path: Path, settings: dict[str, Any]) -> None:
        data = path.read_bytes()
        # An interruption may have cut the last line.
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            path.write_bytes(whole)
        try:
            first, *rest = [json.loads(line) for line in whole.decode("utf-8").splitlines()]
            known = first["settings"]
            names = {f.name for f in fields(Answer)}
            answers = [Answer(**{k: v for k, v in line.items() if k in names}) for line in rest]
        except (ValueError, KeyError, TypeError) as error:
            raise EvalError(f"{path}: not the answers of an earlier evaluation ({error})") from error
        for name in sorted({*known, *settings}):
            if known.get(name) != settings.get(name):
                raise EvalError(
                    f"{path} holds answers with {name}={known.get(name)!r}; this run has "
                    f"{settings.get(name)!r}: choose another folder, or remove that one to begin anew"
                )
        self.answers = {a.key: a for a in answers if a.error is None}
        self.run = max((a.run for a in answers), default=-1) + 1

    def add(self, answer: Answer) -> None:
        """Keep an answer, on disk at once."""
        self.answers[answer.key] = answer
        if self._file is not None:
            self._file.write(json.dumps(asdict(answer), ensure_ascii=False) + "\n")
            self._file.flush()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def wall_seconds(answers: Iterable[Answer]) -> float:
    """Wall time of some answers: of each process that gave some of them, up to its last one."""
    by_run: dict[tuple[int, str], float] = {}
    for answer in answers:
        run = (answer.run, answer.task)
        by_run[run] = max(by_run.get(run, 0.0), answer.elapsed)
    return sum(by_run.values())
