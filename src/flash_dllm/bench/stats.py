"""Rates, ratios and paired differences with 95 % intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

Z = 1.96


def wilson(right: int, count: int) -> tuple[float, float]:
    """95 % Wilson interval of a rate, in percent.

    Raises:
        ValueError: ``count`` is 0.
    """
    if count < 1:
        raise ValueError("a rate of 0 observations has no interval")
    p = right / count
    middle = p + Z * Z / (2 * count)
    spread = Z * math.sqrt(p * (1 - p) / count + Z * Z / (4 * count * count))
    low, high = (100 * (middle + sign * spread) / (1 + Z * Z / count) for sign in (-1, 1))
    return round(max(low, 0.0), 1), round(min(high, 100.0), 1)


def rate(verdicts: Sequence[bool]) -> dict[str, Any]:
    """``n``, ``right``, ``accuracy`` in percent and its ``interval``."""
    right, count = sum(verdicts), len(verdicts)
    return {
        "n": count, "right": right, "accuracy": round(100 * right / count, 1),
        "interval": list(wilson(right, count)),
    }  # fmt: skip


def paired(verdicts: Sequence[bool], baseline: Sequence[bool]) -> dict[str, Any]:
    """Difference of two rates on the same problems, in points.

    The interval is that of Agresti and Min (Statistics in Medicine 24, 2005): half a problem is added to each cell
    of the table, so that it keeps a width where no problem differs.

    Raises:
        ValueError: the two are not of equal, positive length.
    """
    if len(verdicts) != len(baseline) or not verdicts:
        raise ValueError(f"{len(verdicts)} verdicts against {len(baseline)} of the baseline")
    n = len(verdicts)
    better = sum(a and not b for a, b in zip(verdicts, baseline, strict=True))
    worse = sum(b and not a for a, b in zip(verdicts, baseline, strict=True))
    total, up, down = n + 2, better + 0.5, worse + 0.5
    middle = (up - down) / total
    spread = Z * math.sqrt(up + down - (up - down) ** 2 / total) / total
    return {
        "difference": round(100 * (better - worse) / n, 1), "better": better, "worse": worse,
        "interval": [round(100 * (middle - spread), 1), round(100 * (middle + spread), 1)],
    }  # fmt: skip


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """A ratio of sums over problems with its standard error (linearised; problems are independent)."""
    n, below = len(numerators), sum(denominators)
    if n < 1 or below <= 0:
        return {"value": 0.0, "se": 0.0}
    value = sum(numerators) / below
    squares = sum((a - value * b) ** 2 for a, b in zip(numerators, denominators, strict=True))
    error = math.sqrt(squares * n / (n - 1)) / below if n > 1 else 0.0
    return {"value": round(value, 4), "se": round(error, 4)}


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile by linear interpolation, and the mean."""
    ordered = sorted(values)
    return {"p50": at(ordered, 0.5), "p99": at(ordered, 0.99), "mean": statistics.fmean(ordered)}


def at(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the ``ordered`` values lie, linearly interpolated."""
    if not ordered:
        raise ValueError("no values")
    where = share * (len(ordered) - 1)
    low = math.floor(where)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (where - low) * (ordered[high] - ordered[low])
