"""From answers and the harness's results to a report: JSON for programs, Markdown for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flash_dllm.bench.measure import accuracy, circumstances, peak_memory
from flash_dllm.eval.answers import COUNTING, Answerer
from flash_dllm.eval.journal import Answer, wall_seconds
from flash_dllm.eval.sandbox import ISOLATION, isolation
from flash_dllm.eval.scoring import score_gsm8k, score_humaneval_extracted, score_math
from flash_dllm.eval.tasks import GROUPS, TASKS

if TYPE_CHECKING:
    from flash_dllm.eval.run import Settings

PACKAGES = ("lm_eval", "math-verify", "datasets", "transformers", "sympy", "antlr4-python3-runtime")
PUBLISHED = {
    "gsm8k": "flexible-extract",
    "minerva_math": "math_verify_0.4.8",
    "humaneval": "pass@1 extracted",
    "mbpp": "pass@1",
}
"""The score that the papers report; the beginning of a task's name is enough."""


def build(
    answerer: Answerer, settings: Settings, results: Mapping[str, dict[str, Any]], load_seconds: float
) -> dict[str, Any]:
    """The report of finished tasks.

    Args:
        answerer: with the answers.
        settings: of the run.
        results: what the harness gave, by task.
        load_seconds: time that loading the model took.
    """
    llm = answerer.llm
    facts = circumstances(llm)
    facts["versions"].update({name: _version(name) for name in PACKAGES})
    tasks = {name: _task(answerer, name, result) for name, result in results.items()}
    runs_code = any(TASKS[name].code for name in tasks if name in TASKS)
    return {
        "kind": "evaluation",
        **facts,
        "counting": COUNTING,
        "method": llm.method.name,
        "schedule": llm.method.schedule.name,
        "engine": llm.args.model_dump(mode="json", exclude_defaults=True),
        "max_model_len": llm.max_model_len,
        "policy": answerer.policy.settings(),
        "limit": settings.limit,
        "prompts": settings.prompt_settings(),
        "mc_num": settings.mc_num,
        "sandbox": ISOLATION[isolation()] if runs_code else None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_seconds": round(load_seconds, 2),
        "peak_memory": peak_memory(llm.loaded.model.device),
        "tasks": tasks,
        "groups": {name: _group(name, tasks) for name in GROUPS if set(GROUPS[name]) <= set(tasks)},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _task(answerer: Answerer, name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    scores = {key: value for key, value in result["results"][name].items()
              if isinstance(value, int | float) and not isinstance(value, bool) and key != "sample_len"}  # fmt: skip
    answers = [a for a in answerer.answers if a.task == name]
    samples = result["samples"].get(name, [])
    verdicts = rescore(name, samples, answers)
    return {
        "problems": len({sample["doc_id"] for sample in samples}),
        "of": result.get("n-samples", {}).get(name, {}).get("original"),
        "version": result["versions"].get(name),
        "num_fewshot": result["n-shot"].get(name),
        "harness": scores,
        "rules": {rule: accuracy(list(by_doc.values())) for rule, by_doc in verdicts.items()},
        "published_rule": next((r for n, r in PUBLISHED.items() if name.startswith(n)), None),
        "disagreements": _disagreements(samples, verdicts),
        "counters": counters(answers),
    }


def counters(answers: Sequence[Answer]) -> dict[str, Any]:
    """What some answers cost together."""
    seconds = wall_seconds(answers)
    tokens, kept = sum(a.answer_tokens for a in answers), sum(a.kept_tokens for a in answers)
    nfe, steps = sum(a.nfe for a in answers), sum(a.steps for a in answers)
    latency = sorted(a.seconds for a in answers)
    return {
        "answers": len(answers), "failed": sum(a.error is not None for a in answers),
        "empty": sum(not a.text.strip() for a in answers),
        "processes": len({a.run for a in answers}), "seconds": round(seconds, 3),
        "prompt_tokens": sum(a.prompt_tokens for a in answers),
        "truncated_prompts": sum(a.cut_tokens > 0 for a in answers),
        "answer_tokens": tokens, "kept_tokens": kept, "nfe": nfe, "steps": steps, "rows": sum(a.rows for a in answers),
        "tokens_per_second": round(tokens / seconds, 2) if seconds else None,
        "kept_tokens_per_second": round(kept / seconds, 2) if seconds else None,
        "tokens_per_forward": round(tokens / nfe, 3) if nfe else None,
        "tokens_per_step": round(tokens / steps, 3) if steps else None,
        "seconds_an_answer": {"p50": _quantile(latency, 0.5), "p99": _quantile(latency, 0.99)},
        "ended": {reason: sum(a.finish_reason == reason for a in answers) for reason in ("stop", "length", "error")},
    }  # fmt: skip


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) if ordered else None


def rescore(
    name: str, samples: Sequence[Mapping[str, Any]], answers: Sequence[Answer]
) -> dict[str, dict[int, bool]]:
    """Verdicts of our own scorers, by rule and problem; none for a task that they do not know.

    What code does is only run again where the harness has no such score (HumanEval after extraction).
    """
    full = {a.doc: a.full_text for a in answers}
    verdicts: dict[str, dict[int, bool]] = {}
    for doc_id, sample in {s["doc_id"]: s for s in samples}.items():
        doc, text = sample["doc"], sample["resps"][0][0]
        if name == "gsm8k":
            found = score_gsm8k(text, doc["answer"])
        elif name.startswith("minerva_math"):
            found = score_math(text, doc["solution"])
        elif name == "humaneval":
            found = {"pass@1 extracted": score_humaneval_extracted(full.get(doc_id, text), doc)}
        else:
            found = {}
        for rule, right in found.items():
            verdicts.setdefault(rule, {})[doc_id] = right
    for sample in samples if name in ("humaneval", "mbpp") else ():
        value = next(
            (v for k, v in sample.items() if k.startswith("pass") and isinstance(v, int | float)), None
        )
        if value is not None:
            verdicts.setdefault("pass@1", {})[sample["doc_id"]] = bool(value)
    return verdicts


def _disagreements(
    samples: Sequence[Mapping[str, Any]], verdicts: Mapping[str, Mapping[int, bool]]
) -> list[dict[str, Any]]:
    """Problems that our scorers and the harness's judge differently, where both apply the same rule."""
    found = []
    for sample in samples:
        for rule, metric in ((sample["filter"], "exact_match"), ("math_verify", "math_verify")):
            if rule in verdicts and metric in sample:
                ours, theirs = verdicts[rule][sample["doc_id"]], bool(sample[metric])
                if ours != theirs:
                    found.append({"doc": sample["doc_id"], "rule": rule, "ours": ours, "harness": theirs})
    return found


def _group(name: str, tasks: Mapping[str, Any]) -> dict[str, Any]:
    """The mean over all problems of a group's tasks."""
    mine = [tasks[task] for task in GROUPS[name]]
    rules = {}
    for rule in mine[0]["rules"]:
        right, n = sum(t["rules"][rule]["right"] for t in mine), sum(t["rules"][rule]["n"] for t in mine)
        rules[rule] = accuracy([True] * right + [False] * (n - right))
    return {"problems": sum(t["problems"] for t in mine), "rules": rules}


def write(report: Mapping[str, Any], results: Mapping[str, Any], folder: Path) -> None:
    """``report.json``, ``report.md``, and for each of ``results`` its samples."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, ensure_ascii=False, indent=2, default=str)
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")
    (folder / "report.md").write_text(markdown(report), encoding="utf-8")
    for name, result in results.items():
        lines = (
            json.dumps(s, ensure_ascii=False, default=str) + "\n" for s in result["samples"].get(name, [])
        )
        (folder / f"samples_{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def markdown(report: Mapping[str, Any]) -> str:
    """The report as a page."""
    lines = [f"# {report['model']}, {report['method']}", "", headline(report), ""]
    lines += [f"Counting: {report['counting']}.", "", *_scores(report), "", *_costs(report)]
    notes = remarks(report)
    lines += ["", *(f"- {note}" for note in notes)] if notes else []
    lines += ["", "Harness scores:", ""]
    for name, task in report["tasks"].items():
        scores = [f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in task["harness"].items()]
        lines.append(f"- {name} (version {task['version']}): {', '.join(scores)}")
    settings = {k: v for k, v in report.items() if k not in ("tasks", "groups", "counting", "kind")}
    text = json.dumps(settings, ensure_ascii=False, indent=2, default=str)
    return "\n".join([*lines, "", "Settings:", "", "```json", text, "```", ""])


def _scores(report: Mapping[str, Any]) -> list[str]:
    """Right answers by task and rule."""
    lines = [
        "| task | shots | problems | rule | right % | 95 % interval |",
        "| --- | ---: | ---: | --- | ---: | --- |",
    ]
    for name, task in [*report["tasks"].items(), *report["groups"].items()]:
        for rule, rate in task["rules"].items():
            mark = " (the papers' rule)" if rule == task.get("published_rule") else ""
            low, high = rate["interval"]
            shots = task.get("num_fewshot", "")
            lines.append(
                f"| {name} | {shots} | {rate['n']} | {rule}{mark} | {rate['accuracy']} | {low}–{high} |"
            )
    return lines


def _costs(report: Mapping[str, Any]) -> list[str]:
    """Tokens, passes and time by task."""
    keys = (
        "answer_tokens", "kept_tokens", "nfe", "tokens_per_forward", "tokens_per_step", "seconds", "tokens_per_second",
        "kept_tokens_per_second",
    )  # fmt: skip
    titles = ("answer tokens", "kept", "passes", "tokens a pass", "a step", "seconds", "tokens/s", "kept/s")
    lines = [f"| task | {' | '.join(titles)} |", "| --- |" + " ---: |" * len(titles)]
    for name, task in report["tasks"].items():
        cells = ["" if task["counters"][key] is None else str(task["counters"][key]) for key in keys]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def headline(report: Mapping[str, Any]) -> str:
    """Model, device and size of a run in one line."""
    limit = (
        "all problems" if report["limit"] is None else f"the first {report['limit']} problems of each task"
    )
    return (
        f"{report['model']} in {report['dtype']} on {report['device_name']}, {report['slots']} slots, {limit}, "
        f"lm_eval {report['versions']['lm_eval']}"
    )


def remarks(report: Mapping[str, Any]) -> list[str]:
    """What a reader must know beside the numbers."""
    notes = []
    if report["prompts"]["answers"] != "model":
        notes.append(
            f"A check of the scoring: the answers are {report['prompts']['answers']}, not the model's."
        )
    if report["sandbox"]:
        notes.append(f"Code ran in a sandbox: {report['sandbox']}.")
    for name, task in report["tasks"].items():
        c = task["counters"]
        if c["truncated_prompts"]:
            notes.append(
                f"{name}: the beginning of {c['truncated_prompts']} prompts was cut off to fit the model."
            )
        if c["failed"]:
            notes.append(f"{name}: {c['failed']} answers failed and count as wrong.")
        if c["empty"]:
            notes.append(
                f"{name}: {c['empty']} answers are empty (a stop token or a stop string came first)."
            )
        if c["processes"] > 1:
            notes.append(
                f"{name}: {c['processes']} processes; seconds after the last answer of one are not counted."
            )
        if task["disagreements"]:
            notes.append(
                f"{name}: our scorer and the harness's differ on {len(task['disagreements'])} verdicts."
            )
        if any(rule.startswith("math_verify") for rule in task["rules"]):
            notes.append(
                f"{name}: compare with a paper only by the rule that it used (0.4.8 for the papers of 2025-26)."
            )
    return notes
