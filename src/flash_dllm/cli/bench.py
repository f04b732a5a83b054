"""``flash-dllm bench``: one command a kind of measurement."""

from __future__ import annotations

import typer

from flash_dllm.cli.bench_load import serve, shares, throughput, workload
from flash_dllm.cli.bench_quality import ablations, methods, report
from flash_dllm.cli.bench_speed import kernels, step

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def _describe() -> None:
    """Measure kernels, steps, throughput, a running server, methods and ablations."""


for command in (kernels, step, throughput, workload, shares, serve, methods, ablations, report):
    app.command()(command)
