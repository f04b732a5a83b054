"""``flash-dllm reproduce``: a table or figure of the Flash-dLLM paper on your model and device."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from flash_dllm.cli.fields import UsageError
from flash_dllm.cli.tables import print_table, write_json
from flash_dllm.params import EngineArgs

app = typer.Typer(add_completion=False, rich_markup_mode=None)
NAMES = ("table1", "table2", "table4", "table5", "table6", "fig1", "fig4", "fig5", "fig6", "fig7")
MODEL = "flash-dllm/tiny-dream"
LIMIT = 20
"""Problems a cell where no limit is given and the bundled model's own tasks stand in."""


@app.command(epilog="flash-dllm reproduce table6 -m GSAI-ML/LLaDA-1.5 --data-dir data --output out/table6")
def reproduce(
    what: Annotated[str, typer.Argument(help=", ".join(NAMES))],
    model: Annotated[str, typer.Option("--model", "-m", help="folder, hub id or bundled name")] = MODEL,
    data_dir: Annotated[
        Path | None, typer.Option(help="folder with the benchmarks' files (docs/evaluation.md)")
    ] = None,
    hub: Annotated[bool, typer.Option("--hub", help="take the benchmarks from the hub")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="problems a cell")] = None,
    output: Annotated[
        Path | None, typer.Option(help="folder for the report; finished cells in it are kept")
    ] = None,
    only: Annotated[str | None, typer.Option(help="cells whose row or column holds this")] = None,
    shape: Annotated[
        str | None, typer.Option(help="random weights of this shape instead: time and memory alone")
    ] = None,
    longest: Annotated[int, typer.Option(min=1, help="with --shape: tokens of the longest answer")] = 256,
    seconds: Annotated[
        float, typer.Option(min=0, help="begin no cell after so many seconds", show_default=False)
    ] = math.inf,
    guide: Annotated[str | None, typer.Option(help="left-to-right model for FlashDLM")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; auto takes a GPU if there is one")] = "auto",
    dtype: Annotated[str, typer.Option(help="of the weights")] = "auto",
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="at most so many slots")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="longest canvas")] = None,
    confirm_run_unsafe_code: Annotated[
        bool, typer.Option("--confirm-run-unsafe-code", help="let HumanEval and MBPP run code, in a sandbox")
    ] = False,
    json_: Annotated[
        Path | None, typer.Option("--json", help="write the report here too; - is stdout")
    ] = None,
) -> None:
    """A table or figure of the Flash-dLLM paper: its numbers beside those measured here.

    Without data the bundled model's own tasks stand in for the benchmarks, and the report says so.
    """
    from flash_dllm.eval.reproduce import plan_of, write

    if (hub and data_dir is not None) or (shape is not None and (hub or data_dir is not None)):
        raise UsageError("give one of --data-dir, --hub and --shape")
    plan = plan_of(what, only)
    values = {
        "model": model, "device": device, "dtype": dtype, "max_num_seqs": max_num_seqs, "max_model_len": max_model_len,
        "options": {} if guide is None else {"guide": guide},
    }  # fmt: skip
    engine = EngineArgs.model_validate(values)
    if shape is not None:
        report = _synthetic(plan, engine, shape, limit, longest, output, seconds)
    else:
        report = _real(plan, engine, data_dir, hub, limit, output, confirm_run_unsafe_code, seconds)
    if output is not None:
        write(report, output)
    write_json(json_, report)
    if str(json_) != "-":
        _show(report)
    if output is not None:
        typer.echo(f"flash-dllm: the report is in {output}", err=True)


def _tell(line: str) -> None:
    typer.echo(f"flash-dllm: {line}", err=True)


def _synthetic(
    plan: Any,
    engine: EngineArgs,
    shape: str,
    limit: int | None,
    longest: int,
    output: Path | None,
    seconds: float,
) -> Any:
    import torch

    from flash_dllm.eval.reproduce import Facts, run_plan
    from flash_dllm.eval.sources import RandomWeights
    from flash_dllm.loading import pick_device

    device = torch.device(pick_device(engine.device))
    name = engine.dtype if engine.dtype != "auto" else "float32" if device.type == "cpu" else "bfloat16"
    source = RandomWeights(shape, getattr(torch, name), device, limit or 64, longest)
    card = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )
    facts = Facts(
        f"random weights of the shape {shape}", card, {"dtype": name, "limit": limit, "longest": longest}
    )
    return run_plan(plan, source, facts, output, _tell, seconds)


def _real(
    plan: Any,
    engine: EngineArgs,
    data_dir: Path | None,
    hub: bool,
    limit: int | None,
    output: Path | None,
    unsafe: bool,
    seconds: float,
) -> Any:
    from flash_dllm.bench.measure import circumstances
    from flash_dllm.eval.reproduce import ANALYSED, Facts, analyse, run_plan
    from flash_dllm.eval.run import Settings
    from flash_dllm.eval.sources import Benchmarks, BundledTasks, Source
    from flash_dllm.llm import LLM
    from flash_dllm.loading import load

    loaded = load(engine)
    llm = LLM.from_args(
        engine.model_copy(
            update={
                "cache": "none",
                "decoding": "threshold",
                "max_num_seqs": 1,
                "options": {"schedule": "window"},
            }
        ),
        loaded,
    )
    more = {k: v for k, v in circumstances(llm).items() if k not in ("model", "device_name", "slots")}
    facts = Facts(loaded.name, circumstances(llm)["device_name"], {**more, "limit": limit})
    bundled = BundledTasks(engine, loaded, limit or LIMIT)
    source: Source = bundled
    if hub or data_dir is not None:
        chat = "instruct" in engine.model.casefold() and llm.has_chat_template
        settings = Settings(
            (), data_dir, limit, apply_chat_template=chat, fewshot_as_multiturn=False,
            confirm_run_unsafe_code=unsafe,
        )  # fmt: skip
        source = Benchmarks(engine, loaded, settings, output)
    report = run_plan(plan, source, facts, output, _tell, seconds)
    if plan.analyses:
        report["analyses"] = analyse(plan.analyses, llm, _analysed(llm, data_dir, limit or ANALYSED))
    return report


def _analysed(llm: Any, data_dir: Path | None, count: int) -> list[Any]:
    """Problems for the analyses: GSM8K's own, without examples, where there are files; else the bundled tasks'."""
    from itertools import islice

    from flash_dllm.bench.tiny import job_of
    from flash_dllm.eval.tasks import TASKS, local_files, read_rows
    from flash_dllm.params import SamplingParams
    from flash_dllm.train.tasks import make

    params = SamplingParams(max_tokens=256)
    if data_dir is None:
        return [job_of(llm, make("gsm", i, "test"), params) for i in range(count)]
    rows = islice(read_rows(local_files(TASKS["gsm8k"], data_dir)["test"]), count)
    return [llm.job(f"Question: {row['question']}\nAnswer:", params) for row in rows]


def _show(report: dict[str, Any]) -> None:
    """The cells as a table; the rest as in the page."""
    from flash_dllm.eval.pages import analyses, shown

    columns = shown(report["cells"])
    rows = [
        (c["row"], c["column"],
         *(f"{_text(c['published'], key)} / {_text(c['measured'], key)}" for key, _ in columns),
         _text(c["measured"], "tokens_per_forward"), c["reason"] or "; ".join(c["differs"]))
        for c in report["cells"]
    ]  # fmt: skip
    if rows:
        titles = ("row", "column", *(title for _, title in columns), "tokens a pass", "what differs")
        print_table(f"{report['plan']}: {report['title']} (published / measured)", titles, rows)
    typer.echo("\n".join(analyses(report["analyses"])))
    typer.echo(f"Published: {report['source']}. Measured: {report['model']}; {report['measured_on']}.")
    typer.echo(f"Counting: {report['counting']}.")
    for line in (*report["differs"], *report["notes"]):
        typer.echo(f"- {line}")


def _text(numbers: Any, key: str) -> str:
    from flash_dllm.eval.pages import value

    found = value(numbers, key)
    return "-" if found is None else str(found)
