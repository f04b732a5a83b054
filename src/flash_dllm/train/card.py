"""The bundled models' cards, made from the committed measurements; no number of accuracy is written by
hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flash_dllm.train.tasks import FAMILIES

NAMES = ("tiny-llada", "tiny-dream", "tiny-guide")
FLOORS = {"all": 94.0, "gsm": 88.0}
EASIER = {"all": 90.0, "gsm": 82.0}
"""What may be reached instead where the tasks are hard to decode in parallel."""
PARALLEL = (3.0, 5.0)
"""Tokens a forward on word problems at threshold 0.9 that the tasks are meant to have."""

_WHAT = {
    "tiny-llada": "A small masked diffusion language model in the LLaDA layout",
    "tiny-dream": "A small masked diffusion language model in the Dream layout (grouped queries, biases on "
    "queries, "
    "keys and values, shifted prediction)",
    "tiny-guide": "A small causal language model in the Qwen2 layout, the guide of guided decoding, with "
    "the tokenizer "
    "of the two bundled diffusion models",
}
_LABELS = {
    "gsm": "word problems", "arith": "arithmetic", "list": "list operations", "convert": "unit conversion",
    "chat": "short dialogue", "fact": "closed facts", "code": "Python functions", "json": "JSON extraction",
    "story": "short stories", "letter": "letters", "infill": "gaps in texts", "all": "all",
}  # fmt: skip
_COMMON_LIMITS = (
    "It knows the templates of its task generator and nothing else. It cannot hold a conversation, answer "
    "general "
    "questions, write code beyond its few kinds of functions, or read any language but plain English.",
    "It is made to test and show decoding, not to be used for its answers.",
    "Numbers are small: word problems and arithmetic beyond the generator's ranges are guessed.",
    "On templates that it has not seen it fails more often than not (see above).",
    "Its longest canvas has 1,024 positions. Accuracy on long prompts has not been measured for this card.",
)
_LIMITS = {
    "tiny-llada": (
        "Word problems are its weak side: it often has the answer and then goes on with more, meaningless "
        "steps (see "
        "the example). The likely reason is that most of its training canvases ended soon after the answer, "
        "so that it "
        "learned to fill a canvas; this has not been tested. The data have roomier canvases now, but the "
        "stage that "
        "would have trained on them did not run.",
    ),
    "tiny-dream": (
        "In short dialogue more than a quarter of its answers are wrong; why has not been looked into.",
    ),
    "tiny-guide": ("It is not a masked diffusion model and serves only as a guide.",),
}


def card(name: str, results: Path, folder: Path) -> str:
    """The README of a bundled model from `results` (committed JSON) and the sizes of the files in
    `folder`.""" trained = _read(results / f"training-{name}.json")
    path = results / f"card-{name}.json"
    measured = _read(path) if path.exists() else None
    sections = [
        "---\nlicense: apache-2.0\nlanguage: en\n---",
        f"# flash-dllm/{name}",
        _intro(name, trained, folder),
        "## Data", _DATA,
        "## Training", _training(trained),
        "## Accuracy", *_accuracy(trained, measured),
    ]  # fmt: skip
    if measured is not None:
        sections += ["### Goals", _goals(measured)]
    sections += ["### An example of each kind", *map(_example, trained["examples"])]
    sections += ["## Limits", "\n".join(f"* {text}" for text in (*_LIMITS[name], *_COMMON_LIMITS))]
    sections += ["## Licence", "Apache-2.0, weights and data generator alike."]
    return "\n\n".join(sections) + "\n"


def write_cards(results: Path, weights: Path) -> None:
    """Writes the README of every bundled model."""
    for name in NAMES:
        (weights / name / "README.md").write_text(card(name, results, weights / name), encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


_DATA = (
    "All data are made by `flash_dllm.train.tasks`: eleven families of short tasks from templates, with "
    "answers that a "
    "program can check. No text of other people or models is in them. Training, development and test "
    "questions never "
    "coincide: a hash of the question decides its split. *New questions* below are of templates seen in "
    "training; *new "
    "templates* were never drawn in training."
)


def _intro(name: str, trained: dict[str, Any], folder: Path) -> str:
    shape = trained["shape"]
    size = (folder / "model.safetensors").stat().st_size
    return (
        f"{_WHAT[name]}, trained by this project: {trained['parameters']:,} parameters, {shape['layers']} "
        f"layers of width "
        f"{shape['d_model']}, {shape['heads']} heads ({shape['kv_heads']} for keys and values), vocabulary "
        f"{shape['vocab']:,}. `model.safetensors` has {size / 1e6:.2f} MB: int8 rows with scales."
    )


def _training(trained: dict[str, Any]) -> str:
    rows = [
        (
            s["stage"],
            f"{s['steps']:,}",
            f"{s['tokens'] / 1e6:,.0f} M",
            s["train_seconds"],
            f"`{s['command']}`",
        )
        for s in trained["stages"]
    ]
    causal = trained["shape"]["layout"] == "qwen2"
    aim = (
        "Cross entropy of the next token of the response."
        if causal
        else "Cross entropy of hidden tokens with weight 1/t, t stratified in a batch; prompts stay visible
        but for 5 % of " "the samples."
    )
    before, after = trained["held"], trained["held_int8"]
    cost = ", ".join(f"{after[t] - before[t]:+.5f} at {t}" for t in before)
    versions = trained["versions"]
    return "\n\n".join(
        (
            f"{trained['date']}, on one {trained['device']}, torch {versions['torch']}, Python "
            f"{versions['python']}. {aim} Muon for the matrices, AdamW for the "
            f"rest, bfloat16 with float32 masters. {trained['note']}",
            _table(("stage", "steps", "tokens", "seconds of training", "command"), rows),
            f"Rounding to int8 changes the held-out loss by {cost} (nats a token). The loss curve is in "
            f"`benchmarks/results/training-{trained['recipe']}.json`.",
        )
    )


def _accuracy(trained: dict[str, Any], measured: dict[str, Any] | None) -> Iterable[str]:
    """Right answers in percent with 95 % Wilson intervals: the engine's runs first, then the trainer's
    own.""" tables = trained["tables"]
    if measured is not None:
        yield (
            f"New questions through the engine: {measured['date']}, {measured['device']}, "
            f"{measured['dtype']}, blocks of 32, "
            f"answers of {measured['length']} positions, no cache; `{measured['command']}`. "
            f"{measured['note']} Tokens a "
            "forward count the answer up to its first stop token."
        )
        runs = {_setting(run): run for run in measured["runs"]}
        rows = {label: run["families"] | {"all": run} for label, run in runs.items()}
        yield _families({label: rows[label] for label in ("threshold 0.9", "greedy") if label in rows})
        infill = measured["infill_on_cpu"]
        bare = infill["without_stop_token"]
        yield (
            f"Gaps in texts with canvases, afterwards on a CPU in {infill['dtype']} at threshold 0.9: "
            f"{infill['right']} of "
            f"{infill['n']} right, {infill['tokens_per_forward']} tokens a forward (`{infill['command']}`). "
            f"Without the stop token that follows such a text in training {bare['right']} of {bare['n']} "
            f"are right."
        )
        lower = [label for label in rows if label not in ("threshold 0.9", "greedy")]
        if lower:
            yield "At lower thresholds:"
            yield _families({label: rows[label] for label in lower})
        if measured["not_run"]:
            yield (
                f"{len(measured['not_run'])} of the {len(measured['not_run']) + len(runs)} planned runs "
                f"were not made: "
                "those of new templates"
                + ("." if lower else " and those at lower thresholds.")
                + " What follows is the trainer's own evaluation."
            )
    yield "The trainer's own evaluation (other counting: stop tokens included), over all families and on word problems:"
    yield _table(
        ("questions", "decoding", "n", "all", "word problems", "tokens a forward, all", "word problems"),
        [
            (
                {"test": "new", "heldout": "new templates"}[split], setting.replace("b32 0", "threshold
                0").replace("b32 ", ""), table["all"]["n"], _percent(table["all"]), _percent(table["gsm"]),
                table["all"]["tokens_per_forward"], table["gsm"]["tokens_per_forward"],
            )
            for (split, setting), table in ((key.split(" ", 1), table) for key, table in tables.items())
        ],
    )  # fmt: skip
    first = next(key for key in tables if key.startswith("heldout"))
    new = next(key for key in tables if key.startswith("test"))
    yield "By family, at the first of these settings:"
    yield _families({"new questions": tables[new], "new templates": tables[first]})


def _goals(measured: dict[str, Any]) -> str:
    """Each goal of the project for this model and whether it is met."""
    runs = {_setting(run): run for run in measured["runs"]}
    greedy, threshold = runs["greedy"], runs["threshold 0.9"]
    got = {"all": greedy["accuracy"], "gsm": greedy["families"]["gsm"]["accuracy"]}
    lines = []
    for key, label in (("all", "over all families"), ("gsm", "on word problems")):
        met = got[key] >= FLOORS[key]
        verdict = "met" if met else "missed" + (", the easier goal too" if got[key] < EASIER[key] else "")
        lines.append(
            f"{FLOORS[key]:g} % greedy {label} ({EASIER[key]:g} % at least): {got[key]} %, {verdict}"
        )
    tokens = threshold["families"]["gsm"]["tokens_per_forward"]
    low, high = PARALLEL
    verdict = "met" if low <= tokens <= high else "missed"
    lines.append(
        f"{low:g} to {high:g} tokens a forward on word problems at threshold 0.9: {tokens:.2f}, {verdict}"
    )
    return "\n".join(f"* {line}." for line in lines)


def _example(example: dict[str, Any]) -> str:
    verdict = "right" if example["right"] else "wrong"
    return f"The first {verdict} word problem of the trainer's examples:\n\n```text\n{example['prompt'].strip()}\n\n{example['answer']}\n```"


def _setting(run: dict[str, Any]) -> str:
    epsilon = run["request"].get("epsilon")
    return "greedy" if epsilon is None else f"threshold {epsilon}"


def _families(columns: dict[str, dict[str, Any]]) -> str:
    """A row for each family, and for each column its count, accuracy and tokens a forward."""
    header = ["family"]
    for label in columns:
        header += ["n", f"right, {label}", "tokens a forward"]
    rows = []
    for family in (*FAMILIES, "all"):
        row: list[object] = [_LABELS[family]]
        for table in columns.values():
            entry = table[family]
            tokens = entry.get("tokens_per_forward")
            row += [entry["n"], _percent(entry), "-" if tokens is None else f"{tokens:.2f}"]
        rows.append(row)
    return _table(header, rows)


def _percent(entry: dict[str, Any]) -> str:
    low, high = entry["interval"]
    return f"{entry['accuracy']} ({low}-{high})"


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
