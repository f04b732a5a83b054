"""``flash-dllm analyze``: what happens inside a method."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flash_dllm.cli.fields import UsageError, settle
from flash_dllm.cli.tables import print_table, write_json

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)
POLICIES = (
    "none+threshold", "flash+threshold lookahead=16 track=32", "flash+threshold lookahead=16 track=32 track_by=random",
    "dual+threshold", "dllm-cache+threshold",
)  # fmt: skip


@app.callback()
def _describe() -> None:
    """Look inside a method while it decodes."""


@app.command()
def staleness(
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD [NAME=VALUE]...",
            help="a method and its options in one word group; repeatable; default: none, flash, dual, dllm-cache",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="a bundled model: its own word problems are asked")
    ] = ("flash-dllm/tiny-dream"),
    problems: Annotated[int, typer.Option(min=1, help="word problems to decode")] = 20,
    prompts: Annotated[
        Path | None, typer.Option(help="instead: a file with a prompt a line, for any model")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-t", min=1)] = 160,
    every: Annotated[int, typer.Option(min=1, help="measure every so many steps of a request")] = 1,
    budgets: Annotated[str, typer.Option(help="rows for the capture, comma-separated")] = "8,32",
    max_model_len: Annotated[int, typer.Option(min=2, help="longest canvas")] = 384,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="slots")] = 4,
    dtype: Annotated[
        str, typer.Option(help="float32 (exact to rounding), bfloat16, float16 or auto")
    ] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = "auto",
    json_: Annotated[Path | None, typer.Option("--json", help="write the report here; - is stdout")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="draw drift by layer here (extra: plot)")
    ] = None,
) -> None:
    """Drift of every cached key and value against an exact recompute, and what it does to the output.

    By layer, kind and age of a position, and step; weighted by the attention that candidates pay; with the total
    variation between the candidates' distributions, and which rows a criterion should recompute.
    """
    from flash_dllm.bench.facts import facts
    from flash_dllm.llm import LLM

    sizes: Any = {
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "dtype": dtype,
        "device": device,
    }
    llm = LLM(model, cache="none", decoding="threshold", **sizes)
    numbers = [int(n) for n in budgets.split(",") if n.strip().isdigit()]
    if not numbers:
        raise UsageError(f"budgets={budgets!r}: numbers of rows, separated by commas")
    found = [
        {"policy": text, **_one(llm, text, _jobs(llm, prompts, problems, max_tokens), every, numbers)}
        for text in policy or POLICIES
    ]
    about = facts(llm.loaded.model.device, llm.loaded.model.dtype, synthetic=False)
    asked = str(prompts.name) if prompts else f"{problems} word problems of the test split"
    report = {
        "kind": "staleness",
        **about,
        "model": llm.loaded.name,
        "prompts": asked,
        "every": every,
        "policies": found,
    }
    write_json(json_, report)
    if str(json_) != "-":
        _show(report)
    if plot:
        _draw(report, plot)


def _one(llm: Any, text: str, jobs: Any, every: int, budgets: list[int]) -> dict[str, Any]:
    from flash_dllm.bench.staleness import Meter, watch
    from flash_dllm.methods import split_name

    name, *pairs = text.split()
    cache, decoding = split_name(name)
    options = settle({}, None, pairs, None)[0].options
    chosen = llm.with_method(cache, decoding, **options)
    meter = Meter(chosen.engine, every, budgets)
    watch(chosen.engine, [r for job in jobs(chosen) for r in job.requests], meter)
    return {"method": chosen.method.name, "options": options, **meter.report()}


def _jobs(llm: Any, prompts: Path | None, problems: int, max_tokens: int) -> Any:
    """Makes the jobs for an LLM with some method."""
    from flash_dllm.bench.ablations import problem_set
    from flash_dllm.bench.tiny import job_of
    from flash_dllm.params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens)
    if prompts is None:
        samples = problem_set("gsm", problems, 0)
        return lambda chosen: [job_of(chosen, sample, params) for sample in samples]
    lines = [line for line in prompts.read_text(encoding="utf-8").split("\n") if line.strip()]
    if not lines:
        raise UsageError(f"{prompts}: no prompt")

    def asked(line: str) -> Any:
        return [{"role": "user", "content": line}] if llm.has_chat_template else line

    return lambda chosen: [chosen.job(asked(line), params) for line in lines]


def _show(report: dict[str, Any]) -> None:
    where = f"{report['model']}, {report['dtype']} on {report['device_name']}, {report['prompts']}"
    rows = []
    for p in report["policies"]:
        layers = p["by_layer"]

        def mean(name: str, layers: Any = layers) -> str:
            return f"{sum(r[name] for r in layers) / len(layers):.2e}"

        rows.append((
            p["policy"], p["passes"], mean("key_drift"), mean("value_drift"), mean("weighted_drift"),
            f"{p['total_variation']['mean']:.4f}", f"{p['total_variation']['p99']:.4f}",
            f"{100 * p['argmax_changed']:.2f}",
        ))  # fmt: skip
    columns = (
        "policy", "passes", "key drift", "value drift", "attention-weighted", "TV mean", "TV 99 %", "argmax changed %"
    )  # fmt: skip
    print_table(where, columns, rows)
    for p in report["policies"]:
        kinds = [
            (
                r["kind"],
                r["rows"],
                f"{r['value_drift']:.2e}",
                f"{r['attention_share']:.3f}",
                f"{r['weighted_drift']:.2e}",
            )
            for r in p["by_kind"]
        ]
        print_table(p["policy"], ("position", "rows", "value drift", "attention", "weighted"), kinds)
        if p["capture"]:
            shares = [(r["rows"], r["criterion"], f"{100 * r['share']:.1f}") for r in p["capture"]]
            print_table("", ("rows recomputed", "chosen by", "% of the weighted drift"), shares)


def _draw(report: dict[str, Any], path: Path) -> None:
    from flash_dllm.bench.plots import lines

    series = {
        p["policy"]: [(r["layer"], r["value_drift"]) for r in p["by_layer"]] for p in report["policies"]
    }
    title = f"Drift of cached values, {report['model']}"
    lines(series, title, ("layer", "mean of ‖cached - exact‖ / ‖exact‖"), path)
