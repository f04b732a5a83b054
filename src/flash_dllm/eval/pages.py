"""A reproduction as a page: published numbers beside measured ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

COLUMNS = (
    ("accuracy", "right %"), ("tokens_per_second", "tokens/s"), ("tokens_per_step", "tokens a step"),
    ("speedup", "speed-up"), ("memory_gb", "GB"),
)  # fmt: skip


def page(report: Mapping[str, Any]) -> str:
    """The report in Markdown."""
    where = report["published_on"]
    lines = [f"# {report['plan']}: {report['title']}", ""]
    lines += [f"Published: {report['source']}, {where['model']} on {where['device']}."]
    lines += [f"Measured: {report['model']} on {report['device_name']}; {report['measured_on']}.", ""]
    lines += [f"Counting: {report['counting']}.", ""]
    lines += ["What differs, so that the columns do not compare as they stand:", ""]
    lines += [f"- {line}" for line in report["differs"]]
    if report["cells"]:
        lines += ["", *table(report["cells"])]
    lines += analyses(report["analyses"])
    if report["notes"]:
        lines += ["", "Notes:", "", *(f"- {note}" for note in report["notes"])]
    return "\n".join(lines) + "\n"


def shown(cells: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The columns that hold a number somewhere."""
    return [
        (key, title)
        for key, title in COLUMNS
        if any(value(c["published"], key) is not None or value(c["measured"], key) is not None for c in cells)
    ]


def value(numbers: Mapping[str, Any] | None, key: str) -> Any:
    """A number of a cell; of an accuracy the rate alone."""
    found = (numbers or {}).get(key)
    return found["accuracy"] if isinstance(found, Mapping) else found


def table(cells: list[dict[str, Any]]) -> list[str]:
    """Each number twice: published, measured."""
    columns = shown(cells)
    titles = [f"{title}, {who}" for _, title in columns for who in ("published", "measured")]
    lines = [
        "| " + " | ".join(["row", "column", *titles, "tokens a pass", "what differs"]) + " |",
        "| --- | --- |" + " ---: |" * (len(titles) + 1) + " --- |",
    ]
    for cell in cells:
        numbers = []
        for key, _ in columns:
            numbers += [_published(cell["published"], key), _measured(cell["measured"], key)]
        passes = value(cell["measured"], "tokens_per_forward")
        remark = cell["reason"] or "; ".join(cell["differs"])
        row = [cell["row"], cell["column"], *numbers, "" if passes is None else str(passes), remark]
        lines.append("| " + " | ".join(row) + " |")
    return lines


def _published(numbers: Mapping[str, Any], key: str) -> str:
    found = numbers.get(key)
    spread = numbers.get(f"{key}_sd")
    return "" if found is None else f"{found}" + (f" ± {spread}" if spread is not None else "")


def _measured(numbers: Mapping[str, Any] | None, key: str) -> str:
    found = value(numbers, key)
    if found is None:
        return ""
    rate = (numbers or {})[key]
    if isinstance(rate, Mapping):
        low, high = rate["interval"]
        return f"{found} ({low}–{high}, n={rate['n']})"
    return str(found)


def analyses(found: Mapping[str, Any]) -> list[str]:
    """Attention by layer, and confidence against early-decodable tokens."""
    if not found:
        return []
    lines = ["", f"From {found['problems']} decodings with {found['method']}."]
    if "concentration" in found:
        lines += list(_concentration(found["concentration"]))
    if "early" in found:
        lines += list(_early(found["early"]))
    return lines


def _concentration(seen: Mapping[str, Any]) -> Iterator[str]:
    for kind, words in (("decoded", "prompt and committed tokens"), ("answer", "committed answer tokens")):
        part = seen[kind]
        names = list(part["even"])
        yield from ("", f"Share of the attention of masked candidates on the most attended {words} "
                    f"({part['mean_tokens']} on average, {seen['steps']} steps):", "")  # fmt: skip
        yield "| layer | " + " | ".join(names) + " |"
        yield "| --- |" + " ---: |" * len(names)
        for index, layer in enumerate(part["layers"]):
            yield f"| {index} | " + " | ".join(f"{layer[name]:.3f}" for name in names) + " |"
        yield "| even attention | " + " | ".join(f"{part['even'][name]:.3f}" for name in names) + " |"


def _early(seen: Mapping[str, Any]) -> Iterator[str]:
    title = "A step's average confidence against its early-decodable tokens (right, but not committed yet):"
    yield from ("", title, "")
    for key, name in (("pearson", "Pearson"), ("spearman", "Spearman"), ("by_token", "token by token")):
        part = seen[key]
        if part is not None:
            interval = (
                f", 95 % interval {part['interval'][0]} to {part['interval'][1]}" if part["interval"] else ""
            )
            yield f"- {name}: {part['value']}{interval} ({seen['steps']} steps of {seen['decodings']} decodings)"
    if seen["share"] is not None:
        yield f"- {seen['share']:.1%} of the uncommitted candidates were right already"
    yield from ("", "| early-decodable tokens | steps | average confidence |", "| ---: | ---: | ---: |")
    for entry in seen["by_count"]:
        yield f"| {entry['early']} | {entry['steps']} | {entry['confidence']} |"
