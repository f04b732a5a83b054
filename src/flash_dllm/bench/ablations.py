"""Runs ablation plans: units of (setting, problems, set), shared between plans, over processes and restarts.

A unit is one setting on one of the disjoint problem sets. Each process appends its finished units to a file of its own
in a folder; a unit that any file of the folder holds is not run again. :func:`collect` reads the folder and makes the
tables: accuracy by set and pooled with 95 % intervals, tokens a forward pass, rows a token, and the paired difference
to the plan's baseline on the same problems.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flash_dllm.bench.measure import circumstances, run_jobs, warm_up
from flash_dllm.bench.plans import Case, Plan, PlanError
from flash_dllm.bench.stats import paired, rate, ratio
from flash_dllm.bench.tiny import job_of
from flash_dllm.llm import LLM
from flash_dllm.params import SamplingParams
from flash_dllm.train.tasks import FAMILIES, Sample, check, make

LENGTH = 192
"""Answer tokens at most."""
POSITIONS = {"gsm-2shot": 1024}
"""Longest canvas by kind of problems; 384 where nothing else is said."""
SAME = ("model", "device_name", "dtype", "slots", "versions", "problems_a_set")
"""What units have to agree in before they stand in one table."""


@dataclass(frozen=True)
class Unit:
    """One setting on one set of one kind of problems."""

    case: Case
    problems: str
    index: int

    @property
    def key(self) -> str:
        return f"{self.case.key(self.problems)}#{self.index}"


def units(plans: Sequence[Plan], sets: int) -> list[Unit]:
    """Every unit that the plans need, once; all settings of the first set come before the second."""
    found: dict[str, Unit] = {}
    for index in range(sets):
        for plan in plans:
            for kind in plan.problems:
                for case in plan.cases:
                    unit = Unit(case, kind, index)
                    found.setdefault(unit.key, unit)
    return list(found.values())


def problem_set(kind: str, count: int, index: int) -> list[Sample]:
    """The ``index``-th of the disjoint sets of ``count`` problems of the test split.

    Sets are cut from one list in which no question occurs twice. ``kind`` is a family; ``gsm-2shot``: word problems
    behind two worked examples; or ``mixed``: 30 % word problems, the other families in equal parts.

    Raises:
        PlanError: no such kind, or the family has too few different questions.
    """
    if kind == "mixed":
        others = [name for name in FAMILIES if name != "gsm"]
        each = max(1, round(0.7 * count / len(others)))
        parts = [("gsm", max(1, count - each * len(others))), *((name, each) for name in others)]
        return [sample for name, number in parts for sample in problem_set(name, number, index)]
    family, _, shots = kind.partition("-")
    if family not in FAMILIES or shots not in ("", "2shot"):
        raise PlanError(
            f"problems {kind!r} are not known; there are {', '.join(FAMILIES)}, gsm-2shot and mixed"
        )
    seen: set[str] = set()
    found: list[Sample] = []
    for seed in range(20 * count * (index + 1)):
        sample = make(family, seed, "test", shots=2 if shots else 0)
        text = sample.prompt_text + (sample.answer_text if sample.gaps else "")
        if text not in seen:
            seen.add(text)
            found.append(sample)
        if len(found) == count * (index + 1):
            return found[-count:]
    raise PlanError(f"{kind}: only {len(found)} different questions; {count * (index + 1)} are needed")


def run_unit(llm: LLM, unit: Unit, count: int) -> dict[str, Any]:
    """Decode a unit's problems; what each problem gave, so that settings can be compared pairwise."""
    cache, decoding = unit.case.method.split("+")
    engine = llm.with_method(cache, decoding, **unit.case.options)
    warm_up(engine)
    samples = problem_set(unit.problems, count, unit.index)
    params = SamplingParams.model_validate({"max_tokens": LENGTH, **unit.case.request})
    # A text with gaps has few tokens to decode, and a schedule no more steps than tokens: there one a step.
    gaps = params.model_copy(update={"steps": None})
    done = run_jobs(engine, [job_of(engine, s, gaps if s.gaps else params) for s in samples])
    answers = [output.outputs[0] for output in done.outputs]
    right = [check(s, o.text) for s, o in zip(samples, done.outputs, strict=True)]
    return {
        "set": unit.index, "problems": unit.problems, "method": unit.case.method,
        "options": unit.case.options, "request": unit.case.request, **circumstances(engine),
        "problems_a_set": len(samples), "verdicts": "".join("01"[r] for r in right),
        "tokens": [len(a.token_ids) for a in answers], "nfe": [a.nfe for a in answers],
        "rows": [a.rows for a in answers], "steps": [a.steps for a in answers],
        "failed": sum(a.error is not None for a in answers), "seconds": round(done.seconds, 2),
    }  # fmt: skip


def done_units(folder: Path) -> dict[str, dict[str, Any]]:
    """Finished units by key. A last line that a crash cut off is left out.

    Raises:
        PlanError: a broken line elsewhere.
    """
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("units-*.jsonl")):
        lines = file.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines):
            if not line:
                continue
            try:
                unit = json.loads(line)
            except ValueError as error:
                if number == len(lines) - 1:
                    break
                raise PlanError(f"{file}: line {number + 1} is not JSON ({error})") from error
            case = Case("", unit["method"], unit["options"], unit["request"])
            found.setdefault(Unit(case, unit["problems"], unit["set"]).key, unit)
    return found


@dataclass(frozen=True)
class Share:
    """Which part of the units a process runs: every ``count``-th from the ``index``-th."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Share:
        """``"0/4"``.

        Raises:
            PlanError: anything else, or an index outside the count.
        """
        first, slash, second = text.partition("/")
        if not (slash and first.isdigit() and second.isdigit() and int(first) < int(second)):
            raise PlanError(f"shard {text!r}: write I/N with 0 <= I < N, as 0/4")
        return cls(int(first), int(second))


def run(
    llm: LLM, plans: Sequence[Plan], folder: Path, *, sets: int, count: int, share: Share, seconds: float
) -> Iterator[tuple[Unit, dict[str, Any] | None]]:
    """Run this process's units that nobody has finished; gives each as it is done, None for one left out for time.

    A unit that raises gives ``{"failed_with": ...}``; it is not kept, so that the next call tries it again.

    Args:
        llm: weights and sizes; every unit builds its method on them.
        folder: where units are kept.
        sets, count: disjoint sets, and problems in each.
        share: this process's part.
        seconds: start no unit after so long.
    """
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"units-{share.index}-of-{share.count}.jsonl"
    _mend(path)
    for unit in units(plans, sets)[share.index :: share.count]:
        if unit.key in done_units(folder):
            continue
        if time.monotonic() - began > seconds:
            yield unit, None
            continue
        try:
            result = run_unit(llm, unit, count)
        except Exception as error:  # a unit that fails must not keep the others from running
            yield unit, {"failed_with": f"{type(error).__name__}: {error}"}
            continue
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        yield unit, result


def _mend(path: Path) -> None:
    """Cut a last line that a crash left without its end, so that the next unit does not join it."""
    if path.exists():
        text = path.read_text(encoding="utf-8")
        if text and not text.endswith("\n"):
            path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")


def collect(plans: Sequence[Plan], folder: Path, sets: int) -> dict[str, Any]:
    """The tables of the plans from the units in ``folder``.

    Raises:
        PlanError: nothing is there, or the units were not measured under the same circumstances.
    """
    found = done_units(folder)
    wanted = units(plans, sets)
    mine = [found[unit.key] for unit in wanted if unit.key in found]
    if not mine:
        raise PlanError(f"{folder}: no finished unit of these plans")
    facts = {name: mine[0][name] for name in SAME}
    for unit in mine:
        for name in SAME:
            if unit[name] != facts[name]:
                raise PlanError(
                    f"{folder}: units with {name} = {facts[name]!r} and {unit[name]!r} do not compare"
                )
    return {
        **facts, "device": mine[0]["device"], "counting": mine[0]["counting"], "sets": sets, "length": LENGTH,
        "seconds": round(sum(u["seconds"] for u in mine), 1), "units": len(mine),
        "missing": len(wanted) - len(mine),
        "plans": [
            {
                "name": plan.name, "question": plan.question, "problems": list(plan.problems),
                "rows": _rows(plan, found, sets),
            }
            for plan in plans
        ],
    }  # fmt: skip


def _rows(plan: Plan, found: dict[str, dict[str, Any]], sets: int) -> list[dict[str, Any]]:
    rows = []
    for kind in plan.problems:
        base = _parts(plan.baseline, kind, found, sets)
        for case in plan.cases:
            parts = _parts(case, kind, found, sets)
            if parts:
                rows.append({"problems": kind, "label": case.label, **_row(case, parts, base)})
    return rows


def _parts(case: Case, kind: str, found: dict[str, dict[str, Any]], sets: int) -> dict[int, dict[str, Any]]:
    """A setting's finished units by set."""
    keys = {index: Unit(case, kind, index).key for index in range(sets)}
    return {index: found[key] for index, key in keys.items() if key in found}


def _row(case: Case, parts: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]) -> dict[str, Any]:
    def joined(name: str) -> list[int]:
        return [value for part in parts.values() for value in part[name]]

    def verdicts(units: dict[int, dict[str, Any]], which: Sequence[int]) -> list[bool]:
        return [v == "1" for index in which for v in units[index]["verdicts"]]

    both = [index for index in parts if index in base]
    tokens = joined("tokens")
    return {
        "method": case.method, "options": case.options, "request": case.request,
        **rate(verdicts(parts, list(parts))),
        "sets": [{"set": i, **rate(verdicts(parts, [i]))} for i in parts],
        "tokens_per_forward": ratio(tokens, joined("nfe")), "tokens_per_step": ratio(tokens, joined("steps")),
        "rows_per_token": ratio(joined("rows"), tokens),
        "against_baseline": paired(verdicts(parts, both), verdicts(base, both)) if both else None,
        "failed": sum(part["failed"] for part in parts.values()),
        "verdicts": ["".join("01"[v] for v in verdicts(parts, [i])) for i in parts],
    }  # fmt: skip
