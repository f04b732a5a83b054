"""``flash-dllm eval-tiny``: the bundled model on its own held-out tasks, through the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flash_dllm.cli.fields import UsageError, takes_options
from flash_dllm.cli.tables import print_table, write_json
from flash_dllm.params import EngineArgs, SamplingParams

app = typer.Typer(add_completion=False, rich_markup_mode=None)
SPLITS = ("dev", "test", "heldout")


@app.command()
@takes_options
def eval_tiny(
    engine: EngineArgs,
    params: SamplingParams,
    problems: Annotated[int, typer.Option(min=1, help="problems of each family")] = 20,
    families: Annotated[str | None, typer.Option(help="comma-separated; default all")] = None,
    split: Annotated[
        str, typer.Option(help="test (new questions), heldout (new templates too) or dev")
    ] = "test",
    seed_start: Annotated[int, typer.Option(min=0, help="seed of the first problem")] = 0,
    json_: Annotated[Path | None, typer.Option("--json", help="write the report here; - is stdout")] = None,
) -> None:
    """Accuracy of the bundled model on its held-out tasks, by family, with tokens a forward pass.

    Held out means: no training question is among them. It measures this engine, not general ability.
    """
    chosen = _families(families)
    if split not in SPLITS:
        raise UsageError(f"split={split!r}: there are {', '.join(SPLITS)}")
    if params.n != 1:
        raise UsageError(f"n={params.n}: one answer a problem is measured")
    report = measure(engine, params, chosen, problems, split, seed_start)
    write_json(json_, report)
    if str(json_) != "-":
        _show(report)


def _families(names: str | None) -> list[str]:
    from flash_dllm.train.tasks import FAMILIES

    chosen = list(FAMILIES) if names is None else [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in FAMILIES:
            raise UsageError(f"family {name!r}: there are {', '.join(FAMILIES)}")
    return chosen


def measure(
    engine: EngineArgs,
    params: SamplingParams,
    families: list[str],
    problems: int,
    split: Any,
    seed_start: int,
) -> dict[str, Any]:
    """Run the tasks and check the answers."""
    from flash_dllm.bench.measure import accuracy, circumstances, run_jobs, totals
    from flash_dllm.bench.tiny import job_of
    from flash_dllm.llm import LLM
    from flash_dllm.train.tasks import check, make

    samples = [make(family, seed_start + i, split) for family in families for i in range(problems)]
    llm = LLM.from_args(engine)
    run = run_jobs(llm, [job_of(llm, sample, params) for sample in samples])
    verdicts = [check(sample, output.text) for sample, output in zip(samples, run.outputs, strict=True)]
    report: dict[str, Any] = {
        **circumstances(llm), "method": llm.method.name, "split": split, "seed_start": seed_start,
        "params": params.model_dump(mode="json", exclude_unset=True), "seconds": round(run.seconds, 2),
        "families": {},
    }  # fmt: skip
    for family in (*families, "all"):
        mine = [i for i, sample in enumerate(samples) if family in (sample.family, "all")]
        report["families"][family] = {
            **accuracy([verdicts[i] for i in mine]),
            **totals([run.outputs[i] for i in mine]),
        }
    tokens = report["families"]["all"]["answer_tokens"]
    report["tokens_per_second"] = round(tokens / run.seconds, 1)
    return report


def _show(report: dict[str, Any]) -> None:
    rows = []
    for family, r in report["families"].items():
        low, high = r["interval"]
        rows.append((family, r["n"], r["accuracy"], f"{low}-{high}", r["tokens_per_forward"], r["nfe"]))
    title = (
        f"{report['model']}, {report['method']}, {report['split']} from seed {report['seed_start']}, "
        f"{report['dtype']} on {report['device_name']}, {report['slots']} slots"
    )
    print_table(title, ("family", "n", "right %", "95 % interval", "tokens a pass", "passes"), rows)
    typer.echo(f"{report['tokens_per_second']} answer tokens/s over {report['seconds']} s")
