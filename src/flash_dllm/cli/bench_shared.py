"""What the ``bench`` commands share: options, reports, settings, and running one measurement after the other."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from flash_dllm.cli.fields import UsageError, settle

SHAPE = Annotated[
    str,
    typer.Option(
        help="llada-8b, dream-7b, llada-tiny ...: random weights; or a checkpoint's name or folder: its own"
    ),
]
METHODS = Annotated[str, typer.Option("--methods", help="comma-separated, as flash+threshold,flash+verify")]
OPTION = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="NAME=VALUE", help="of every method's constructor; repeatable"),
]
DTYPE = Annotated[
    str, typer.Option(help="float32, bfloat16 or float16; auto is bfloat16 on a GPU, else float32")
]
DEVICE = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")]
IMPL = Annotated[str | None, typer.Option(help="force an implementation of every op: ref, triton")]
EAGER = Annotated[bool, typer.Option("--enforce-eager", help="no captured graphs, where the engine has them")]
COMMITS = Annotated[
    float | None,
    typer.Option("--commit-per-step", help="fix the tokens committed by confidence a step (synthetic)"),
]
ACCEPTS = Annotated[
    float, typer.Option("--accept-per-step", help="with it: drafts accepted a step by methods that verify")
]
JSON = Annotated[Path | None, typer.Option("--json", help="write the report here; - is stdout")]
PLOT = Annotated[Path | None, typer.Option("--plot", help="draw an .svg or .png here (extra: plot)")]
SYNTHETIC = "synthetic: random prompts, and random weights or a commit rate that is set, not earned"


def run_each(
    work: list[Any],
    measure: Callable[[Any, Any], list[dict[str, Any]]],
    save: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> dict[str, Any]:
    """Measure each (setting, place) and save the report after each, so that a time limit loses only what is left.

    One that runs out of memory becomes a row that says so, and the others still run.
    """
    import torch

    found: list[dict[str, Any]] = []
    report = save(found)
    for setting, place in work:
        try:
            found += measure(setting, place)
        except (torch.OutOfMemoryError, MemoryError) as error:
            at = {"batch": place, "prompt": None} if isinstance(place, int) else asdict(place)
            row = {**setting.row(), **at, "ms": None, "peak_gib": None, "idle_share": None}
            found.append({**row, "failed_with": type(error).__name__})
        # The last engine's cache and graphs may hang in a cycle: they must not count into the next one's peak.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        report = save(found)
    return report


def end(found: list[dict[str, Any]]) -> None:
    failed = [f"{r['method']} at {r['batch']} slots: {r['failed_with']}" for r in found if "failed_with" in r]
    if failed:
        typer.echo("not measured: " + "; ".join(failed), err=True)
        raise typer.Exit(1)


def settings_of(
    shape: str, methods: str, option: list[str] | None, commits: float | None, accepts: float, impl: str | None,
    eager: bool, gang: bool = False,
) -> list[Any]:  # fmt: skip
    """One setting a method, checked: accepted drafts are for those that verify."""
    from flash_dllm.bench.synthetic import Setting

    options, found = fields_of(option), []
    for name in words(methods):
        tested = name.endswith(("+verify", "+branch"))
        mine = Setting(shape, name, options, commits, accepts if tested else 0.0, impl, eager, gang)
        mine.build()
        found.append(mine)
    if not found:
        raise UsageError("no method is named")
    if accepts and commits is None:
        raise UsageError("--accept-per-step needs --commit-per-step")
    if accepts and not any(s.accepts for s in found):
        raise UsageError(f"accept-per-step={accepts}: none of {methods} verifies")
    return found


def where(device: str, dtype: str) -> tuple[Any, Any]:
    import torch

    from flash_dllm.loading import pick_device

    at = torch.device(pick_device(device))
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype == "auto":
        return at, torch.bfloat16 if at.type == "cuda" else torch.float32
    if dtype not in known:
        raise UsageError(f"dtype={dtype!r}: one of auto, {', '.join(known)}")
    return at, known[dtype]


def report_of(
    kind: str, at: Any, dtype: Any, ceilings: Any, rows: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    from flash_dllm.bench.facts import facts

    told = facts(at, dtype, synthetic=True)
    return {
        "kind": kind,
        **told,
        "why_synthetic": SYNTHETIC,
        **more,
        "ceilings": ceilings.row(),
        "rows": rows,
    }


def title_of(report: dict[str, Any]) -> str:
    top = report["ceilings"]
    return (
        f"{report['shape']} (synthetic), {report['dtype']} on {report['device_name']}; ceilings measured now: "
        f"copy {top['copy_tb_s']} TB/s, matrix product {top['matmul_tflop_s']} TFLOP/s"
    )


def words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def numbers(name: str, text: str) -> tuple[int, ...]:
    found = words(text)
    if not found or not all(word.isdigit() and int(word) > 0 for word in found):
        raise UsageError(f"{name}={text!r}: positive numbers, separated by commas")
    return tuple(int(word) for word in found)


def length_range(name: str, text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not low.isdigit() or not (high or low).isdigit():
        raise UsageError(f"{name}={text!r}: a number or LOW-HIGH")
    return int(low), int(high or low)


def rates_of(text: str) -> list[float]:
    try:
        return [float(word) for word in words(text)]
    except ValueError as error:
        raise UsageError(f"rates={text!r}: requests a second, separated by commas") from error


def fields_of(pairs: list[str] | None) -> dict[str, Any]:
    return settle({}, None, pairs or [], None)[0].options


def prompts_of(path: Path | None, count: int) -> list[str]:
    if path is not None:
        return [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    from flash_dllm.bench.ablations import problem_set

    return [sample.messages[-1][1] for sample in problem_set("gsm", count, 0) if sample.messages]


def plots() -> Any:
    from flash_dllm.bench import plots

    return plots


def span(row: dict[str, Any]) -> str:
    return f"{row['ms_low']:.3g}-{row['ms_high']:.3g}"
