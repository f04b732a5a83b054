"""Offline batches: every row of an input answered once, however often the run is interrupted.

The output is the record of what is done. A run reads the ids in it, skips these rows, and answers the others; the side
file of bad rows is written anew by each run, so that repaired rows are tried again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import flash_dllm
from flash_dllm.params import EngineArgs, SamplingParams
from flash_dllm.scale.extras import ScaleError
from flash_dllm.scale.rows import BadRow, Row
from flash_dllm.scale.store import Place, Source, Writer, finished_ids, open_writer

Answers = Callable[[Iterator[Row]], Iterator["dict[str, Any] | BadRow"]]
"""What becomes of each row, in any order."""
FREE = ("device", "max_num_seqs")
"""Engine options that may change between the runs of one output: no answer depends on them."""


@dataclass(frozen=True)
class BatchArgs:
    """What a batch is to do.

    Attributes:
        input: file, folder or pattern of ``.jsonl`` or ``.parquet``; a path or an address that fsspec knows.
        output: file ``.jsonl``; or a folder of parts where that cannot be appended to.
        engine: of every engine.
        params: of rows that name none.
        raw: no chat template.
        part_size: rows of a part of the output.
        part_seconds: a part is written after this time, whatever it holds.
    """

    input: str
    output: str
    engine: EngineArgs
    params: SamplingParams
    raw: bool = False
    part_size: int = 1000
    part_seconds: float = 60.0


@dataclass
class Count:
    """Rows by what became of them: in the output before, answered, bad; and the answers' tokens."""

    total: int
    before: int = 0
    answered: int = 0
    bad: int = 0
    tokens: int = 0

    @property
    def left(self) -> int:
        return self.total - self.before - self.answered - self.bad


class Outputs:
    """The output of a batch, its side file of bad rows and its settings, all beside each other."""

    def __init__(self, args: BatchArgs) -> None:
        self.args = args
        self.place = Place.of(args.output)
        if self.place.format is None:
            raise ScaleError(f"{args.output}: the name must end in .jsonl or .parquet")
        self.errors = self.place.beside(".errors.jsonl")
        self.settings = self.place.beside(".run.json")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Two runs at once would answer rows twice. Only local files can be held."""
        if not self.place.local:
            yield
            return
        import os
        from fcntl import LOCK_EX, LOCK_NB, flock

        os.makedirs(os.path.dirname(self.settings.path) or ".", exist_ok=True)
        with open(self.settings.path, "ab") as file:
            try:
                flock(file, LOCK_EX | LOCK_NB)
            except OSError as exc:
                raise ScaleError(f"{self.args.output}: another run is writing it") from exc
            yield

    def check_settings(self, begun: bool) -> None:
        """Note the settings; an output that is ``begun`` has answers of one model and method only.

        Raises:
            ScaleError: an earlier run had other settings; names the first that differs.
        """
        args = self.args
        engine = args.engine.model_dump(mode="json", exclude={*FREE, "seed"}, exclude_defaults=True)
        now: dict[str, Any] = {
            **engine, "engine_seed": args.engine.seed,
            **args.params.model_dump(mode="json", exclude_unset=True), "raw": args.raw,
            "input": args.input.rstrip("/").rpartition("/")[2],
        }  # fmt: skip
        fs, path = self.settings.fs, self.settings.path
        text = fs.cat_file(path).decode("utf-8") if fs.exists(path) else ""
        if not begun or not text:
            record = {"flash_dllm": flash_dllm.__version__, "settings": now}
            fs.pipe_file(path, json.dumps(record, indent=2).encode("utf-8"))
            return
        try:
            before = json.loads(text)["settings"]
        except (ValueError, TypeError, KeyError) as exc:
            raise ScaleError(f"{path}: not the settings of a batch") from exc
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name):
                raise ScaleError(
                    f"{args.output} was begun with {_given(before, name)}, not {_given(now, name)}: take the same "
                    "options, or another output"
                )

    def open_errors(self) -> Writer:
        """The side file, empty.

        Raises:
            ScaleError: a local folder has its name.
        """
        if self.errors.fs.exists(self.errors.path):
            if self.errors.local and self.errors.fs.isdir(self.errors.path):
                raise ScaleError(
                    f"{self.errors.path}: is a folder; rows that are bad go to a file of this name"
                )
            self.errors.fs.rm(self.errors.path, recursive=not self.errors.local)
        return open_writer(self.errors, self.args.part_size)

    @property
    def begun(self) -> bool:
        """A batch has written its settings here."""
        return bool(self.settings.fs.exists(self.settings.path) and self.settings.fs.size(self.settings.path))


def _given(settings: dict[str, Any], name: str) -> str:
    return f"{name}={settings[name]!r}" if name in settings else f"the default {name}"


def run_batch(args: BatchArgs, answers: Answers, progress: Progress | None = None) -> Count:
    """Answer every row that the output lacks.

    Args:
        answers: the engine or engines; gets the rows in order of the input.

    Raises:
        ScaleError: input, output or settings are wrong; nothing is decoded then.
    """
    source, outputs = Source(args.input), Outputs(args)
    source.leave_out((outputs.place, outputs.errors, outputs.settings))
    with outputs.locked():
        done = finished_ids(outputs.place, outputs.begun)
        outputs.check_settings(begun=bool(done))
        count = Count(source.count())
        out, errors = open_writer(outputs.place, args.part_size), outputs.open_errors()
        try:
            with progress or nullcontext():
                _answer_all(
                    args, answers, _Sorter(source.rows(args.params), done, count), (out, errors), progress
                )
        finally:
            out.close()
            errors.close()
    return count


def _answer_all(
    args: BatchArgs,
    answers: Answers,
    rows: _Sorter,
    writers: tuple[Writer, Writer],
    progress: Progress | None,
) -> None:
    out, errors = writers
    count, flushed = rows.count, time.monotonic()
    for outcome in _with_bad_rows(answers(rows.good()), rows):
        if isinstance(outcome, BadRow):
            count.bad += 1
            errors.write(outcome.record())
        else:
            count.answered += 1
            count.tokens += outcome["usage"]["completion_tokens"]
            out.write(outcome)
        if time.monotonic() - flushed > args.part_seconds:
            out.flush()
            errors.flush()
            flushed = time.monotonic()
        if progress is not None:
            progress.show(count)


def _with_bad_rows(outcomes: Iterable[Any], rows: _Sorter) -> Iterator[Any]:
    """Outcomes, and the rows that were found bad while reading, as they are found."""
    for outcome in outcomes:
        yield from rows.take_bad()
        yield outcome
    yield from rows.take_bad()


class _Sorter:
    """Reads rows; hands on the good ones that are not done and puts the bad ones aside."""

    def __init__(self, rows: Iterator[Row | BadRow], done: set[str], count: Count) -> None:
        self._rows, self._done, self.count = rows, done, count
        self._first: dict[str, str] = {}
        self._bad: list[BadRow] = []

    def good(self) -> Iterator[Row]:
        for row in self._rows:
            first = self._first.setdefault(row.id, row.where)
            if first != row.where:
                record = row.record() if isinstance(row, Row) else row.row
                self._bad.append(
                    BadRow(row.id, row.where, f"id {row.id!r} is there twice, first in {first}", record)
                )
            elif isinstance(row, BadRow):
                self._bad.append(row)
            elif row.id in self._done:
                self.count.before += 1
            else:
                yield row

    def take_bad(self) -> list[BadRow]:
        taken, self._bad = self._bad, []
        return taken


class Progress(AbstractContextManager["Progress"]):
    """Rows done, the rate and the time left: a bar in a terminal, else a line every ``seconds`` seconds.

    Args:
        say: writes a line.
    """

    def __init__(self, say: Callable[[str], None], terminal: bool, seconds: float = 30.0) -> None:
        self._say, self._terminal, self._seconds = say, terminal, seconds
        self._bar: Any = None
        self._began = self._said = time.monotonic()

    def __enter__(self) -> Progress:
        self._began = self._said = time.monotonic()
        if self._terminal:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = TextColumn("rows"), BarColumn(), TextColumn("{task.description}")
            self._bar = Bar(*columns, console=Console(stderr=True))
            self._bar.start()
            self._bar.add_task("", total=None)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, count: Count) -> None:
        """Show where the run is, if it is time to."""
        now = time.monotonic()
        if self._bar is None and now - self._said < self._seconds:
            return
        self._said = now
        text = progress_line(count, now - self._began)
        if self._bar is None:
            self._say(text)
        else:
            self._bar.update(0, total=count.total, completed=count.total - count.left, description=text)


def progress_line(count: Count, seconds: float) -> str:
    """``120 of 500 rows, 3 bad, 12.0 rows/s, 480.1 tokens/s, 32 s left``."""
    done = count.answered + count.bad
    text = f"{count.total - count.left} of {count.total} rows, {count.bad} bad"
    if not done or seconds <= 0:
        return text
    rate = done / seconds
    return f"{text}, {rate:.1f} rows/s, {count.tokens / seconds:.1f} tokens/s, {count.left / rate:.0f} s left"
