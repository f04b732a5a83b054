"""The section of docs/results.md on the paper's tables and figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flash_dllm.bench.markdown import Source, link, read, table

Row = dict[str, Any]

INTRO = """`flash-dllm reproduce` runs the protocol of the paper's tables and figures; each page has the published
numbers beside the measured ones and says what differs ([evaluation.md](evaluation.md)). No published checkpoint has
been run. With a bundled model its own tasks stand in for the benchmarks; with random weights of the 8B shape the commit
rate is set to the paper's, so the times are real and no answer is.
"""


def reproductions(results: Path, docs: Path) -> Iterator[str]:
    """All reports below ``reproduce``, and the speed of those at the shape of a large model."""
    reports = [
        s for path in sorted((results / "reproduce").glob("*/*.json")) if (s := read(path)) is not None
    ]
    if not reports:
        return
    yield "## The paper's tables and figures\n"
    yield INTRO
    rows = []
    for source in reports:
        data, cells = source.data, source.data["cells"]
        measured = sum(cell["measured"] is not None for cell in cells)
        analyses = [name for name, found in data["analyses"].items() if isinstance(found, dict)]
        rows.append([
            f"{data['plan']}: {data['title']}", data["model"], data["device_name"],
            f"{measured} of {len(cells)}" if cells else ", ".join(analyses),
            "yes" if _synthetic(data) else "no", data["date"][:10], _page(source, docs),
        ])  # fmt: skip
    yield table(["what", "model", "device", "cells", "synthetic", "date", "page"], rows)
    for source in reports:
        if _synthetic(source.data) and any(cell["measured"] for cell in source.data["cells"]):
            yield from _speed(source, docs)


def _synthetic(data: Row) -> bool:
    return str(data["measured_on"]).startswith("synthetic")


def _page(source: Source, docs: Path) -> str:
    return link(Source(source.path.with_suffix(".md"), source.data), docs)


def _speed(source: Source, docs: Path) -> Iterator[str]:
    """Tokens a second and memory, published and measured, a line a method and number of slots."""
    data = source.data
    yield f"### {data['plan']}: {data['title']}\n"
    longest = f", answers of up to {data['longest']} tokens" if "longest" in data else ""
    yield (
        f"{link(source, docs)}: {data['model']}, {data['dtype']} on {data['device_name']}{longest}; published: "
        f"{data['published_on']['model']} on {data['published_on']['device']}. Synthetic.\n"
    )
    rows = []
    for cell in data["cells"]:
        found, told = cell["measured"] or {}, cell["published"]
        rows.append([
            cell["row"], cell["column"],
            *(_number(of.get(key)) for key in ("tokens_per_second", "memory_gb") for of in (told, found)),
            cell["reason"] or "",
        ])  # fmt: skip
    columns = ["method", "", "tokens/s, published", "measured", "GB, published", "measured", ""]
    yield table(columns, rows)


def _number(value: Any) -> str:
    return "" if value is None else f"{value:g}"
