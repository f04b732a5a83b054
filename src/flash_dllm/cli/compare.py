"""``flash-dllm compare``: the same prompts over several methods."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from flash_dllm.cli.fields import UsageError, takes_options
from flash_dllm.cli.inputs import read_items
from flash_dllm.cli.tables import gigabytes, print_table, write_json
from flash_dllm.params import EngineArgs, SamplingParams

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@app.command(
    epilog="Options that a method does not read are refused, so give only those that all methods share."
)
@takes_options
def compare(
    engine: EngineArgs,
    params: SamplingParams,
    methods: Annotated[str, typer.Option(help="comma-separated, as none+threshold,dual+threshold")],
    prompts: Annotated[
        Path | None, typer.Option(help="JSON Lines as for generate; 'answer' is checked if there")
    ] = None,
    tiny: Annotated[
        int, typer.Option(min=0, help="instead: this many of the bundled model's test problems")
    ] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="no chat template")] = False,
    json_: Annotated[Path | None, typer.Option("--json", help="write the report here; - is stdout")] = None,
) -> None:
    """The same prompts over several methods: accuracy, passes, rows, speed and memory, in a table.

    An answer is right if it is the text of 'answer' or, for a number, ends with that number.
    """
    names = [name.strip() for name in methods.split(",") if name.strip()]
    if not names or (prompts is None) == (tiny == 0):
        raise UsageError("compare needs --methods and either --prompts FILE or --tiny N")
    if params.n != 1:
        raise UsageError(f"n={params.n}: one answer a prompt is compared")
    report = measure(engine, params, names, prompts, tiny, raw)
    write_json(json_, report)
    if str(json_) != "-":
        _show(report)


def measure(
    engine: EngineArgs, params: SamplingParams, names: list[str], prompts: Path | None, tiny: int, raw: bool
) -> dict[str, Any]:
    """Run every method on weights that are loaded once."""
    from flash_dllm.bench.measure import accuracy, circumstances, peak_memory, run_jobs, totals, warm_up
    from flash_dllm.llm import LLM
    from flash_dllm.loading import load
    from flash_dllm.methods import split_name

    cases = _Cases(prompts, tiny, raw, params)
    loaded = load(engine)
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    for name in names:
        cache, decoding = split_name(name)
        llm = LLM.from_args(engine.model_copy(update={"cache": cache, "decoding": decoding}), loaded)
        facts = facts or circumstances(llm)
        jobs = cases.jobs(llm)
        warm_up(llm)
        if llm.loaded.model.device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()
        run = run_jobs(llm, jobs)
        counts = totals(run.outputs)
        verdicts = [v for v in map(cases.right, range(len(jobs)), run.outputs) if v is not None]
        rows.append({
            "method": llm.method.name, **counts, "seconds": round(run.seconds, 3),
            "tokens_per_second": round(counts["answer_tokens"] / run.seconds, 2),
            "memory": peak_memory(llm.loaded.model.device),
            "accuracy": accuracy(verdicts) if verdicts else None,
        })  # fmt: skip
    return {**facts, "params": params.model_dump(mode="json", exclude_unset=True), "methods": rows}


class _Cases:
    """Prompts with checkers: lines of a file, or the bundled model's tasks."""

    def __init__(self, prompts: Path | None, tiny: int, raw: bool, params: SamplingParams) -> None:
        from flash_dllm.train.tasks import FAMILIES, make

        self.raw, self.params = raw, params
        self.items = [] if prompts is None else read_items(prompts, params)
        self.samples = [make(FAMILIES[i % len(FAMILIES)], i, "test") for i in range(tiny)]

    def jobs(self, llm: Any) -> list[Any]:
        from flash_dllm.bench.tiny import job_of
        from flash_dllm.cli.generate import job_of_item

        if self.samples:
            return [job_of(llm, sample, self.params) for sample in self.samples]
        return [job_of_item(llm, item, self.raw) for item in self.items]

    def right(self, index: int, output: Any) -> bool | None:
        """Whether an answer is right; None where nobody knows."""
        from flash_dllm.train.tasks import check

        if self.samples:
            return check(self.samples[index], output.text)
        answer = self.items[index].rest.get("answer")
        return None if answer is None else matches(str(answer), output.text)


def matches(answer: str, text: str) -> bool:
    """Equal texts or, where ``answer`` is a number, that number last in ``text``."""
    answer, text = answer.strip(), text.strip()
    if _NUMBER.fullmatch(answer):
        found = _NUMBER.findall(text)
        return bool(found) and float(found[-1].replace(",", "")) == float(answer.replace(",", ""))
    return " ".join(answer.split()).casefold() == " ".join(text.split()).casefold()


def _show(report: dict[str, Any]) -> None:
    rows = []
    for r in report["methods"]:
        right = ""
        if r["accuracy"] is not None:
            low, high = r["accuracy"]["interval"]
            right = f"{r['accuracy']['accuracy']} ({low}-{high})"
        rows.append((
            r["method"], right, r["tokens_per_forward"], r["nfe"], r["rows"], r["tokens_per_second"],
            gigabytes(r["memory"]),
        ))  # fmt: skip
    title = f"{report['model']}, {report['dtype']} on {report['device_name']}, {report['slots']} slots"
    columns = ("method", "right % (95 %)", "tokens a pass", "passes", "rows", "tokens/s", "peak memory")
    print_table(title, columns, rows)
    typer.echo(f"Counting: {report['counting']}.")
