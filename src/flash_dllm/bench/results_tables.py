"""Sections of docs/results.md that are one table a file: decoders, model cards, methods, speed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flash_dllm.bench.markdown import link, size_of, span, table
from flash_dllm.bench.results_common import missing, picture, plan_table, sources, where
from flash_dllm.bench.stats import paired

Row = dict[str, Any]

METHODS = """Methods that have blocks run in blocks of 32; `flash`, `elastic`, `verify` and `branch` have a window
instead and `guided` the whole canvas. A line differs from the first in that too, where its schedule is another, and
stories come out better through a window ([methods.md](methods.md)).
"""
AGREEMENT = """Do the kernels answer as the definitions (*ref*, plain PyTorch) do? The same word problems through each.
An *equal value* is the same number behind `####`, which is what is checked, right or wrong; an *equal text* is the same
answer to the letter. The bound to meet is 95 % equal values against the definitions in the same dtype.
"""


def decoders(results: Path, docs: Path) -> Iterator[str]:
    found = sources(results, "decoders")
    if not found:
        return
    yield "## Decoders and caches\n"
    for source in found:
        data = source.data
        told = f"{_sentence(data['what'])} {_sentence(data['note'])}"
        yield f"{link(source, docs)}: {where(data)}. {told} Not synthetic.\n"
        columns = [
            "method",
            "options",
            "n",
            "right %",
            "95 %",
            "difference",
            "95 %",
            "tokens a pass",
            "rows a token",
        ]
        first = data["runs"][0]
        yield table(
            columns,
            [
                [
                    r["method"], settings(r), str(r["n"]), f"{r['accuracy']:g}", span(r["interval"]),
                    *(("", "") if r is first else _difference(paired(_right(r), _right(first)))),
                    f"{r['answer_tokens'] / r['nfe']:.2f}", f"{r['rows_per_token']:g}",
                ]
                for r in data["runs"]
            ],
        )  # fmt: skip
        yield from picture(docs, f"{source.path.stem}.svg", "accuracy against tokens a pass")


def _right(row: Row) -> list[bool]:
    return [verdict == "1" for verdict in row["verdicts"]]


def _difference(found: Row) -> tuple[str, str]:
    return f"{found['difference']:+g}", span(found["interval"])


def settings(row: Row) -> str:
    """A run's options and request fields, without what is the same in every run."""
    both = {**row["options"], **row["request"]}
    both.pop("schedule", None)
    return ", ".join(f"{name} {value}" for name, value in both.items())


def _sentence(text: str) -> str:
    text = text.strip()
    return (text[0].upper() + text[1:] + ("" if text.endswith(".") else ".")) if text else ""


def cards(results: Path, docs: Path) -> Iterator[str]:
    found = sources(results, "card")
    if not found:
        return
    yield "## The bundled models on their own tasks\n"
    for source in found:
        data = source.data
        note = f" {data['note']}" if "note" in data else ""
        told = f"{data['model']}, {data['dtype']} on {data['device_name']}, {data['date']}"
        yield f"{link(source, docs)}: {told}.{note} Not synthetic.\n"
        rows = []
        for run in data["runs"]:
            gsm = (run.get("families") or {}).get("gsm")
            rows.append([
                run["problems"], run["method"], settings(run), str(run["n"]), f"{run['accuracy']:g}",
                span(run["interval"]), "" if not gsm else f"{gsm['accuracy']:g} ({span(gsm['interval'])})",
            ])  # fmt: skip
        yield table(["problems", "method", "options", "n", "right %", "95 %", "word problems"], rows)


def methods(results: Path, docs: Path) -> Iterator[str]:
    for source in sources(results, "methods"):
        data = source.data
        yield f"## Every method on the same problems, {data['model'].split('/')[-1]}\n"
        total = data["sets"] * data["problems_a_set"]
        yield f"{link(source, docs)}: {where(data)}; {total} problems of all families. Not synthetic. {METHODS}"
        yield from missing(data)
        for plan in data["plans"]:
            yield plan_table(plan)
        yield from picture(docs, f"{source.path.stem}.svg", "accuracy against tokens a pass")


def quantization(results: Path, docs: Path) -> Iterator[str]:
    found = sources(results, "quantization")
    if not found:
        return
    yield "## Weights, or keys and values, in 8 bits\n"
    for source in found:
        data = source.data
        told = f"{data['method']}; problems of all families. {data['note']}"
        yield f"{link(source, docs)}: {where(data)}, {told} Not synthetic.\n"
        yield table(
            ["form", "n", "right %", "95 %", "difference", "95 %", "better", "worse"],
            [
                [name, str(r["n"]), f"{r['accuracy']:g}", span(r["interval"]), *_against_plain(name, r)]
                for name, r in data["forms"].items()
            ],
        )


def _against_plain(name: str, row: Row) -> list[str]:
    against = row["against_plain"]
    if name == "plain":
        return ["", "", "", ""]
    return [*_difference(against), str(against["better"]), str(against["worse"])]


def agreement(results: Path, docs: Path) -> Iterator[str]:
    found = sources(results, "agreement")
    if not found:
        return
    yield "## The kernels against the definitions\n"
    yield AGREEMENT
    for source in found:
        data = source.data
        yield f"{link(source, docs)}: {where(data)}, {data['method']}. Not synthetic.\n"
        yield table(
            ["kernels", "n", "right %", "95 %", "against", "equal values %", "equal texts %"],
            [
                [
                    name, str(r["n"]), f"{r['accuracy']:g}", span(r["interval"]), r.get("against", ""),
                    *(f"{r[key]:g}" if key in r else "" for key in ("equal_values", "equal_texts")),
                ]
                for name, r in data["forms"].items()
            ],
        )  # fmt: skip


def speed(results: Path, docs: Path) -> Iterator[str]:
    yield "## Speed\n"
    found = [
        s
        for kind in ("step", "workload", "shares", "throughput", "kernels", "serve")
        for s in sources(results, kind)
    ]
    if not found:
        yield "No measurement of steps, kernels, the workload or a server is committed yet.\n"
    for source in found:
        data = source.data
        label = "synthetic" if data["synthetic"] else "not synthetic"
        device = data.get("device_name", "device of the server")
        yield f"{link(source, docs)}: `{data['kind']}`, {label}, {device}, {data.get('dtype', '')}, {data['date']}.\n"
        yield table(*_speed_rows(data))


def _speed_rows(data: Row) -> tuple[list[str], list[list[str]]]:
    rows = [row for row in data["rows"] if row.get("ms", 0) is not None]
    if data["kind"] == "step":
        columns = ["method", "slots", "prompt", "ms", "x floor", "first pass ms", "peak GiB", "idle %"]
        return columns, [
            [
                r["method"], str(r["batch"]), str(r["prompt"]), f"{r['ms']:.4g}", f"{r['times_floor']:g}",
                f"{r['first_pass_ms']:.4g}", f"{r['peak_gib']:.4g}", _percent(r["idle_share"]),
            ]
            for r in rows
        ]  # fmt: skip
    if data["kind"] in ("workload", "shares", "throughput"):
        columns = [
            "method",
            "slots",
            "run",
            "answer tokens/s",
            "tokens a pass",
            "latency p50 s",
            "p99 s",
            "peak GiB",
        ]
        return columns, [
            [
                load_name(r), str(r["batch"]), "first" if r["run"] == 0 else "warm", f"{r['tokens_per_second']:.4g}",
                f"{r['tokens_per_forward']:.2f}", f"{r['latency_s']['p50']:.3g}", f"{r['latency_s']['p99']:.3g}",
                f"{r['peak_gib']:.4g}",
            ]
            for r in rows
        ]  # fmt: skip
    if data["kind"] == "kernels":
        columns = ["op", "size", "implementation", "ms", "x floor", "error"]
        return columns, [
            [
                r["op"], size_of(r), r["impl"], f"{r['ms']:.4g}", f"{r['times_floor']:g}",
                f"{r['error']:.1e}" if "error" in r else "",
            ]
            for r in rows
        ]  # fmt: skip
    columns = [
        "requests/s asked",
        "failed",
        "requests/s",
        "tokens/s",
        "first token p50 s",
        "p99 s",
        "last token p50 s",
        "p99 s",
    ]
    return columns, [
        [
            f"{r['rate']:g}" if r["rate"] else "all at once", str(r["failed"]), f"{r['requests_per_second']:.3g}",
            f"{r['tokens_per_second']:.4g}" if r["tokens_per_second"] else "",
            *_latencies(r),
        ]
        for r in rows
    ]  # fmt: skip


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def _latencies(row: Row) -> list[str]:
    found = []
    for name in ("first_token_s", "last_token_s"):
        times = row[name] or {}
        found += [f"{times[q]:.3g}" if q in times else "" for q in ("p50", "p99")]
    return found


def load_name(row: Row) -> str:
    """A load's method, with what was switched off."""
    off = [
        word
        for word, on in (
            ("fusion", row["impl"] == "ref"),
            ("selective refresh", row["options"].get("track") == -1),
            ("refill", not row["refill"]),
        )
        if on
    ]
    return str(row["method"]) + (f" without {', '.join(off)}" if off else "")
