"""``flash-dllm chat``: a conversation at the terminal, or a script of turns from a pipe."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from flash_dllm.cli.fields import UsageError, takes_options
from flash_dllm.errors import FlashDLLMError
from flash_dllm.params import EngineArgs, SamplingParams

app = typer.Typer(add_completion=False, rich_markup_mode=None)
HELP = "/reset forgets the conversation, /quit or Ctrl-D ends it"


@app.command(epilog=f"Commands: {HELP}.")
@takes_options
def chat(
    engine: EngineArgs,
    params: SamplingParams,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="no live canvas, text as it becomes stable")] = False,
) -> None:
    """Talk to a model; from a pipe, each line is a turn.

    A conversation that no longer fits is an error that costs the turn, not the conversation.
    """
    if params.n != 1:
        raise UsageError(f"n={params.n}: a conversation has one answer a turn")
    from flash_dllm.llm import LLM

    if engine.max_num_seqs is None:
        engine = engine.model_copy(update={"max_num_seqs": 2 if params.cfg_scale else 1})
    llm = LLM.from_args(engine)
    if not llm.has_chat_template:
        raise UsageError(f"{engine.model} has no chat template; use generate, or give --chat-template")
    start = [{"role": "system", "content": system}] if system else []
    talk = list(start)
    live = sys.stdout.isatty() and not plain
    asks = sys.stdin.isatty()
    if asks:
        typer.echo(f"{engine.model}; {HELP}", err=True)
    while (line := _next_line(asks)) is not None:
        if line in ("/quit", "/exit"):
            return
        if line == "/reset":
            talk = list(start)
        elif line:
            turn = [*talk, {"role": "user", "content": line}]
            answer = _answer(llm, turn, params, live)
            if answer is not None:
                talk = [*turn, {"role": "assistant", "content": answer}]


def _next_line(asks: bool) -> str | None:
    if asks:
        typer.echo("> ", nl=False, err=True)
    data = sys.stdin.buffer.readline()
    if not data:
        return None
    try:
        return data.decode("utf-8").strip()
    except UnicodeDecodeError as exc:
        raise UsageError("stdin: not valid UTF-8") from exc


def _answer(llm: Any, turn: list[dict[str, str]], params: SamplingParams, live: bool) -> str | None:
    """Show the answer to a turn and return it; None if the turn could not be served."""
    from flash_dllm.cli.generate import show

    try:
        job = llm.job(turn, params)
    except FlashDLLMError as exc:
        typer.echo(f"flash-dllm: error: {exc}", err=True)
        return None
    answer = show(llm, job, turn[-1]["content"], plain=not live)
    if answer.error:
        typer.echo(f"flash-dllm: error: {answer.error}", err=True)
        return None
    text: str = answer.text
    return text
