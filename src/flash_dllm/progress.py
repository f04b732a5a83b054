"""Progress on stderr: a bar with a rate, and a line that counts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(total: int, show: bool, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the answer tokens of each finished prompt."""
    if not show or not sys.stderr.isatty():
        yield lambda tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total, completed=done, rate="")
        tokens = 0

        def advance(count: int) -> None:
            nonlocal tokens
            tokens += count
            elapsed = progress.tasks[0].elapsed or 0.0
            rate = f"{tokens / elapsed:.1f} tokens/s" if elapsed else ""
            progress.update(task, advance=1, rate=rate)

        yield advance


def counted(what: str, steps: Iterator[tuple[int, int]], show: bool) -> Iterator[int]:
    """Pass on how many of how many are done, and show it: in a terminal on one line, else on a line each."""
    end = "\r" if sys.stderr.isatty() else "\n"
    done = 0
    for done, total in steps:
        if show:
            print(f"{what}: {done} of {total}", end=end, file=sys.stderr, flush=True)
        yield done
    if show and done and end == "\r":
        print(file=sys.stderr)
