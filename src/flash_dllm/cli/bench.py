"""``flash-dllm bench``: one command a kind of measurement."""

from __future__ import annotations

import typer

from flash_dllm.cli.bench_quality import ablations

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def _describe() -> None:
    """Measure kernels, steps, throughput, a running server, methods and ablations."""


app.command()(ablations)
