"""docs/results.md: everything measured so far, from the JSON files, for somebody who has not read a paper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flash_dllm.bench import results_tables as tables
from flash_dllm.bench.markdown import link, table
from flash_dllm.bench.results_common import missing, on_gpu, picture, plan_table, sources, where
from flash_dllm.bench.results_reproduce import reproductions

Row = dict[str, Any]

HEAD = """# Results

Written by `flash-dllm bench report` from the files of [benchmarks/results](../benchmarks/results); do not edit. Every
table names its file, and the file names device, dtype, versions, date and command.

## How to read it

A masked diffusion model fills an answer of masks in forward *passes*. Each pass guesses every mask, and a *decoding*
rule commits the guesses that it trusts. Committing more a pass is faster and riskier. A *cache* keeps the keys and
values of positions that are not recomputed in a pass; it saves arithmetic, and what it keeps grows stale.

* **right %**: answers whose final value is right, with the 95 % interval of a rate of so many problems. Decoding is
  deterministic: the problems are the sample.
* **difference**: points against the first line of its table on the *same* problems, with the 95 % interval of a paired
  difference. An interval that holds 0 shows nothing; of twenty that do not, one is chance.
* **tokens a pass**: answer tokens (up to the first stop token, without it) for each forward pass of a request; a
  verify pass counts as a pass. **rows a token**: positions recomputed for each answer token. Passes cost where few
  requests run at once, rows where many do.
* **synthetic** marks random weights or a commit rate that is set: such a time is real, such an answer is not.
* The bundled models are small (5.5 and 15.7 million parameters), trained for synthetic tasks. What they show of a
  method on short canvases need not hold for an 8-billion-parameter model over long prompts.

Speed at the 8B shape has a page of its own: [performance.md](performance.md).
"""


KINDS = (
    "ablations", "staleness", "decoders", "card", "methods", "quantization", "agreement", "step", "kernels",
    "workload", "shares", "throughput", "serve", "training",
)  # fmt: skip
"""Result files by what their names begin with."""
SETS = """Each line is {sets} disjoint sets of {problems_a_set} problems of the test split ({total} together), none of
them seen in training. Not synthetic; seconds are not reported, since processes shared the machine.
"""
DRIFT = """Not synthetic. After each pass every cached key and value is compared with an exact recompute: drift is the
length of the difference over that of the exact vector. *Weighted* drift is the drift of values times the attention that
the candidates pay to each row, summed over positions. *Variation* is the total variation between the candidates'
distributions with the cache and without.
"""
CAPTURE = """Of the weighted drift of all known positions (prompt and committed), the part that sits in the rows which a
criterion would choose. *best* knows the drift beforehand. A policy that tracks by attention has just refreshed what
attention would choose, so its own line shows what it leaves.
"""
CORRELATION = """The correlation is Spearman's, over known positions, averaged over layers: below 0, rows that are
attended more drift less. For a policy that tracks by attention it is below 0 by construction, so read the other lines.
What a policy can gain is the product of attention and drift, which *attention* finds in part even where the two are
not correlated.
"""


def page(results: Path, docs: Path) -> str:
    """The text of docs/results.md. Its pictures are drawn by :func:`flash_dllm.bench.pictures.draw`."""
    parts = [HEAD]
    for section in (
        _ablations,
        _staleness,
        tables.decoders,
        tables.cards,
        tables.methods,
        tables.quantization,
        tables.agreement,
        reproductions,
        tables.speed,
        _files,
    ):
        parts += section(results, docs)
    return "\n".join(parts)


def _ablations(results: Path, docs: Path) -> Iterator[str]:
    former = ""
    for source in sources(results, "ablations"):
        data = source.data
        title = f"## Ablations, {data['model'].split('/')[-1]} on {'a GPU' if on_gpu(data) else 'the CPU'}\n"
        if title != former:
            yield title
        former = title
        total = data["sets"] * data["problems_a_set"]
        yield f"{link(source, docs)}: {where(data)}. " + SETS.format(total=total, **data)
        yield from missing(data)
        for plan in data["plans"]:
            if plan["rows"]:
                yield f"### {plan['question']}\n"
                yield plan_table(plan)
                yield from picture(
                    docs, f"{source.path.stem}-{plan['name']}.svg", f"settings of {plan['name']}"
                )
                yield verdict(plan) + "\n"


def verdict(plan: Row) -> str:
    """What the intervals say, in a sentence."""
    found = []
    for row in plan["rows"]:
        against = row["against_baseline"]
        if against and not against["interval"][0] <= 0 <= against["interval"][1]:
            more = "more" if against["difference"] > 0 else "fewer"
            found.append(
                f"*{row['label']}* ({row['problems']}): {abs(against['difference']):g} points {more} right"
            )
    if not found:
        return "Accuracy: no setting differs from the first by more than chance at this number of problems."
    return "Accuracy, beyond the 95 % interval: " + "; ".join(found) + "."


def _staleness(results: Path, docs: Path) -> Iterator[str]:
    for source in sources(results, "staleness"):
        data = source.data
        yield f"## How stale a cache gets, {data['model'].split('/')[-1]}\n"
        yield f"{link(source, docs)}: {where(data)}; {data['prompts']}. {DRIFT}"
        rows = []
        for p in data["policies"]:
            layers = p["by_layer"]
            rows.append([
                p["policy"], str(p["passes"]), *(f"{_mean(layers, n):.3g}" for n in ("key_drift", "value_drift")),
                f"{_mean(layers, 'weighted_drift'):.3g}", f"{p['total_variation']['mean']:.4f}",
                f"{p['total_variation']['p99']:.3f}", f"{100 * p['argmax_changed']:.1f}",
            ])  # fmt: skip
        columns = [
            "policy", "passes", "key drift", "value drift", "weighted", "variation, mean", "99 %", "argmax changed, %"
        ]  # fmt: skip
        yield table(columns, rows)
        yield from picture(docs, f"{source.path.stem}-layer.svg", "drift of cached values by layer")
        yield from picture(docs, f"{source.path.stem}-age.svg", "drift of cached values by age")
        yield from _tracking(data)


def _mean(rows: list[Row], name: str) -> float:
    return float(sum(row[name] for row in rows) / len(rows))


def _tracking(data: Row) -> Iterator[str]:
    kept = [p for p in data["policies"] if p["capture"]]
    if not kept:
        return
    yield "### Are the most attended rows the best to recompute?\n"
    yield CAPTURE
    names = ("best", "attention", "recent", "random")
    columns = [
        "policy",
        "rows chosen",
        *(f"{name}, %" for name in names),
        "rank correlation, attention and drift",
    ]
    rows = []
    for p in kept:
        by = {(c["rows"], c["criterion"]): c["share"] for c in p["capture"]}
        known = [r for r in p["rank_correlation_by_layer"] if r is not None]
        correlation = f"{sum(known) / len(known):+.2f}" if known else ""
        for budget in sorted({c["rows"] for c in p["capture"]}):
            rows.append([
                p["policy"], str(budget), *(f"{100 * by[budget, name]:.1f}" for name in names), correlation
            ])  # fmt: skip
    yield table(columns, rows)
    yield CORRELATION


def _files(results: Path, docs: Path) -> Iterator[str]:
    yield "## Files\n"
    rows = []
    for source in (s for kind in KINDS for s in sources(results, kind)):
        data = source.data
        synthetic = "yes" if data.get("synthetic") else "no"
        command = data.get("command") or "; ".join(stage["command"] for stage in data.get("stages", []))
        rows.append(
            [
                link(source, docs),
                data.get("device_name") or data.get("device", ""),
                data["date"],
                synthetic,
                f"`{command}`",
            ]
        )
    yield table(["file", "device", "date", "synthetic", "command"], rows)
