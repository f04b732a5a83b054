"""``flash-dllm generate``: one prompt with a live canvas, or many from JSON Lines to JSON Lines."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from flash_dllm.cli.fields import UsageError, takes_options
from flash_dllm.cli.inputs import Item, finished_ids, read_items, single_prompt
from flash_dllm.errors import FlashDLLMError
from flash_dllm.params import EngineArgs, SamplingParams

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    epilog="Many prompts: generate --file prompts.jsonl --output answers.jsonl; run it again to resume."
)
@takes_options
def generate(
    engine: EngineArgs,
    params: SamplingParams,
    prompt: Annotated[str | None, typer.Argument(help="text; - or nothing reads stdin")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="text of one prompt, or .jsonl of many")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="JSON Lines of answers; ids already there are skipped")
    ] = None,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="input is JSON Lines, whatever its name")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="no chat template: continue the text as it is")] = False,
    infill: Annotated[
        bool, typer.Option("--infill", help="fill {{8}} (8 tokens) and {{<=8}} (at most 8)")
    ] = False,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="the prompt is token ids: 12,7,301")] = False,
    json_: Annotated[bool, typer.Option("--json", help="the whole output as one line of JSON")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="no live canvas, text as it becomes stable")] = False,
    trace: Annotated[Path | None, typer.Option(help="write an event log here")] = None,
) -> None:
    """Answer a prompt, or many from a JSONL file.

    An instruct model is asked through its chat template; --raw continues the text instead.
    """
    many = jsonl or (file is not None and file.suffix == ".jsonl")
    if many:
        if (prompt is not None and prompt != "-") or infill or token_ids:
            raise UsageError("JSON Lines name prompt, template or prompt_token_ids themselves")
        _many(engine, params, file, output, raw, trace)
        return
    if output is not None:
        raise UsageError("--output goes with JSON Lines; redirect stdout for one prompt")
    _one(engine, params, _value(single_prompt(prompt, file), token_ids), raw, infill, json_, plain, trace)


def _value(text: str, token_ids: bool) -> Any:
    if not token_ids:
        return text
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as exc:
        raise UsageError(f"--token-ids: {text!r} is not a list of integers") from exc


def _one(
    engine: EngineArgs,
    params: SamplingParams,
    value: Any,
    raw: bool,
    infill: bool,
    json_: bool,
    plain: bool,
    trace: Path | None,
) -> None:
    if not value:
        raise UsageError("the prompt is empty")
    from flash_dllm.llm import LLM

    if engine.max_num_seqs is None:
        slots = params.n * (2 if params.cfg_scale else 1)
        engine = engine.model_copy(update={"max_num_seqs": min(slots, 8)})
    llm = LLM.from_args(engine)
    talk = isinstance(value, str) and llm.has_chat_template and not raw and not infill
    job = llm.job([{"role": "user", "content": value}] if talk else value, params, template=infill)
    with _tracing(llm, trace):
        if json_ or params.n > 1:
            _, result = next(iter(llm.as_completed([job])))
            answers = result.outputs
            if json_:
                typer.echo(json.dumps(result.to_dict(), ensure_ascii=False))
            else:
                typer.echo("\n---\n".join(_shown(answer) for answer in answers))
        else:
            answers = [show(llm, job, value, plain or not sys.stdout.isatty())]
    _fail_on_errors([answer.error for answer in answers])


def show(llm: Any, job: Any, title: Any, plain: bool) -> Any:
    """Show one answer as it comes: a live canvas in a terminal, else text as it becomes stable."""
    if not plain:
        from rich.console import Console

        from flash_dllm.cli.canvas import show_live

        short = str(title).split("\n")[0][:72]
        return list(show_live(llm, job, short, Console()))[-1].output
    answer = None
    for event in llm.watch(job):
        typer.echo(event.text, nl=False)
        sys.stdout.flush()
        answer = event.output
    typer.echo(" ".join(map(str, answer.token_ids)) if llm.tokenizer is None and answer else "")
    return answer


def _shown(answer: Any) -> str:
    return answer.text or " ".join(map(str, answer.token_ids))


def _many(
    engine: EngineArgs,
    params: SamplingParams,
    file: Path | None,
    output: Path | None,
    raw: bool,
    trace: Path | None,
) -> None:
    items = read_items(file, params)
    done = finished_ids(output) if output else set()
    todo = [item for item in items if item.id not in done]
    if done:
        typer.echo(f"flash-dllm: {len(items) - len(todo)} of {len(items)} already in {output}", err=True)
    if not todo:
        return
    from flash_dllm.llm import LLM

    llm = LLM.from_args(engine)
    jobs = [job_of_item(llm, item, raw) for item in todo]
    target: AbstractContextManager[TextIO] = nullcontext(sys.stdout)
    if output is not None:
        target = output.open("a", encoding="utf-8")
    with _tracing(llm, trace), target as out:
        errors = _write_answers(llm, jobs, todo, out)
    _fail_on_errors(errors)


def _write_answers(llm: Any, jobs: list[Any], items: list[Item], out: TextIO) -> list[str | None]:
    """One line an answer as soon as it is there, so that an interruption loses nothing that is finished."""
    from flash_dllm.progress import bar

    errors: list[str | None] = []
    try:
        with bar(len(jobs), show=True) as advance:
            for index, result in llm.as_completed(jobs):
                record = {"id": items[index].id, **items[index].rest, **result.to_dict()}
                del record["request_id"]
                out.write(json.dumps(record, ensure_ascii=False) + "\n")
                out.flush()
                errors += [answer.error for answer in result.outputs]
                advance(sum(len(answer.token_ids) for answer in result.outputs))
    except KeyboardInterrupt:
        typer.echo(f"flash-dllm: interrupted; {len(errors)} of {len(jobs)} answers are written", err=True)
        raise typer.Exit(130) from None
    return errors


def job_of_item(llm: Any, item: Item, raw: bool) -> Any:
    value, template = item.value, item.kind == "template"
    if item.kind == "prompt" and isinstance(value, str) and llm.has_chat_template and not raw and value:
        value = [{"role": "user", "content": value}]
    elif item.kind == "prompt_token_ids":
        value = {"prompt_token_ids": value}
    try:
        return llm.job(value, item.params, template=template)
    except FlashDLLMError as exc:
        raise UsageError(f"{item.where}: {exc}") from exc


def _tracing(llm: Any, trace: Path | None) -> AbstractContextManager[None]:
    return nullcontext() if trace is None else llm.tracing(trace)


def _fail_on_errors(errors: list[str | None]) -> None:
    failed = [error for error in errors if error]
    if failed:
        typer.echo(f"flash-dllm: {len(failed)} of {len(errors)} answers failed: {failed[0]}", err=True)
        raise typer.Exit(1)
