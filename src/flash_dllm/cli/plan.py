"""``flash-dllm plan``: replicas, queue time and cost for a load, from a measured curve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flash_dllm.cli.fields import UsageError
from flash_dllm.cli.tables import print_table, write_json

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="The curve: flash-dllm bench step --batch 1,2,4,8,16,32 --methods NAME --json curve.json")
def plan(
    curve: Annotated[Path, typer.Argument(help="step time by busy slots: a report of bench step, as JSON")],
    rate: Annotated[str, typer.Option(help="requests a second, comma-separated")] = "1,10,100,1000",
    goal: Annotated[
        str, typer.Option(help="latency: 99 % of the answers within 10 seconds is p99=10")
    ] = "p99=10",
    answers: Annotated[
        Path | None, typer.Option(help="sizes of answers: a .jsonl that flash-dllm batch wrote")
    ] = None,
    tokens: Annotated[float | None, typer.Option(help="or: mean answer length, in tokens")] = None,
    tpf: Annotated[float | None, typer.Option(help="with --tokens: tokens a step")] = None,
    spread: Annotated[float, typer.Option(help="with --tokens: standard deviation over mean")] = 0.5,
    method: Annotated[str | None, typer.Option(help="of the curve, where the file has several")] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="of a replica; default: the most measured")] = None,
    routing: Annotated[str, typer.Option(help="least, two-choices, random, round-robin")] = "two-choices",
    max_load: Annotated[float, typer.Option(help="share of the capacity that a plan may use")] = 0.9,
    gpus: Annotated[int, typer.Option(min=1, help="of a replica")] = 1,
    gpu_hour: Annotated[float | None, typer.Option(min=0.0, help="price of a GPU for an hour")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json_: Annotated[Path | None, typer.Option("--json", help="write the plan here; - is stdout")] = None,
) -> None:
    """Replicas that a load needs for a latency goal, their queue and their cost, by simulation.

    It is as good as the curve and the sizes; docs/scaling.md says how it was checked and what it leaves out.
    """
    from flash_dllm.scale.curve import read_curve
    from flash_dllm.scale.plan import Goal, Price, Workload, plan_row

    measured, own = read_curve(curve, method, slots)
    work = Workload(measured, _sizes(own, answers, tokens, tpf, spread), routing, seed, max_load)
    wanted = Goal.parse(goal)
    rows = [plan_row(work, r, wanted, Price(gpus, gpu_hour)) for r in _rates(rate)]
    report = {
        "curve": str(curve), "method": method, "slots": measured.slots, "routing": routing, "max_load": max_load,
        "goal": str(wanted),
        "mean_steps": float(work.sizes.steps.mean()), "mean_tokens": float(work.sizes.tokens.mean()),
        "gpu_hour": gpu_hour, "seed": seed, "rows": rows,
    }  # fmt: skip
    write_json(json_, report)
    if str(json_) != "-":
        columns = (
            "requests/s", "replicas", "GPUs", "load", "tokens/s", "queued p50", "queued p99", "p50 s", "p90 s", "p99 s",
            "cost/h", "cost/1M tokens",
        )  # fmt: skip
        title = f"{wanted}, {measured.slots} slots a replica, {report['mean_steps']:.1f} steps an answer"
        print_table(title, columns, [_shown(row) for row in rows])


def _sizes(own: Any, answers: Path | None, tokens: float | None, tpf: float | None, spread: float) -> Any:
    from flash_dllm.scale.curve import Sizes, read_answers

    if answers is not None and (tokens is not None or tpf is not None):
        raise UsageError("--answers already says how long answers are: no --tokens or --tpf")
    if (tokens is None) != (tpf is None):
        raise UsageError("--tokens and --tpf go together")
    if answers is not None:
        return read_answers(answers)
    if tokens is not None and tpf is not None:
        return Sizes.assumed(tokens, tpf, spread)
    if own is None:
        raise UsageError("how long are answers? give --answers FILE, or --tokens and --tpf")
    return own


def _rates(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as exc:
        raise UsageError(f"--rate {text}: numbers with commas between them") from exc


def _shown(row: dict[str, Any]) -> tuple[Any, ...]:
    queued, latency = row["queued_s"], row["latency_s"]
    return (
        row["rate"], row["replicas"], row["gpus"], row["load"], row["tokens_per_second"], queued["p50"], queued["p99"],
        latency["p50"], latency["p90"], latency["p99"], row["cost_an_hour"], row["cost_a_million_tokens"],
    )  # fmt: skip
