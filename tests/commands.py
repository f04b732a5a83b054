"""Running commands in this process."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from typer.testing import CliRunner


@dataclass
class Outcome:
    """What a command printed and its exit code."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]
"""``run("generate", "-m", folder, stdin="text")``."""


def run_command(*words: object, stdin: str | bytes | None = None) -> Outcome:
    """Run ``flash-dllm WORDS`` in this process."""
    from flash_dllm.cli.root import app

    result = CliRunner().invoke(app, [str(w) for w in words], input=stdin)  # type: ignore[arg-type]
    return Outcome(result.exit_code, result.stdout, result.stderr)


def interruptible() -> None:
    """``preexec_fn`` of a process that a test interrupts.

    What a shell starts in its background has interrupts ignored, and so would its children.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
