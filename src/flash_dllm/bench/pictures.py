"""The pictures of docs/results.md: small SVG files, drawn from the same JSON files. Needs the ``plot`` extra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flash_dllm.bench import plots
from flash_dllm.bench.results_common import sources, where
from flash_dllm.bench.results_tables import settings

MOST_BYTES = 100_000
MOST_SETTINGS = 30
"""With more runs than so in one picture, colours tell only the methods apart."""


def draw(results: Path, docs: Path) -> list[Path]:
    """Draw every picture anew.

    Raises:
        BenchError: matplotlib is missing.
    """
    folder = docs / "images" / "results"
    made: list[Path] = []
    for source in sources(results, "ablations"):
        for plan in source.data["plans"]:
            if plan["rows"]:
                made.append(_plan(plan, folder / f"{source.path.stem}-{plan['name']}.svg"))
    for kind in ("decoders", "methods"):
        for source in sources(results, kind):
            points = _points(source.data)
            made.append(
                plots.accuracy_against_tpf(points, where(source.data), folder / f"{source.path.stem}.svg")
            )
    for source in sources(results, "staleness"):
        made += _staleness(source.data, source.path.stem, folder)
    for source in sources(results, "throughput"):
        rows = [{**r, "label": r["method"]} for r in source.data["rows"] if r.get("ms") and r["run"] > 0]
        made.append(
            plots.against_batch(rows, where(source.data) + " (synthetic)", folder / f"{source.path.stem}.svg")
        )
    for source in sources(results, "kernels"):
        made.append(
            plots.time_by_kernel(source.data["rows"], where(source.data), folder / f"{source.path.stem}.svg")
        )
    return made


def _plan(plan: dict[str, Any], path: Path) -> Path:
    rows = [
        {**row, "setting": row["label"], "tpf": row["tokens_per_forward"]["value"],
         "error": 1.96 * row["tokens_per_forward"]["se"]}
        for row in plan["rows"]
    ]  # fmt: skip
    draw_ = plots.tpf_by_kind if len(plan["problems"]) > 1 else plots.accuracy_against_tpf
    return draw_(rows, plan["question"], path)


def _points(data: dict[str, Any]) -> list[dict[str, Any]]:
    if "runs" in data:
        many = len(data["runs"]) > MOST_SETTINGS
        runs = [
            {**r, "setting": f"{r['method']} {settings(r)}", "tpf": r["tokens_per_forward"]}
            for r in data["runs"]
        ]
        return [{**r, "label": r["method"] if many else r["setting"]} for r in runs]
    rows = [row for plan in data["plans"] for row in plan["rows"]]
    return [{**row, "tpf": row["tokens_per_forward"]["value"]} for row in rows]


def _staleness(data: dict[str, Any], stem: str, folder: Path) -> list[Path]:
    title = f"Drift of cached values, {data['model']}"
    layers = {p["policy"]: [(r["layer"], r["value_drift"]) for r in p["by_layer"]] for p in data["policies"]}
    ages = {p["policy"]: [(r["age"], r["value_drift"]) for r in p["by_age"]] for p in data["policies"]}
    drift = "‖cached - exact‖ / ‖exact‖"
    return [
        plots.lines(layers, title, ("layer", drift), folder / f"{stem}-layer.svg"),
        plots.lines(
            ages,
            title,
            ("steps since recomputed: 0, then 2^(n-1) and more", drift),
            folder / f"{stem}-age.svg",
        ),
    ]
