"""Plots of reports. Needs the ``plot`` extra; each function writes one small SVG or PNG, by the file's ending."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flash_dllm.bench.markdown import size_of
from flash_dllm.bench.timing import BenchError

COLOURS = ("#2a6f97", "#c05746", "#6a994e", "#8d6a9f", "#c9a227", "#577590", "#9c6644", "#444444")
Row = dict[str, Any]


def _figure(title: str, x: str, y: str, width: float = 6.4, height: float = 3.8) -> tuple[Any, Any]:
    try:
        import matplotlib
    except ImportError as error:
        raise BenchError("plots need matplotlib: pip install 'flash-dllm[plot]'") from error
    matplotlib.use("Agg")
    # The same file in every run: ids from a fixed salt, text as text.
    matplotlib.rcParams.update({"svg.hashsalt": "flash-dllm", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=data, dpi=110)
    pyplot.close(figure)
    if path.suffix == ".svg":
        lines = path.read_text(encoding="utf-8").split("\n")
        path.write_text("\n".join(line.rstrip() for line in lines), encoding="utf-8")
    return path


def accuracy_against_tpf(rows: Sequence[Row], title: str, path: Path) -> Path:
    """One point a setting: ``label``, ``accuracy``, ``interval`` (percent) and ``tpf``; equal labels look alike.

    Settings that are right less than half as often as the best would squeeze all others: they are named below the
    picture instead, by ``setting`` where they have one.
    """
    best = max((row["accuracy"] for row in rows), default=0)
    near = [row for row in rows if row["accuracy"] >= best / 2]
    far = [f"{r.get('setting', r['label'])}, {r['accuracy']:g} %" for r in rows if r["accuracy"] < best / 2]
    below = f"\n(not drawn: {'; '.join(far)})" if far else ""
    labels = list(dict.fromkeys(row["label"] for row in near))
    height = max(3.8, 0.5 + 0.16 * len(labels))
    figure, axes = _figure(title, "answer tokens a forward pass" + below, "right answers, %", height=height)
    named = set()
    for row in near:
        index = labels.index(row["label"])
        low, high = row["interval"]
        error = [[max(0.0, row["accuracy"] - low)], [max(0.0, high - row["accuracy"])]]
        axes.errorbar(
            [row["tpf"]], [row["accuracy"]], yerr=error, fmt="osD^v<>"[index // len(COLOURS) % 7],
            color=COLOURS[index % len(COLOURS)], capsize=2, label=None if row["label"] in named else row["label"],
        )  # fmt: skip
        named.add(row["label"])
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _save(figure, path)


def tpf_by_kind(rows: Sequence[Row], title: str, path: Path) -> Path:
    """Bars of ``tpf`` by kind of problems (``problems``), one a setting (``setting``), with ``error`` as whiskers."""
    kinds = list(dict.fromkeys(row["problems"] for row in rows))
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    figure, axes = _figure(title, "", "answer tokens a forward pass", width=7.2)
    step = 0.8 / len(settings)
    for index, setting in enumerate(settings):
        mine = [row for row in rows if row["setting"] == setting]
        x = [kinds.index(row["problems"]) + (index + 0.5) * step - 0.4 for row in mine]
        y, error = [row["tpf"] for row in mine], [row["error"] for row in mine]
        colour = COLOURS[index % len(COLOURS)]
        axes.bar(
            x, y, width=step, yerr=error, capsize=1, color=colour, label=setting, error_kw={"linewidth": 0.7}
        )
    axes.set_xticks(range(len(kinds)), kinds)
    axes.legend(fontsize=7, frameon=False)
    return _save(figure, path)


def against_batch(rows: Sequence[Row], title: str, path: Path) -> Path:
    """Throughput and memory by slots, a line a method: ``label``, ``batch``, ``tokens_per_second``, ``peak_gib``."""
    figure, left = _figure(title, "slots", "answer tokens a second", width=7.2)
    right = left.twinx()
    right.set_ylabel("peak memory, GiB (dashed)")
    for index, label in enumerate(dict.fromkeys(row["label"] for row in rows)):
        mine = sorted((r for r in rows if r["label"] == label), key=lambda r: r["batch"])
        x = [r["batch"] for r in mine]
        colour = COLOURS[index % len(COLOURS)]
        left.plot(x, [r["tokens_per_second"] for r in mine], "o-", color=colour, label=label)
        right.plot(x, [r["peak_gib"] for r in mine], "s--", color=colour, markersize=3)
    left.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    left.legend(fontsize=7, frameon=False)
    return _save(figure, path)


def time_by_kernel(rows: Sequence[Row], title: str, path: Path) -> Path:
    """Bars of each op and size by implementation, with its floor as a mark: rows of ``bench kernels``."""
    known = [row for row in rows if row.get("ms")]
    labels = list(dict.fromkeys(_size(row) for row in known))
    impls = list(dict.fromkeys(row["impl"].split(":")[0] for row in known))
    figure, axes = _figure(
        title, "ms (logarithmic); | is the floor", "", width=7.2, height=1 + 0.24 * len(labels)
    )
    step = 0.8 / max(1, len(impls))
    for index, impl in enumerate(impls):
        mine = [row for row in known if row["impl"].split(":")[0] == impl]
        y = [labels.index(_size(row)) + index * step for row in mine]
        axes.barh(
            y, [row["ms"] for row in mine], height=step, color=COLOURS[index % len(COLOURS)], label=impl
        )
    floors = {_size(row): row["floor_ms"] for row in known}
    places = [labels.index(label) + 0.4 - step / 2 for label in floors]
    axes.plot(list(floors.values()), places, "|", color="black", markersize=8)
    axes.set_xscale("log")
    axes.set_yticks([i + 0.4 - step / 2 for i in range(len(labels))], labels, fontsize=7)
    axes.invert_yaxis()
    axes.legend(fontsize=7, frameon=False)
    return _save(figure, path)


def _size(row: Row) -> str:
    return f"{row['op']}, {size_of(row)}"


def latency_by_rate(rows: Sequence[Row], title: str, path: Path) -> Path:
    """Median and 99th percentile of the time to the first and last token by rate: rows of ``bench serve``."""
    figure, axes = _figure(title, "requests a second", "seconds")
    mine = sorted((r for r in rows if r["rate"] and r["last_token_s"]), key=lambda r: r["rate"])
    for index, (name, words) in enumerate((("first_token_s", "first token"), ("last_token_s", "last token"))):
        for quantile, style in (("p50", "o-"), ("p99", "s--")):
            y = [r[name][quantile] for r in mine]
            label = f"{words}, {quantile}"
            axes.plot([r["rate"] for r in mine], y, style, color=COLOURS[index], label=label)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, frameon=False)
    return _save(figure, path)


def lines(
    series: dict[str, list[tuple[float, float]]], title: str, axes_names: tuple[str, str], path: Path
) -> Path:
    """Curves by name; points that are not finite are left out."""
    figure, axes = _figure(title, *axes_names)
    for index, (label, points) in enumerate(series.items()):
        shown = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
        colour = COLOURS[index % len(COLOURS)]
        axes.plot([x for x, _ in shown], [y for _, y in shown], "o-", markersize=3, color=colour, label=label)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, frameon=False)
    return _save(figure, path)
