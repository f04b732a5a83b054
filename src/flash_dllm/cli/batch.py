"""``flash-dllm batch``: every row of a file or folder, in this process or over many engines by Ray."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from flash_dllm.cli.fields import UsageError, takes_options
from flash_dllm.params import EngineArgs, SamplingParams

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="Run it again after an interruption: rows that are in OUTPUT are not answered again.")
@takes_options
def batch(
    engine: EngineArgs,
    params: SamplingParams,
    input_: Annotated[
        str, typer.Argument(metavar="INPUT", help=".jsonl or .parquet: file, folder, pattern or s3://...")
    ],
    output: Annotated[
        str, typer.Argument(metavar="OUTPUT", help="name.jsonl or name.parquet, local or s3://...")
    ],
    raw: Annotated[
        bool, typer.Option("--raw", help="no chat template: continue prompts as they are")
    ] = False,
    ray: Annotated[bool, typer.Option("--ray", help="many engines by Ray Data, one a GPU")] = False,
    actors: Annotated[
        int | None, typer.Option(min=1, help="engines; default one a GPU of the cluster, else 1")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="running cluster; default RAY_ADDRESS, else this machine alone")
    ] = None,
    group: Annotated[
        int | None, typer.Option(min=1, help="rows an engine gets at a time; default 16 a slot")
    ] = None,
    part_size: Annotated[
        int, typer.Option(min=1, help="rows of a part, where OUTPUT is a folder of parts [1000]")
    ] = 1000,
) -> None:
    """Answer every row of a JSON Lines or Parquet input once.

    Bad rows and the reasons go to OUTPUT's name with .errors.jsonl; the exit code is 1 if there are any.
    """
    beside = {"--actors": actors, "--ray-address": ray_address, "--group": group}
    without = [name for name, value in beside.items() if value is not None and not ray]
    if without:
        raise UsageError(f"{without[0]} goes with --ray")
    from flash_dllm.scale.batch import BatchArgs, Progress, run_batch
    from flash_dllm.scale.ray_batch import RayAnswers, RayArgs

    args = BatchArgs(input_, output, engine, params, raw, part_size)
    answers: Any = _here(args)
    if ray:
        answers = RayAnswers(RayArgs(actors, ray_address, group), engine, params, raw)
    try:
        with _terminated():
            count = run_batch(args, answers, Progress(_say, sys.stderr.isatty()))
    except KeyboardInterrupt:
        _say("interrupted; what is finished is written, and the same command goes on from there")
        raise typer.Exit(130) from None
    before = f"{count.before} were there already, " if count.before else ""
    _say(f"{count.total} rows: {before}{count.answered} answered, {count.bad} bad")
    if count.bad:
        raise typer.Exit(1)


def _here(args: Any) -> Any:
    """Answers by an engine in this process, loaded when there is a row to answer."""

    def answers(rows: Iterator[Any]) -> Iterator[Any]:
        first = next(rows, None)
        if first is None:
            return
        from itertools import chain

        from flash_dllm.llm import LLM
        from flash_dllm.scale.answers import Answerer

        yield from Answerer(LLM.from_args(args.engine), args.params, args.raw).answers(chain([first], rows))

    return answers


@contextmanager
def _terminated() -> Iterator[None]:
    """A polite kill, as of a batch system, keeps what is finished."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(text: str) -> None:
    typer.echo(f"flash-dllm: {text}", err=True)
