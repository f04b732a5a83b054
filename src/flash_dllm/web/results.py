"""An index of result files for the results page: one flat row a measurement, with where it came from.

Files have different shapes (``benchmarks/decoders.py``, ``flash-dllm bench``, ``flash-dllm eval``). A measurement is
any object in them that holds an accuracy with its tokens a forward, or a throughput with its batch, of a
named method; what stands above it in the file (model, device, dtype ...) belongs to it. Nothing is computed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONTEXT = ("model", "shape", "device", "device_name", "dtype", "date", "problems", "method", "synthetic")
"""What a measurement inherits from the objects around it."""
OPTIONS = ("options", "request", "label", "weights", "commit_per_step", "accept_per_step")


def checkout_results() -> Path | None:
    """``benchmarks/results`` beside this package, where it runs from a checkout."""
    folder = Path(__file__).parents[3] / "benchmarks" / "results"
    return folder if folder.is_dir() else None


def index_of(folder: Path) -> dict[str, Any]:
    """The measurements of every ``*.json`` in ``folder``.

    Returns:
        ``points`` (see :func:`_point`), ``files`` (name -> note of the file) and ``skipped``: files that hold no
        measurement of a kind that the page shows, or are not JSON, with the reason.
    """
    points: list[dict[str, Any]] = []
    files: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            skipped[path.name] = f"cannot be read ({exc})"
            continue
        found = [{**point, "file": path.name} for point in _walk(data, {})]
        if not found:
            skipped[path.name] = (
                "no accuracy with tokens a forward, no throughput with a batch, of a named method"
            )
            continue
        points += found
        files[path.name] = str(data.get("note") or data.get("what") or "") if isinstance(data, dict) else ""
    return {"points": points, "files": files, "skipped": skipped}


def _walk(value: Any, context: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        for part in value:
            yield from _walk(part, context)
        return
    if not isinstance(value, dict):
        return
    context = {**context, **{n: value[n] for n in CONTEXT if isinstance(value.get(n), str | bool)}}
    if value.get("kind") == "evaluation":
        yield from _evaluation(value, context)
        return
    point = _point(value, context)
    if point is not None:
        yield point
        return
    for part in value.values():
        if isinstance(part, dict | list):
            yield from _walk(part, context)


def _point(row: dict[str, Any], context: dict[str, Any]) -> dict[str, Any] | None:
    """A measurement, or None where ``row`` is none.

    ``accuracy`` (percent) with ``interval`` and ``n``, ``tpf`` (answer tokens a forward pass), ``rows_per_token``;
    or ``throughput`` (answer tokens a second) with ``batch``. Beside them what it inherits, and its settings.
    """
    out = _numbers(row)
    if "method" not in context or not (
        {"accuracy", "tpf"} <= out.keys() or {"throughput", "batch"} <= out.keys()
    ):
        return None
    settings = {name: row[name] for name in OPTIONS if row.get(name) not in (None, {}, "")}
    device = context.get("device_name") or context.get("device")
    kept = {n: v for n, v in context.items() if n not in ("device", "device_name")}
    return {**kept, "device": device, "settings": settings, **out}


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    names = {
        "accuracy": ("accuracy",),
        "tpf": ("tokens_per_forward", "tpf"),
        "rows_per_token": ("rows_per_token",),
        "batch": ("batch",),
    }
    out: dict[str, Any] = {}
    for name, keys in names.items():
        value = next((found for key in keys if (found := _mean(row.get(key))) is not None), None)
        if value is not None:
            out[name] = value
    if "batch" in out and _number(row.get("tokens_per_second")):
        out["throughput"] = row["tokens_per_second"]
    for name in ("interval", "n"):
        if "accuracy" in out and row.get(name) is not None:
            out[name] = row[name]
    return out


def _mean(value: Any) -> float | None:
    """A number, or the ``value`` of one with its standard error."""
    if isinstance(value, dict):
        value = value.get("value")
    return value if _number(value) else None


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _evaluation(report: dict[str, Any], context: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The tasks of ``flash-dllm eval``, each by the rule that papers report."""
    for task, seen in report.get("tasks", {}).items():
        rule = seen.get("published_rule")
        score = seen.get("rules", {}).get(rule)
        if score is None:
            continue
        counters = seen.get("counters", {})
        row = {
            **score,
            "tokens_per_forward": counters.get("tokens_per_forward"),
            "options": report.get("engine"),
            "request": report.get("policy"),
            "label": rule,
        }
        point = _point(row, {**context, "problems": task})
        if point is not None:
            yield point
