"""``flash-dllm bench kernels|step``: what takes how long."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from flash_dllm.cli.bench_shared import (
    ACCEPTS,
    COMMITS,
    DEVICE,
    DTYPE,
    EAGER,
    IMPL,
    JSON,
    METHODS,
    OPTION,
    PLOT,
    SHAPE,
    end,
    numbers,
    plots,
    report_of,
    run_each,
    settings_of,
    span,
    title_of,
    where,
    words,
)
from flash_dllm.cli.tables import print_table, write_json


def kernels(
    shape: SHAPE = "llada-8b",
    ops: Annotated[str, typer.Option(help="comma-separated, or all")] = "all",
    impls: Annotated[
        str, typer.Option("--impl", help="comma-separated; auto is ref, on a GPU every one there is")
    ] = "auto",
    rows: Annotated[str | None, typer.Option(help="rows of a pass, comma-separated")] = None,
    slots: Annotated[str | None, typer.Option(help="slots for attention and head, comma-separated")] = None,
    keys: Annotated[int | None, typer.Option(min=1, help="positions of a slot")] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 30,
    dtype: DTYPE = "auto",
    device: DEVICE = "auto",
    json_: JSON = None,
    plot: PLOT = None,
) -> None:
    """Each op by shape: implementations against the definition, the library and the measured ceilings."""
    from flash_dllm.bench import kernels as bench
    from flash_dllm.bench.floors import measure_ceilings
    from flash_dllm.bench.synthetic import Setting
    from flash_dllm.bench.timing import Timer

    at, kind = where(device, dtype)
    config = Setting(shape, "none+threshold").config
    sizes = bench.Sizes.default(config, at)
    if rows:
        sizes = replace(sizes, rows=numbers("rows", rows))
    if slots:
        sizes = replace(sizes, slots=numbers("slots", slots))
    if keys:
        sizes = replace(sizes, keys=keys)
    names = bench.OPS if ops == "all" else words(ops)
    usual = bench.IMPLS if at.type == "cuda" else dict.fromkeys(bench.OPS, ("ref",))
    ceilings = measure_ceilings(at, kind)
    timer = Timer(at, repeats)
    found: list[dict[str, Any]] = []
    report = report_of("kernels", at, kind, ceilings, found, shape=shape)
    for case in bench.Maker(config, kind, at).cases(names, sizes):
        wanted = usual[case.op] if impls == "auto" else words(impls)
        found += bench.measure_case(case, wanted, timer, ceilings, kind)
        write_json(None if str(json_) == "-" else json_, report)
    if str(json_) == "-":
        write_json(json_, report)
    else:
        columns = ("op", "size", "impl", "ms", "10-90 %", "floor ms", "times floor", "TB/s", "error")
        print_table(title_of(report), columns, [_kernel_row(row) for row in found])
    if plot:
        plots().time_by_kernel(found, f"{shape}, {report['device_name']}, {report['dtype']}", plot)
    failed = [f"{row['op']} {row['impl']}: {row['failed_with']}" for row in found if "failed_with" in row]
    if failed:
        typer.echo("; ".join(failed), err=True)
        raise typer.Exit(1)


def step(
    shape: SHAPE = "llada-8b",
    methods: METHODS = "flash+threshold,flash+verify,flash+branch",
    batch: Annotated[str, typer.Option(help="slots, comma-separated")] = "1,8,16,32",
    prompt: Annotated[str, typer.Option(help="prompt lengths, comma-separated")] = "1000",
    answer: Annotated[int, typer.Option(min=1, help="masked positions behind the prompt")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="timed steps")] = 20,
    option: OPTION = None,
    commits: COMMITS = None,
    accepts: ACCEPTS = 0.0,
    impl: IMPL = None,
    eager: EAGER = False,
    dtype: DTYPE = "auto",
    device: DEVICE = "auto",
    json_: JSON = None,
) -> None:
    """Time of a steady step and of the first pass by batch and prompt length, against the floor of its passes.

    Random weights reach no threshold: without --commit-per-step a step commits one token. What counts is the time.
    """
    from flash_dllm.bench.floors import measure_ceilings
    from flash_dllm.bench.step import Place, measure_step
    from flash_dllm.bench.synthetic import weights

    at, kind = where(device, dtype)
    places = [Place(b, p, answer, steps) for p in numbers("prompt", prompt) for b in numbers("batch", batch)]
    settings = settings_of(shape, methods, option, commits, accepts, impl, eager)
    model, ceilings = weights(shape, kind, at), measure_ceilings(at, kind)

    def save(rows: list[dict[str, Any]]) -> dict[str, Any]:
        report = report_of("step", at, kind, ceilings, rows, shape=shape)
        write_json(None if str(json_) == "-" else json_, report)
        return report

    report = run_each(
        [(_branches(s, p.batch), p) for p in places for s in settings],
        lambda setting, place: [measure_step(setting, model, place, ceilings)],
        save,
    )
    found = report["rows"]
    if str(json_) == "-":
        write_json(json_, report)
    if str(json_) != "-":
        columns = (
            "method", "slots", "prompt", "ms", "10-90 %", "floor ms", "times floor", "first pass ms", "peak GiB", "idle"
        )  # fmt: skip
        print_table(title_of(report), columns, [_step_row(row) for row in found])
    end(found)


def _branches(setting: Any, batch: int) -> Any:
    """Folded branch decoding tests four drafts where one slot is decoded at a time and two above, unless told."""
    if not setting.method.endswith("+branch") or "branches" in setting.options:
        return setting
    return replace(setting, options={**setting.options, "branches": 4 if batch == 1 else 2})


def _kernel_row(row: dict[str, Any]) -> tuple[Any, ...]:
    from flash_dllm.bench.markdown import size_of

    size, floor = size_of(row), f"{row['floor_ms']:.4f}"
    if row["ms"] is None:
        why = row.get("skipped") or row["failed_with"]
        return row["op"], size, row["impl"], why, "", floor, "", "", ""
    error = "" if "error" not in row else f"{row['error']:.1e}"
    return (
        row["op"], size, row["impl"], f"{row['ms']:.4f}", span(row), f"{row['floor_ms']:.4f}",
        row["times_floor"], row["tb_s"], error,
    )  # fmt: skip


def _step_row(row: dict[str, Any]) -> tuple[Any, ...]:
    if row["ms"] is None:
        return row["method"], row["batch"], row["prompt"], row["failed_with"], "", "", "", "", "", ""
    return (
        row["method"], row["batch"], row["prompt"], row["ms"], span(row), row["floor_ms"], row["times_floor"],
        row["first_pass_ms"], row["peak_gib"], row["idle_share"],
    )  # fmt: skip
