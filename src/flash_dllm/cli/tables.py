"""Tables for people; the data behind them for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table; numbers to the right. In a pipe it is as wide as it needs to be."""
    import sys

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=any(columns))
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], int | float) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    # A pipe has no width: nothing is wrapped or cut for it.
    console = Console() if sys.stdout.isatty() else Console(width=1000)
    console.print(Text(title, "bold"))
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return "" if value is None else str(value)


def write_json(path: Path | None, data: Any) -> None:
    """To a file, or to stdout for ``-``; nothing for None."""
    if path is None:
        return
    text = json.dumps(data, ensure_ascii=False, indent=2)
    if str(path) == "-":
        typer.echo(text)
    else:
        path.write_text(text + "\n", encoding="utf-8")


def gigabytes(size: float) -> str:
    """``1.5 GB``, ``12.3 MB``."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
