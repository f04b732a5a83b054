"""Running commands in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from typer.testing import CliRunner


@dataclass
class Outcome:
    """What a command printed and its exit code."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run() -> Run:
    """``run("generate", "-m", folder, stdin="text")``."""
    from flash_dllm.cli.root import app

    def call(*words: object, stdin: str | bytes | None = None) -> Outcome:
        result = CliRunner().invoke(app, [str(w) for w in words], input=stdin)  # type: ignore[arg-type]
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return call
