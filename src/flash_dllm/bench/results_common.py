"""What the sections of docs/results.md share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flash_dllm.bench.markdown import Source, read, span, table

Row = dict[str, Any]


def sources(results: Path, kind: str) -> list[Source]:
    """Files whose name begins with ``kind-``, those measured on a GPU first, then by name."""
    found = [read(path) for path in sorted(results.glob(f"{kind}-*.json"))]
    return sorted((source for source in found if source is not None), key=lambda s: not on_gpu(s.data))


def on_gpu(data: Row) -> bool:
    """Whether a file was measured on a GPU."""
    return str(data.get("device", "")).startswith("cuda")


def where(data: Row) -> str:
    """Model, dtype, device, slots and date in words."""
    slots = f", {data['slots']} slots" if "slots" in data else ""
    model = data.get("model") or data.get("shape")
    return f"{model}, {data['dtype']} on {data['device_name']}{slots}, {data['date']}"


def missing(data: Row) -> list[str]:
    """A sentence on the units that a file lacks, if it lacks some: why, if it says so."""
    lacks = data["missing"]
    if not lacks:
        return []
    return [
        data.get("note") or f"{lacks} of {lacks + data['units']} units had not run when this was written.",
        "",
    ]


def picture(docs: Path, name: str, words: str) -> list[str]:
    """A picture if it has been drawn."""
    path = docs / "images" / "results" / name
    return [f"![{words}](images/results/{name})\n"] if path.exists() else []


def plan_table(plan: Row) -> str:
    several = len(plan["problems"]) > 1
    columns = [
        "setting",
        "n",
        "right %",
        "95 %",
        "by set",
        "difference",
        "95 %",
        "tokens a pass",
        "rows a token",
    ]
    rows = []
    for row in plan["rows"]:
        against = row["against_baseline"]
        base = row["label"] == plan["rows"][0]["label"]
        tpf = row["tokens_per_forward"]
        rows.append([
            (f"{row['problems']}: " if several else "") + row["label"], str(row["n"]), f"{row['accuracy']:g}",
            span(row["interval"]), " ".join(f"{s['accuracy']:g}" for s in row["sets"]),
            "" if base or not against else f"{against['difference']:+g}",
            "" if base or not against else span(against["interval"]),
            f"{tpf['value']:.2f} ± {1.96 * tpf['se']:.2f}", f"{row['rows_per_token']['value']:.1f}",
        ])  # fmt: skip
    return table(columns, rows)
