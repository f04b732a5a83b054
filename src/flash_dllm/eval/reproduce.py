"""The paper's tables and figures on any model and device, its numbers beside the measured ones."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flash_dllm.errors import FlashDLLMError
from flash_dllm.eval import published
from flash_dllm.eval.errors import EvalError
from flash_dllm.eval.plans import PLANS, Cell, Plan

if TYPE_CHECKING:
    from flash_dllm.eval.sources import Source
    from flash_dllm.llm import LLM

ANALYSED = 12
"""Problems of the analyses of Figure 1, unless a limit says otherwise."""
COUNTING = (
    "answer tokens up to, without, the first stop token; prompt tokens never count; every forward pass counts; wall "
    "time includes tokenising (random prompts have no text) and excludes loading the model and warming up"
)


@dataclass(frozen=True)
class Facts:
    """What a report says about the run: model, device, and what else numbers depend on."""

    model: str
    device_name: str
    more: dict[str, Any]


def plan_of(name: str, only: str | None = None) -> Plan:
    """A plan by name, cut down to the cells whose row or column holds ``only``.

    Raises:
        EvalError: no such plan, or nothing is left of it.
    """
    if name not in PLANS:
        raise EvalError(f"{name!r}: there are {', '.join(PLANS)}")
    plan = PLANS[name]()
    if only is None:
        return plan
    cells = tuple(cell for cell in plan.cells if only.casefold() in cell.name.casefold())
    if not cells:
        raise EvalError(f"only={only!r}: no cell of {name} is called so; the first is {plan.cells[0].name!r}"
                        if plan.cells else f"only={only!r}: {name} has no cells")  # fmt: skip
    return Plan(plan.name, plan.title, cells, plan.notes, plan.analyses)


def run_plan(
    plan: Plan,
    source: Source,
    facts: Facts,
    folder: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
    seconds: float = math.inf,
) -> dict[str, Any]:
    """Measure every cell that can be measured.

    Args:
        plan: what to measure.
        source: measures a cell.
        facts: about the model and the device.
        folder: where finished cells are kept, so that an interrupted run goes on; None keeps nothing.
        tell: called with a line as each cell is done.
        seconds: no cell is begun after so many of them.

    Returns:
        The report: a dict for JSON. Cells that could not be measured say why.
    """
    kept = _Kept(folder, source.label, facts)
    began, cells = time.monotonic(), []
    for index, cell in enumerate(plan.cells, 1):
        late = time.monotonic() - began >= seconds
        result = kept.get(cell) or _measured(cell, None if late else source)
        kept.put(cell, result)
        cells.append(result)
        said = result["reason"] or _short(result["measured"])
        tell(f"{index} of {len(plan.cells)}: {cell.name}: {said}")
    _add_speedups(cells)
    return {
        "kind": "reproduction", "plan": plan.name, "title": plan.title, "source": published.SOURCE,
        "published_on": {"model": published.MODEL, "device": published.DEVICE},
        "model": facts.model, "device_name": facts.device_name, **facts.more, "counting": COUNTING,
        "measured_on": source.label,
        "differs": differences(facts, source.label), "notes": list(plan.notes), "cells": cells, "analyses": {},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def _measured(cell: Cell, source: Source | None) -> dict[str, Any]:
    """A cell's result; without a source there was no time left for it."""
    measured, reason = None, None if source else "not run: no time was left for it"
    try:
        measured = source.measure(cell) if source else None
    except FlashDLLMError as error:
        reason = f"not run: {error}"
    except Exception as error:
        # One cell that does not fit in memory is a result; the others still run.
        if type(error).__name__ != "OutOfMemoryError" and not isinstance(error, MemoryError):
            raise
        reason = "out of memory"
    differs = [] if measured is None else _cell_differences(cell, measured)
    numbers = {k: v for k, v in asdict(cell.published).items() if v is not None}
    described = {k: v for k, v in asdict(cell).items() if k not in ("published", "commits", "accepts")}
    return {**described, "published": numbers, "measured": measured, "reason": reason, "differs": differs}


def _cell_differences(cell: Cell, measured: dict[str, Any]) -> list[str]:
    found = []
    if measured["slots"] != cell.batch:
        found.append(f"{measured['slots']} slots, not {cell.batch}")
    if "bundled" in measured["task"] or measured["task"] == "random prompts":
        found.append(measured["task"])
    elif measured["task"] == "minerva_math500" and cell.task == "math":
        found.append("MATH-500, not all of MATH")
    if cell.note:
        found.append(cell.note)
    return found


def differences(facts: Facts, label: str) -> list[str]:
    """In which ways the whole run differs from the paper's."""
    found = []
    if "llada-1.5" not in facts.model.casefold():
        found.append(f"model: {facts.model}, published {published.MODEL}")
    if "a100" not in facts.device_name.casefold():
        found.append(f"device: {facts.device_name}, published {published.DEVICE}")
    if label.startswith(("stand-in", "synthetic")):
        found.append(label)
    if "longest" in facts.more:
        found.append(f"answers of up to {facts.more['longest']} tokens, in canvases of the published length")
    found.append(
        "counting: ours ends before the first stop token and counts passes; the paper counts every decoded position "
        "and a verify step's two passes as one"
    )
    found.append(
        "every method here ends an answer at its stop token; some of the baselines' own code does not"
    )
    return found


def _add_speedups(cells: Sequence[dict[str, Any]]) -> None:
    """Over greedy decoding without a cache, where that stands in the same row."""
    base = {c["row"]: c["measured"]["tokens_per_second"] for c in cells
            if c["column"] == published.METHODS[0] and c["measured"]}  # fmt: skip
    for cell in cells:
        if cell["measured"] and base.get(cell["row"]) and cell["measured"]["tokens_per_second"]:
            cell["measured"]["speedup"] = round(cell["measured"]["tokens_per_second"] / base[cell["row"]], 2)


def _short(measured: dict[str, Any]) -> str:
    right = f"{measured['accuracy']['accuracy']} % right, " if measured["accuracy"] else ""
    return f"{right}{measured['tokens_per_second']} tokens/s, {measured['tokens_per_step']} tokens a step"


class _Kept:
    """Finished cells in a file, by what they depend on."""

    def __init__(self, folder: Path | None, label: str, facts: Facts) -> None:
        self.path = None if folder is None else folder / "cells.jsonl"
        self.about = [label, facts.model, facts.device_name, facts.more]
        self.known: dict[str, dict[str, Any]] = {}
        if self.path is not None and self.path.exists():
            self.known = dict(self._lines(self.path))

    @staticmethod
    def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
                yield entry["key"], entry["cell"]
            except (ValueError, KeyError, TypeError):
                # An interruption may have cut the last line; that cell runs again.
                continue

    def key(self, cell: Cell) -> str:
        text = json.dumps([self.about, asdict(cell)], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def get(self, cell: Cell) -> dict[str, Any] | None:
        return self.known.get(self.key(cell))

    def put(self, cell: Cell, result: dict[str, Any]) -> None:
        """Keep what was measured; what could not be is tried again."""
        key = self.key(cell)
        if self.path is None or key in self.known or result["measured"] is None:
            return
        self.known[key] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "cell": result}, ensure_ascii=False) + "\n")


def analyse(names: Sequence[str], llm: LLM, jobs: Sequence[Any]) -> dict[str, Any]:
    """The analyses of Figure 1 on decodings of ``jobs``.

    Args:
        names: of ``concentration``, ``early``.
        llm: decodes with the method whose candidates are looked at.
        jobs: what to decode.
    """
    from flash_dllm.eval.recorded import concentration, early, record

    if not names:
        return {}
    recordings = [record(llm, job) for job in jobs]
    made: dict[str, Any] = {"method": llm.method.name, "problems": len(jobs)}
    if "concentration" in names:
        made["concentration"] = concentration(llm.loaded.model, recordings, llm.mask_id)
    if "early" in names:
        made["early"] = early(recordings, llm.mask_id)
    return made


def write(report: dict[str, Any], folder: Path) -> None:
    """``PLAN.json`` and ``PLAN.md`` in ``folder``."""
    from flash_dllm.eval.pages import page

    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, ensure_ascii=False, indent=2, default=str)
    (folder / f"{report['plan']}.json").write_text(text + "\n", encoding="utf-8")
    (folder / f"{report['plan']}.md").write_text(page(report), encoding="utf-8")
