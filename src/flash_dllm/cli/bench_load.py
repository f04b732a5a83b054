"""``flash-dllm bench throughput|workload|serve``: many requests."""

from __future__ import annotations

from pathlib import Path
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
    fields_of,
    length_range,
    numbers,
    plots,
    prompts_of,
    rates_of,
    report_of,
    run_each,
    settings_of,
    title_of,
    where,
    words,
)
from flash_dllm.cli.tables import print_table, write_json


def throughput(
    shape: SHAPE = "llada-8b",
    methods: METHODS = "flash+threshold,flash+verify",
    batch: Annotated[str, typer.Option(help="slots, comma-separated")] = "1,8,16,32",
    requests: Annotated[int, typer.Option(min=1)] = 64,
    prompt: Annotated[str, typer.Option(help="prompt lengths LOW-HIGH")] = "850-1099",
    answer: Annotated[str, typer.Option(help="answer lengths LOW-HIGH")] = "96-256",
    room: Annotated[int, typer.Option(min=1, help="masked positions behind the prompt")] = 512,
    runs: Annotated[int, typer.Option(min=1, help="times the same requests are sent")] = 2,
    refill: Annotated[bool, typer.Option(help="a freed slot takes the next request at once")] = True,
    option: OPTION = None,
    commits: COMMITS = 3.0,
    accepts: ACCEPTS = 0.0,
    impl: IMPL = None,
    eager: EAGER = False,
    dtype: DTYPE = "auto",
    device: DEVICE = "auto",
    json_: JSON = None,
    plot: PLOT = None,
) -> None:
    """Many requests through the engine, all arriving at once: tokens a second, passes, latency and memory."""
    from flash_dllm.bench.throughput import Load

    load = Load(requests, length_range("prompt", prompt), length_range("answer", answer), room)
    settings = settings_of(shape, methods, option, commits, accepts, impl, eager, gang=not refill)
    _run_load("throughput", shape, settings, numbers("batch", batch), load, runs, device, dtype, json_, plot)


def workload(
    shape: SHAPE = "llada-8b",
    methods: METHODS = "flash+threshold,flash+verify",
    slots: Annotated[int, typer.Option(min=1)] = 32,
    option: OPTION = None,
    refill: Annotated[bool, typer.Option(help="a freed slot takes the next request at once")] = True,
    impl: IMPL = None,
    eager: EAGER = False,
    dtype: DTYPE = "auto",
    device: DEVICE = "auto",
    json_: JSON = None,
) -> None:
    """The whole workload: 64 prompts of 850-1,099 tokens, answers of 96-256, room for 512; twice, first run and warm.

    Pace forced: three commits a step; for methods that verify, two commits and two accepted drafts.
    """
    from flash_dllm.bench.throughput import WORKLOAD, pace_of

    settings = []
    # Methods that verify come last.
    for name in sorted(words(methods), key=lambda name: pace_of(name)[1]):
        settings += settings_of(shape, name, option, *pace_of(name), impl, eager, gang=not refill)
    _run_load("workload", shape, settings, (slots,), WORKLOAD, 2, device, dtype, json_, None)


def shares(
    shape: SHAPE = "llada-8b",
    method: Annotated[str, typer.Option(help="over flash")] = "flash+threshold",
    slots: Annotated[int, typer.Option(min=1)] = 32,
    requests: Annotated[int, typer.Option(min=1)] = 64,
    prompt: Annotated[str, typer.Option(help="prompt lengths LOW-HIGH")] = "850-1099",
    answer: Annotated[str, typer.Option(help="answer lengths LOW-HIGH")] = "96-256",
    room: Annotated[int, typer.Option(min=1, help="masked positions behind the prompt")] = 512,
    option: OPTION = None,
    dtype: DTYPE = "auto",
    device: DEVICE = "auto",
    json_: JSON = None,
) -> None:
    """Which part makes it fast: the whole workload, then without fusion, selective refresh or refill, each alone.

    Pace forced at three commits a step. Sent twice each; the warm run counts.
    """
    from flash_dllm.bench.throughput import PARTS, Load, without

    load = Load(requests, length_range("prompt", prompt), length_range("answer", answer), room)
    (full,) = settings_of(shape, method, option, 3.0, 0.0, None, False)
    settings = [full, *(without(full, part) for part in PARTS)]
    report = _run_load("shares", shape, settings, (slots,), load, 2, device, dtype, json_, None)
    warm = [row for row in report["rows"] if row["run"] == 1]
    rows = [
        (name, row["seconds"], row["seconds"] / warm[0]["seconds"])
        for name, row in zip(("everything on", *(f"without {part}" for part in PARTS)), warm, strict=True)
    ]
    if str(json_) != "-":
        print_table("The same work", ("", "seconds", "times as long"), rows)


def serve(
    url: Annotated[str, typer.Option(help="of a running server, as http://127.0.0.1:8000")],
    rates: Annotated[
        str, typer.Option(help="requests a second, comma-separated; inf sends all at once")
    ] = "1,2,4",
    requests: Annotated[int, typer.Option(min=1, help="at each rate")] = 64,
    model: Annotated[str | None, typer.Option("--model", "-m", help="default: the server's first")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="a file with a prompt a line; default: word problems")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", "-t", min=1)] = None,
    text: Annotated[bool, typer.Option("--text", help="text completions instead of chat")] = False,
    field: Annotated[
        list[str] | None,
        typer.Option("--field", metavar="NAME=VALUE", help="further field of every request; repeatable"),
    ] = None,
    timeout: Annotated[float, typer.Option(help="seconds until a request counts as failed")] = 600.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json_: JSON = None,
    plot: PLOT = None,
) -> None:
    """Open-loop Poisson load on a running server: throughput, time to the first and last token, by rate."""
    from flash_dllm.bench.facts import facts
    from flash_dllm.bench.serve import Target, measure_serve

    target = Target(url, model, not text, max_tokens, fields_of(field), timeout)
    asked = prompts_of(prompts, requests)
    rows = [measure_serve(target, asked, rate, requests, seed) for rate in rates_of(rates)]
    # Device and dtype are the server's; this process does not know them.
    known = {
        k: v for k, v in facts("cpu", "none", synthetic=False).items() if k in ("date", "command", "versions")
    }
    report = {"kind": "serve", **known, "synthetic": False, "rows": rows}
    write_json(json_, report)
    if str(json_) != "-":
        columns = (
            "rate", "requests", "failed", "requests/s", "tokens/s", "first token p50", "p99", "last token p50", "p99"
        )  # fmt: skip
        print_table(f"{url}, {rows[0]['model']}, seconds", columns, [_serve_row(row) for row in rows])
    if plot:
        plots().latency_by_rate(rows, f"{rows[0]['model']}: open-loop Poisson load", plot)
    if any(row["failed"] for row in rows):
        typer.echo(f"failed requests: {rows[-1]['errors'] or rows[0]['errors']}", err=True)
        raise typer.Exit(1)


def _run_load(
    kind: str, shape: str, settings: list[Any], batches: tuple[int, ...], load: Any, runs: int,
    device: str, dtype: str, json_: Path | None, plot: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """Measure every setting at every number of slots, show, draw and return the report."""
    from flash_dllm.bench.floors import measure_ceilings
    from flash_dllm.bench.synthetic import weights
    from flash_dllm.bench.throughput import measure_load

    load.check()
    at, number = where(device, dtype)
    model, ceilings = weights(shape, number, at), measure_ceilings(at, number)

    def save(rows: list[dict[str, Any]]) -> dict[str, Any]:
        report = report_of(kind, at, number, ceilings, rows, shape=shape)
        write_json(None if str(json_) == "-" else json_, report)
        return report

    report = run_each(
        [(s, b) for b in batches for s in settings],
        lambda setting, slots: measure_load(setting, model, slots, load, runs),
        save,
    )
    found = report["rows"]
    if str(json_) == "-":
        write_json(json_, report)
    if str(json_) != "-":
        columns = (
            "method", "slots", "run", "tokens/s", "tokens a pass", "step ms", "latency p50 s", "p99 s",
            "peak GiB", "idle",
        )  # fmt: skip
        print_table(title_of(report), columns, [_load_row(row) for row in found])
    if plot:
        warm = [{**r, "label": r["method"]} for r in found if r.get("run") == runs - 1]
        plots().against_batch(warm, f"{shape}, {report['device_name']} (synthetic)", plot)
    end(found)
    return report


def _load_row(row: dict[str, Any]) -> tuple[Any, ...]:
    if row["ms"] is None:
        return row["method"], row["batch"], "", row["failed_with"], "", "", "", "", "", ""
    return (
        row["method"], row["batch"], row["run"], row["tokens_per_second"], row["tokens_per_forward"],
        row["step_ms"]["p50"], row["latency_s"]["p50"], row["latency_s"]["p99"], row["peak_gib"], row["idle_share"],
    )  # fmt: skip


def _serve_row(row: dict[str, Any]) -> tuple[Any, ...]:
    first, last = row["first_token_s"] or {}, row["last_token_s"] or {}
    return (
        row["rate"] or "all at once", row["requests"], row["failed"], row["requests_per_second"],
        row["tokens_per_second"], first.get("p50"), first.get("p99"), last.get("p50"), last.get("p99"),
    )  # fmt: skip
