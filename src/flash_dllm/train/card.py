"""The bundled models' cards, made from the committed measurements, so that no result is copied by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flash_dllm.train.card_text import ALL_LIMITS, DATA, GOALS, LABELS, LIMITS, PARALLEL, WHAT
from flash_dllm.train.tasks import FAMILIES

MAIN_SETTINGS = ("threshold 0.9", "greedy")
QUESTIONS = {"mixed": "new questions", "heldout": "new templates"}
"""What benchmarks/decoders.py calls its problems, and what the cards do."""


def card(name: str, results: Path, folder: Path) -> str:
    """The README of a bundled model.

    `results` has the committed JSON: `training-NAME.json` (benchmarks/collect_training.py) and, for all but
    the guide, `card-NAME.json` (benchmarks/decoders.py). `folder` is the model's own.

    Raises:
        ValueError: a run of `card-NAME.json` failed.
    """
    trained = _read(results / f"training-{name}.json")
    path = results / f"card-{name}.json"
    measured = _read(path) if path.exists() else None
    sections = [
        "---\nlicense: apache-2.0\nlanguage: en\n---",
        f"# flash-dllm/{name}",
        _introduction(name, trained, folder),
        "## Data",
        DATA,
        "## Training",
        *_training(trained),
        "## Accuracy",
        "Right answers in percent, with 95 % Wilson intervals.",
    ]
    if measured is not None:
        sections += [*_engine(measured), *_not_run(measured, trained), "### Goals", _goals(measured)]
    sections += [*_own_evaluation(trained), "## Examples", *map(_example, trained["examples"])]
    limits = (*LIMITS[name], *_unseen(measured, trained), *ALL_LIMITS)
    sections += ["## Limits", "\n".join(f"* {text}" for text in limits)]
    sections += ["## Licence", "Apache-2.0, weights and task generator alike."]
    return "\n\n".join(sections) + "\n"


def write_cards(results: Path, weights: Path) -> None:
    """Writes the README of every bundled model."""
    for name in WHAT:
        (weights / name / "README.md").write_text(card(name, results, weights / name), encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _introduction(name: str, trained: dict[str, Any], folder: Path) -> str:
    shape = trained["shape"]
    size = (folder / "model.safetensors").stat().st_size
    return (
        f"{WHAT[name]}, trained by this project: {trained['parameters']:,} parameters, "
        f"{shape['layers']} layers of width {shape['d_model']}, {shape['heads']} heads "
        f"({shape['kv_heads']} for keys and values), vocabulary {shape['vocab']:,}. "
        f"`model.safetensors` has {size / 1e6:.2f} MB: int8 rows with scales."
    )


def _training(trained: dict[str, Any]) -> Iterator[str]:
    versions = trained["versions"]
    if trained["shape"]["layout"] == "qwen2":
        aim = "Cross entropy of the next token of the response."
    else:
        aim = (
            "Cross entropy of hidden tokens with weight 1/t, t stratified in a batch; the prompt stays "
            "visible in 95 % of the samples."
        )
    yield (
        f"{trained['date']}, on one {trained['device']}, torch {versions['torch']}, Python "
        f"{versions['python']}. {aim} Muon for the matrices, AdamW for the rest, bfloat16 with float32 "
        f"masters. {trained['note']}"
    )
    rows = []
    for stage in trained["stages"]:
        tokens = f"{stage['tokens'] / 1e6:,.0f} M"
        command = f"`{stage['command']}`"
        rows.append((stage["stage"], f"{stage['steps']:,}", tokens, stage["train_seconds"], command))
    yield _table(("stage", "steps", "tokens", "seconds of training", "command"), rows)
    before, after = trained["held"], trained["held_int8"]
    cost = ", ".join(f"{after[t] - before[t]:+.5f} at {t}" for t in before)
    yield (
        f"Rounding to int8 changes the loss on questions not trained on by {cost} (nats a token). The loss "
        f"curve is in `benchmarks/results/training-{trained['recipe']}.json`."
    )


def _engine(measured: dict[str, Any]) -> Iterator[str]:
    """The runs through the engine: new questions, then new templates."""
    note = f"{measured['note']} " if measured.get("note") else ""
    yield (
        f"Through the engine on new questions: {measured['date']}, {measured['device_name']}, "
        f"{measured['dtype']}, blocks of 32, answers of {measured['length']} positions, no cache "
        f"(`{measured['command']}`). {note}Tokens a forward count the answer up to its first stop token, "
        "without it."
    )
    for problems, words in QUESTIONS.items():
        tables = {label: run["families"] | {"all": run} for label, run in _runs(measured, problems).items()}
        main = {label: table for label, table in tables.items() if label in MAIN_SETTINGS}
        lower = {label: table for label, table in tables.items() if label not in MAIN_SETTINGS}
        if main:
            if problems != "mixed":
                yield f"On {words}, in the same way:"
            yield _families(main)
        if lower:
            yield "At lower thresholds:" if problems == "mixed" else f"On {words} at lower thresholds:"
            yield _families(lower)


def _not_run(measured: dict[str, Any], trained: dict[str, Any]) -> Iterator[str]:
    """Which runs are missing."""
    missing = [(QUESTIONS[problems], _label(request)) for problems, _, _, _, request in measured["not_run"]]
    if missing:
        named = "; ".join(f"{kind}, {setting}" for kind, setting in missing)
        own = {_readable(key) for key in trained["tables"]}
        only = " For these there is only the trainer's own evaluation below." if own >= set(missing) else ""
        yield f"Planned, but not run for lack of time: {named}.{only}"


def _runs(measured: dict[str, Any], problems: str) -> dict[str, dict[str, Any]]:
    """The runs of these problems by their settings, high thresholds first and greedy after the highest."""
    runs = [run for run in measured["runs"] if run.get("problems", problems) == problems]
    for run in runs:
        if "failed_with" in run:
            raise ValueError(
                f"{measured['model']}, {_label(run['request'])}: failed with {run['failed_with']}"
            )
    by_label = {_label(run["request"]): run for run in runs}
    first = [label for label in MAIN_SETTINGS if label in by_label]
    return {label: by_label[label] for label in [*first, *sorted(by_label.keys() - first, reverse=True)]}


def _goals(measured: dict[str, Any]) -> str:
    """Each goal of the project for this model and whether it is met."""
    runs = _runs(measured, "mixed")
    greedy, threshold = runs["greedy"], runs["threshold 0.9"]
    lines = []
    for family, (goal, least) in GOALS.items():
        got = (greedy if family == "all" else greedy["families"][family])["accuracy"]
        verdict = "met" if got >= goal else "missed, but the least is reached" if got >= least else "missed"
        lines.append(f"{LABELS[family]}, greedy: {goal:g} % ({least:g} % at least): {got} %, **{verdict}**")
    tokens = threshold["families"]["gsm"]["tokens_per_forward"]
    low, high = PARALLEL
    verdict = "met" if low <= tokens <= high else "missed"
    lines.append(
        f"{LABELS['gsm']}, threshold 0.9: {low:g} to {high:g} tokens a forward: {tokens:.2f}, **{verdict}**"
    )
    return "\n".join(f"* {line}." for line in lines)


def _own_evaluation(trained: dict[str, Any]) -> Iterator[str]:
    """The tables that the trainer made at its end."""
    yield "### The trainer's own evaluation"
    yield "Here tokens a forward count the stop token too."
    rows = []
    for key, table in trained["tables"].items():
        kind, setting = _readable(key)
        every, problems = table["all"], table["gsm"]
        tokens = every["tokens_per_forward"], problems["tokens_per_forward"]
        rows.append((kind, setting, every["n"], _percent(every), _percent(problems), *tokens))
    tokens_a_forward = "tokens a forward, all", "tokens a forward, word problems"
    yield _table(("questions", "decoding", "n", "all", "word problems", *tokens_a_forward), rows)
    firsts = {_readable(key)[0]: key for key in reversed(trained["tables"])}
    settings = {_readable(key)[1] for key in firsts.values()}
    yield f"By family, {', '.join(sorted(settings))}:"
    yield _families({kind: trained["tables"][key] for kind, key in reversed(firsts.items())})


def _unseen(measured: dict[str, Any] | None, trained: dict[str, Any]) -> Iterator[str]:
    """How it does on new templates: through the engine, else by the trainer, else nothing."""
    own = {_readable(key): table["all"] for key, table in trained["tables"].items()}
    found = {setting: entry for (kind, setting), entry in own.items() if kind == QUESTIONS["heldout"]}
    if measured is not None:
        found = _runs(measured, "heldout") or found
    for setting, entry in [*found.items()][:1]:
        yield f"On templates that it has not seen {entry['accuracy']} % of its answers are right ({setting})."


def _readable(key: str) -> tuple[str, str]:
    """`heldout b32 0.9` as ("new templates", "threshold 0.9")."""
    split, setting = key.split(" ", 1)
    setting = setting.removeprefix("b32 ")
    kind = QUESTIONS["mixed" if split == "test" else split]
    return kind, f"threshold {setting}" if setting.startswith("0.") else setting


def _example(example: dict[str, Any]) -> str:
    verdict = "right" if example["right"] else "wrong"
    text = f"{example['prompt'].strip()}\n\n{example['answer']}"
    return f"The first {verdict} word problem among the trainer's examples:\n\n```text\n{text}\n```"


def _label(request: dict[str, Any]) -> str:
    epsilon = request.get("epsilon")
    return "greedy" if epsilon is None else f"threshold {epsilon}"


def _families(columns: dict[str, dict[str, Any]]) -> str:
    """A row for each family, and for each column its count, accuracy and tokens a forward."""
    header = ["family"]
    for label in columns:
        header += ["n", f"right, {label}", "tokens a forward"]
    rows = []
    for family in (*FAMILIES, "all"):
        row: list[object] = [LABELS[family]]
        for table in columns.values():
            entry = table[family]
            tokens = entry.get("tokens_per_forward")
            row += [entry["n"], _percent(entry), "-" if tokens is None else f"{tokens:.2f}"]
        rows.append(row)
    return _table(header, rows)


def _percent(entry: dict[str, Any]) -> str:
    low, high = entry["interval"]
    return f"{entry['accuracy']} ({low}-{high})"


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
