"""The command group: loads a command when it is called, and turns errors into one line and an exit code.

Exit codes: 0 done, 1 something failed while running, 2 wrong input, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from flash_dllm.errors import FlashDLLMError

COMMANDS = {
    "generate": ("generate", "Answer a prompt, or many from a JSONL file."),
    "chat": ("chat", "Talk to a model; reads a script from a pipe too."),
    "demo": ("demo", "Watch the bundled model answer three prompts."),
    "serve": ("serve", "Serve a model over OpenAI's API."),
    "models": ("models", "What is supported; what a checkpoint is and needs."),
    "methods": ("methods", "Caches and decodings, their papers and options."),
    "batch": ("batch", "Answer every row of a file or folder, here or on many engines."),
    "plan": ("plan", "Replicas, queue time and cost for a load, by simulation."),
    "explain": ("explain", "Pages that show how caches and verification work."),
    "trace": ("trace", "Event logs as one HTML file that plays them."),
    "compare": ("compare", "The same prompts over several methods, in a table."),
    "bench": ("bench", "Measure kernels, steps, throughput, a server, methods, ablations."),
    "analyze": ("analyze", "What happens inside a method: how stale its cache is."),
    "eval": ("eval", "GSM8K, MATH, HumanEval, MBPP through lm-evaluation-harness."),
    "reproduce": ("reproduce", "The paper's tables and figures, beside numbers measured here."),
    "eval-tiny": ("evaluate", "Accuracy of the bundled model on its held-out tasks."),
    "train": ("train", "Train the bundled models from scratch."),
    "tune": ("tune", "Measure the kernels' tiles on this GPU and keep the best."),
    "doctor": ("doctor", "What this machine has and what will run where."),
}
"""Command -> its module in this package and its line in ``--help``."""


class Root(TyperGroup):
    """Commands by name, imported on first use."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"flash_dllm.cli.{COMMANDS[cmd_name][0]}")
        command = typer.main.get_command(module.app)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        words, debug = _take_debug(list(sys.argv[1:] if args is None else args))
        warnings.showwarning = lambda message, *_, **__: typer.echo(f"flash-dllm: note: {message}", err=True)
        try:
            code = super().main(
                words or ["--help"], "flash-dllm", complete_var, False, windows_expand_args, **extra
            )
        except (Exception, KeyboardInterrupt) as exc:
            code = report(exc, debug)
        code = code if isinstance(code, int) else 0
        if not standalone_mode:
            return code
        sys.exit(code)


def _take_debug(words: list[str]) -> tuple[list[str], bool]:
    """``--debug`` may stand anywhere before ``--``."""
    end = words.index("--") if "--" in words else len(words)
    kept = [w for i, w in enumerate(words) if w != "--debug" or i > end]
    return kept, len(kept) < len(words)


def report(exc: BaseException, debug: bool = False) -> int:
    """Say in one line on stderr what went wrong; returns the exit code."""
    if debug:
        traceback.print_exception(exc)
    if isinstance(exc, BrokenPipeError):
        # The reader went away; Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if isinstance(exc, KeyboardInterrupt | typer.Abort):
        typer.echo("flash-dllm: interrupted", err=True)
        return 130
    message, code = explain(exc)
    hint = "" if debug or code == 2 else " (--debug shows where)"
    typer.echo(f"flash-dllm: error: {message}{hint}", err=True)
    return code


def explain(exc: BaseException) -> tuple[str, int]:
    """One line about an exception, and the exit code it stands for."""
    kind = type(exc).__name__
    if hasattr(exc, "format_message"):
        return _one_line(exc.format_message()), 2
    if kind == "ValidationError" and hasattr(exc, "errors"):
        return _validation(exc.errors()), 2
    if isinstance(exc, FlashDLLMError) or kind == "TraceError":
        return _one_line(str(exc)), 2
    if isinstance(exc, OSError) and exc.filename is not None:
        return f"{exc.filename}: {exc.strerror}", 2
    if kind == "OutOfMemoryError" or isinstance(exc, MemoryError):
        return "out of memory; lower --max-num-seqs or --max-model-len (see flash-dllm models)", 1
    return f"{kind}: {_one_line(str(exc))}", 1


def _validation(errors: list[Any]) -> str:
    first = errors[0]
    name = ".".join(str(part) for part in first["loc"]) or "options"
    if first["type"] == "extra_forbidden":
        return f"unknown option {name!r}"
    return _one_line(f"{name}={first['input']!r}: {first['msg']}")


def _one_line(text: str) -> str:
    return " ".join(text.split())


app = typer.Typer(
    cls=Root, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
    epilog="--debug after any command shows the traceback of an error.",
)  # fmt: skip


@app.callback()
def _describe() -> None:
    """An inference engine for masked diffusion language models (LLaDA, Dream)."""
