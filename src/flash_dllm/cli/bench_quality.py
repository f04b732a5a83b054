"""``flash-dllm bench ablations``: what an option of a method does to accuracy, passes and rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

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
    from flash_dllm.bench.ablations import Share, collect, run
    from flash_dllm.bench.facts import command, facts

    if list_:
        rows = [(p.name, len(p.cases), ", ".join(p.problems), p.question) for p in known.PLANS.values()]
        print_table("Plans", ("plan", "settings", "problems", "question"), rows)
        return
    chosen, share = known.find(plans), Share.parse(shard)
    llm = _load(chosen, model, dtype, device, max_num_seqs)
    left = 0
    for unit, result in run(llm, chosen, out, sets=sets, count=problems, share=share, seconds=seconds):
        left += result is None
        if result is not None:
            right = result["verdicts"].count("1")
            typer.echo(
                f"{unit.case.method} {unit.case.label}, {unit.problems} set {unit.index}: {right} of {problems} "
                f"in {result['seconds']} s",
                err=True,
            )
    report = collect(chosen, out, sets)
    told = facts(llm.loaded.model.device, llm.loaded.model.dtype, synthetic=False)
    report = {"kind": "ablations", **told, **report, "command": command()}
    write_json(json_, report)
    if str(json_) != "-":
        _show(report)
    if left:
        typer.echo(f"{left} units of this shard were not started for time; run again to go on", err=True)


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
