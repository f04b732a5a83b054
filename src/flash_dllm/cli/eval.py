"""``flash-dllm eval``: the public benchmarks through lm-evaluation-harness and the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from flash_dllm.cli.fields import UsageError, takes_options
from flash_dllm.cli.tables import print_table, write_json
from flash_dllm.params import EngineArgs, SamplingParams

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    name="eval",
    epilog="flash-dllm eval --tasks gsm8k --limit 20 --data-dir data --output out; run it again to resume.",
)
@takes_options
def evaluate_tasks(
    engine: EngineArgs,
    params: SamplingParams,
    tasks: Annotated[
        str, typer.Option(help="comma-separated: gsm8k, minerva_math, minerva_math500, humaneval, mbpp, ...")
    ],
    data_dir: Annotated[
        Path | None,
        typer.Option(help="folder of local files (docs/evaluation.md); without it the hub is asked"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="folder for report, samples and answers; a run in it goes on")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="the first so many problems of each task")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="examples in the prompt; default the task's")
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="prompts as conversations")
    ] = False,
    fewshot_as_multiturn: Annotated[
        bool,
        typer.Option(
            "--fewshot-as-multiturn/--no-fewshot-as-multiturn", help="with a chat template: examples as turns"
        ),
    ] = True,
    system_instruction: Annotated[str | None, typer.Option(help="put before the prompt")] = None,
    gen_kwargs: Annotated[
        str | None,
        typer.Option(help="generation settings over the tasks' own, as max_gen_toks=256,epsilon=0.8"),
    ] = None,
    stop_mode: Annotated[
        str, typer.Option(help="early: an answer ends at its stop string; late: cut afterwards, as papers do")
    ] = "early",
    too_long: Annotated[
        str, typer.Option(help="prompts that do not fit: error, or truncate (tokens off their beginning)")
    ] = "error",
    add_bos: Annotated[bool, typer.Option("--add-bos", help="put the tokenizer's first token first")] = False,
    confirm_run_unsafe_code: Annotated[
        bool, typer.Option("--confirm-run-unsafe-code", help="let humaneval and mbpp run code, in a sandbox")
    ] = False,
    log_samples: Annotated[bool, typer.Option("--log-samples/--no-log-samples", help="save them")] = True,
    include_path: Annotated[Path | None, typer.Option(help="folder of your own task files")] = None,
    mc_num: Annotated[int, typer.Option(min=1, help="random maskings of a likelihood")] = 128,
    answers: Annotated[
        str, typer.Option(help="model; gold or broken check the scoring: the data's own answers, or nonsense")
    ] = "model",
    harness: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="further argument of lm_eval's simple_evaluate"),
    ] = None,
    json_: Annotated[
        Path | None, typer.Option("--json", help="write the report here too; - is stdout")
    ] = None,
) -> None:
    """GSM8K, MATH, HumanEval, MBPP or any task of lm-evaluation-harness through the engine."""
    from flash_dllm.eval.answers import Policy
    from flash_dllm.eval.run import Settings, evaluate

    settings = Settings(
        tasks=tuple(name.strip() for name in tasks.split(",") if name.strip()),
        data_dir=data_dir, limit=limit, num_fewshot=num_fewshot, apply_chat_template=apply_chat_template,
        fewshot_as_multiturn=fewshot_as_multiturn, system_instruction=system_instruction,
        gen_kwargs=_gen_kwargs(gen_kwargs, params), log_samples=log_samples, include_path=include_path,
        confirm_run_unsafe_code=confirm_run_unsafe_code, mc_num=mc_num, add_bos=add_bos,
        harness=dict(map(_pair, harness or [])), answers=_one_of("answers", answers, "model", "gold", "broken"),
    )  # fmt: skip
    policy = Policy(
        params,
        stop=_one_of("stop_mode", stop_mode, "early", "late"),
        too_long=_one_of("too_long", too_long, "error", "truncate"),
    )
    report = evaluate(engine, settings, policy, output)
    write_json(json_, report)
    if str(json_) != "-":
        show(report)
    if output is not None:
        typer.echo(f"flash-dllm: report, samples and answers are in {output}", err=True)


def _one_of(name: str, value: str, *choices: str) -> Any:
    if value not in choices:
        raise UsageError(f"{name}={value!r}: there are {', '.join(choices)}")
    return value


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{text!r}: write NAME=VALUE")
    return name.strip().replace("-", "_"), yaml.safe_load(value)


def _gen_kwargs(text: str | None, params: SamplingParams) -> dict[str, Any]:
    """``name=value,name=value``; what an option names too would be said twice."""
    values = dict(_pair(part) for part in (text or "").split(",") if part.strip())
    twice = sorted(set(values) & params.model_fields_set)
    if twice:
        raise UsageError(f"{twice[0]} is given both as an option and in --gen-kwargs")
    return values


def show(report: dict[str, Any]) -> None:
    """The report as tables."""
    from flash_dllm.eval.report import headline, remarks

    rows = []
    for name, task in [*report["tasks"].items(), *report["groups"].items()]:
        for rule, rate in task["rules"].items() or [("", None)]:
            low, high = rate["interval"] if rate else ("", "")
            right = (rate["n"], rate["accuracy"], f"{low}-{high}") if rate else (task["problems"], "", "")
            rows.append((name, rule, *right))
    columns = ("task", "rule", "problems", "right %", "95 % interval")
    print_table(f"{headline(report)}, {report['method']}", columns, rows)
    costs = [
        (name, c["answer_tokens"], c["kept_tokens"], c["nfe"], c["tokens_per_forward"], c["seconds"],
         c["tokens_per_second"])
        for name, task in report["tasks"].items() for c in [task["counters"]]
    ]  # fmt: skip
    print_table(
        "", ("task", "answer tokens", "kept", "passes", "tokens a pass", "seconds", "tokens/s"), costs
    )
    for note in remarks(report):
        typer.echo(note)
    typer.echo(f"Counting: {report['counting']}.")
