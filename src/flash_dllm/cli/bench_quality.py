"""``flash-dllm bench ablations|methods|report``: what a method or its options do to accuracy, passes and rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flash_dllm.cli.fields import UsageError
from flash_dllm.cli.tables import print_table, write_json

MODEL = Annotated[str, typer.Option("--model", "-m", help="a bundled model: its own tasks are asked")]
DTYPE = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")]
DEVICE = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")]
JSON = Annotated[Path | None, typer.Option("--json", help="write the report here; - is stdout")]


def ablations(
    plans: Annotated[str, typer.Option(help="comma-separated names, or all; --list shows them")] = "all",
    out: Annotated[Path, typer.Option(help="folder of finished units; run again to resume")] = Path(
        "ablations"
    ),
    sets: Annotated[int, typer.Option(min=1, help="disjoint problem sets")] = 3,
    problems: Annotated[int, typer.Option(min=1, help="problems in each set")] = 350,
    shard: Annotated[str, typer.Option(help="I/N: this process runs every N-th unit from the I-th")] = "0/1",
    seconds: Annotated[float, typer.Option(help="start no unit after so many seconds")] = 1e9,
    model: MODEL = "flash-dllm/tiny-dream",
    dtype: DTYPE = "auto",
    device: DEVICE = "auto",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="slots")] = 64,
    json_: JSON = None,
    list_: Annotated[bool, typer.Option("--list", help="name the plans and end")] = False,
) -> None:
    """Ablations on a bundled model's own problems, resumable and in parallel processes.

    Give every process the same --out and its own --shard; the one that finishes last, or any later call, has the
    whole table.
    """
    from flash_dllm.bench import plans as known

    if list_:
        rows = [(p.name, len(p.cases), ", ".join(p.problems), p.question) for p in known.PLANS.values()]
        print_table("Plans", ("plan", "settings", "problems", "question"), rows)
        return
    chosen = known.find(plans)
    _run(
        "ablations", chosen, out, sets, problems, shard, seconds, (model, dtype, device, max_num_seqs), json_
    )


def methods(
    out: Annotated[Path, typer.Option(help="folder of finished units; run again to resume")] = Path(
        "methods"
    ),
    sets: Annotated[int, typer.Option(min=1, help="disjoint problem sets")] = 3,
    problems: Annotated[int, typer.Option(min=11, help="problems in each set, of all families")] = 350,
    shard: Annotated[str, typer.Option(help="I/N: this process runs every N-th unit from the I-th")] = "0/1",
    seconds: Annotated[float, typer.Option(help="start no unit after so many seconds")] = 1e9,
    model: MODEL = "flash-dllm/tiny-dream",
    dtype: DTYPE = "auto",
    device: DEVICE = "auto",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="slots")] = 64,
    json_: JSON = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="draw an .svg or .png here (extra: plot)")
    ] = None,
) -> None:
    """Every method on the same problems of a bundled model: accuracy, tokens a pass and rows a token."""
    from flash_dllm.bench.plans import METHODS

    size = (model, dtype, device, max_num_seqs)
    report = _run("methods", [METHODS], out, sets, problems, shard, seconds, size, json_)
    if plot:
        from flash_dllm.bench import plots

        rows = [{**r, "tpf": r["tokens_per_forward"]["value"]} for r in report["plans"][0]["rows"]]
        plots.accuracy_against_tpf(
            rows, f"{report['model']}, {report['dtype']} on {report['device_name']}", plot
        )


def report(
    results: Annotated[Path, typer.Option(help="folder of result files")] = Path("benchmarks/results"),
    docs: Annotated[Path, typer.Option(help="folder of the pages")] = Path("docs"),
    pictures: Annotated[bool, typer.Option(help="draw the pictures anew (extra: plot)")] = True,
) -> None:
    """Write docs/results.md and docs/performance.md, with their pictures, from the result files."""
    from flash_dllm.bench import performance
    from flash_dllm.bench import results as page

    if not results.is_dir():
        raise UsageError(f"results={str(results)!r}: no such folder")
    if pictures:
        from flash_dllm.bench.pictures import draw

        for path in draw(results, docs):
            typer.echo(path)
    for name, text in (
        ("results", page.page(results, docs)),
        ("performance", performance.page(results, docs)),
    ):
        (docs / f"{name}.md").write_text(text, encoding="utf-8")
        typer.echo(docs / f"{name}.md")


def _run(
    kind: str, chosen: list[Any], out: Path, sets: int, problems: int, shard: str, seconds: float,
    size: tuple[str, str, str, int], json_: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """Run this shard's units, then report on all that are finished."""
    from flash_dllm.bench.ablations import Share, collect, run
    from flash_dllm.bench.facts import facts

    share = Share.parse(shard)
    llm, left = _load(chosen, *size), 0
    failed: list[str] = []
    for unit, result in run(llm, chosen, out, sets=sets, count=problems, share=share, seconds=seconds):
        left += result is None
        what = f"{unit.case.method} {unit.case.label}, {unit.problems} set {unit.index}"
        if result is not None and "failed_with" in result:
            failed.append(f"{what}: {result['failed_with']}")
            typer.echo(failed[-1], err=True)
        elif result is not None:
            right = result["verdicts"].count("1")
            typer.echo(f"{what}: {right} of {result['problems_a_set']} in {result['seconds']} s", err=True)
    told = facts(llm.loaded.model.device, llm.loaded.model.dtype, synthetic=False)
    report = {"kind": kind, **told, **collect(chosen, out, sets)}
    write_json(json_, report)
    if str(json_) != "-":
        _show(report)
    if left:
        typer.echo(f"{left} units of this shard were not started for time; run again to go on", err=True)
    if failed:
        typer.echo(f"{len(failed)} units failed", err=True)
        raise typer.Exit(1)
    return report


def _load(chosen: list[Any], model: str, dtype: str, device: str, slots: int) -> Any:
    from flash_dllm.bench.ablations import POSITIONS
    from flash_dllm.llm import LLM

    longest = max(POSITIONS.get(kind, 384) for plan in chosen for kind in plan.problems)
    size = {"max_num_seqs": slots, "max_model_len": longest}
    return LLM(model, cache="none", decoding="threshold", dtype=dtype, device=device, **size)  # type: ignore[arg-type]


def _show(report: dict[str, Any]) -> None:
    columns = (
        "problems",
        "setting",
        "n",
        "right %",
        "95 %",
        "difference",
        "95 %",
        "tokens a pass",
        "rows a token",
    )
    for plan in report["plans"]:
        rows = []
        for row in plan["rows"]:
            against = row["against_baseline"] or {"difference": None, "interval": None}
            rows.append((
                row["problems"], row["label"], row["n"], row["accuracy"], _span(row["interval"]),
                against["difference"], _span(against["interval"]), row["tokens_per_forward"]["value"],
                row["rows_per_token"]["value"],
            ))  # fmt: skip
        print_table(f"{plan['name']}: {plan['question']}", columns, rows)
    where = f"{report['model']}, {report['dtype']} on {report['device_name']}, {report['slots']} slots"
    missing = f", {report['missing']} units missing" if report["missing"] else ""
    typer.echo(f"{where}; {report['sets']} disjoint sets of {report['problems_a_set']}{missing}")


def _span(interval: list[float] | None) -> str:
    return "" if interval is None else f"{interval[0]} to {interval[1]}"
