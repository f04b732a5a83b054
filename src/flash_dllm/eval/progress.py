"""How far an evaluation is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from flash_dllm.progress import bar

EVERY = 20.0
"""Seconds between lines."""


@contextmanager
def progress(total: int, done: int, every: float = EVERY) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the tokens of each finished answer; ``done`` were finished before."""
    if sys.stderr.isatty():
        with bar(total, True, done) as advance:
            yield advance
        return
    lines = Lines(total, done, every)
    yield lines.advance


class Lines:
    """Says every few seconds how many answers there are, at which rate, and what is left."""

    def __init__(self, total: int, done: int, every: float) -> None:
        self.total, self.before, self.done, self.tokens, self.every = total, done, done, 0, every
        self.began = self.said = time.monotonic()

    def advance(self, tokens: int) -> None:
        self.done += 1
        self.tokens += tokens
        now = time.monotonic()
        if now - self.said >= self.every or self.done == self.total:
            self.said = now
            print(self.line(now - self.began), file=sys.stderr, flush=True)

    def line(self, seconds: float) -> str:
        """``12 of 20 answers, 31.5 tokens/s, 0:01:10 left``."""
        rate = (self.done - self.before) / seconds if seconds else 0.0
        left = timedelta(seconds=round((self.total - self.done) / rate)) if rate else "?"
        speed = self.tokens / seconds if seconds else 0.0
        return f"flash-dllm: {self.done} of {self.total} answers, {speed:.1f} tokens/s, {left} left"
