"""Reading result files and writing Markdown."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Source:
    """A result file and what is in it."""

    path: Path
    data: dict[str, Any]


def read(path: Path) -> Source | None:
    """A result file, or None if it does not exist."""
    if not path.exists():
        return None
    return Source(path, json.loads(path.read_text(encoding="utf-8")))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; bars in cells are escaped."""
    lines = [list(columns), ["---"] * len(columns), *rows]
    return (
        "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines) + "\n"
    )


def link(source: Source, docs: Path) -> str:
    """A link to the file from a page in ``docs``."""
    return f"[{source.path.name}]({Path(os.path.relpath(source.path, docs)).as_posix()})"


def size_of(row: dict[str, Any]) -> str:
    """The size of a row of ``bench kernels`` in words."""
    parts = [f"{row[key]} {key}" for key in ("rows", "slots", "keys") if key in row]
    if "depth" in row:
        parts.append(f"{row['depth']} x {row['width']}")
    if "sampled" in row:
        parts.append({"plain": "drawn", "nucleus": "drawn, top-p and top-k"}[row["sampled"]])
    return ", ".join(parts) + (", score" if row.get("score") else "")


def span(interval: Sequence[float]) -> str:
    """``92.4-98.6``; with a negative end ``-3.2 to 1.4``."""
    low, high = (end + 0.0 for end in interval)  # a rounded -0.0 becomes 0.0
    return f"{low:g} to {high:g}" if low < 0 else f"{low:g}-{high:g}"
