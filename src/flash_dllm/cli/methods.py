"""``flash-dllm methods``: caches and decodings, and which go together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flash_dllm.cli.tables import print_table, write_json
from flash_dllm.errors import FlashDLLMError

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def methods(
    family: Annotated[str, typer.Option(help="of the model: llada or dream")] = "llada",
    json_: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Caches and decodings, their papers and options, and which go together.

    A method is cache+decoding; constructor options are given with --option NAME=VALUE.
    """
    from flash_dllm.cli.fields import UsageError
    from flash_dllm.methods import CACHES, DECODINGS, FAMILIES

    if family not in FAMILIES:
        raise UsageError(f"family={family!r}: there are {', '.join(FAMILIES)}")
    caches = [_row(name, entry) for name, entry in CACHES.items() if family in entry.families]
    decodings = [_row(name, entry) for name, entry in DECODINGS.items() if family in entry.families]
    pairs = _pairs([c["name"] for c in caches], [d["name"] for d in decodings], family)
    if json_:
        write_json(Path("-"), {"family": family, "caches": caches, "decodings": decodings, "pairs": pairs})
        return
    columns = ("name", "what it does", "paper", "options")
    print_table("Caches", columns, [_cells(c) for c in caches])
    print_table("\nDecodings", columns, [_cells(d) for d in decodings])
    rows = [(cache, " ".join(names)) for cache, names in pairs.items()]
    print_table(f"\nPairs for {family} models", ("cache", "runs with"), rows)


def _row(name: str, entry: Any) -> dict[str, Any]:
    return {
        "name": name, "summary": entry.summary, "paper": entry.paper, "options": entry.options or {},
        "schedules": list(entry.schedules),
    }  # fmt: skip


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    options = " ".join(f"{name}={value}" for name, value in row["options"].items())
    paper = f"arXiv {row['paper']}" if row["paper"] else "this project"
    return row["name"], row["summary"], paper, options


def _pairs(caches: list[str], decodings: list[str], family: str) -> dict[str, list[str]]:
    """For each cache the decodings that it runs with."""
    return {cache: [d for d in decodings if _builds(cache, d, family)] for cache in caches}


def _builds(cache: str, decoding: str, family: str) -> bool:
    from flash_dllm.methods import build_method

    try:
        build_method(cache, decoding, family=family)
    except FlashDLLMError as exc:
        # A decoding that only lacks a required option does go with the cache.
        return "needs" in str(exc) and "option" in str(exc)
    return True
