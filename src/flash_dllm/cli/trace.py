"""``flash-dllm trace``: event logs as files that others can open."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def _describe() -> None:
    """Event logs, as ``generate --trace`` writes them."""


@app.command()
def export(
    logs: Annotated[list[Path], typer.Argument(help="an event log, or two for a race")],
    output: Annotated[Path, typer.Option("--output", "-o", help="the HTML file to write")],
) -> None:
    """Write one HTML file that plays the logs; it opens offline."""
    from flash_dllm.web.player import player_file

    page = player_file(logs)
    output.write_text(page, encoding="utf-8")
    typer.echo(f"{output}: {len(page.encode()) / 1000:.0f} kB")
