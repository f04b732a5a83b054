"""What each table and figure of the Flash-dLLM paper measures: methods, tasks, lengths, slots, thresholds.

A plan is data; :mod:`flash_dllm.eval.reproduce` runs it on any model and device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from flash_dllm.eval import published
from flash_dllm.eval.published import BLOCK, CANDIDATES, EPSILON, TABLE3, Figures

SHOTS = {"gsm8k": 5, "math": 4, "humaneval": 0, "mbpp": 3}
HARNESS_TASK = {"gsm8k": "gsm8k", "math": "minerva_math", "humaneval": "humaneval", "mbpp": "mbpp"}
TITLES = {"gsm8k": "GSM8K", "math": "MATH", "humaneval": "HumanEval", "mbpp": "MBPP"}


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        row, column: where it stands in the table.
        method: ``cache+decoding``, with ``options`` of their constructors and ``params`` of a request.
        task: ``gsm8k``, ``math``, ``humaneval`` or ``mbpp``.
        length: answer tokens; ``shots`` examples in the prompt; ``batch`` slots.
        published: the paper's numbers.
        commits, accepts: tokens a step by confidence and by verification in the paper, for runs on random weights.
        note: what is our reading rather than the paper's words.
    """

    row: str
    column: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    task: str = "gsm8k"
    length: int = 512
    shots: int = 5
    batch: int = 32
    published: Figures = field(default_factory=Figures)
    commits: float = 1.0
    accepts: float = 0.0
    note: str = ""

    @property
    def name(self) -> str:
        """``row / column``."""
        return f"{self.row} / {self.column}" if self.column else self.row


@dataclass(frozen=True)
class Plan:
    """A table or figure: its cells, and what is computed beside them (``analyses``)."""

    name: str
    title: str
    cells: tuple[Cell, ...] = ()
    notes: tuple[str, ...] = ()
    analyses: tuple[str, ...] = ()


def _flash(task: str, track: int | None = None, masked: int | None = None) -> dict[str, Any]:
    """Flash-Cache of Table 3: candidates, look-ahead behind them, tracked tokens."""
    setting = TABLE3[task]
    return {
        "window": CANDIDATES,
        "lookahead": (masked or setting.masked) - CANDIDATES,
        "track": track or setting.track,
    }


def _method(name: str, task: str) -> dict[str, Any]:
    """Method, options and request parameters of one of the paper's names."""
    gamma = {"epsilon": EPSILON, "gamma": TABLE3[task].gamma}
    confident = {"epsilon": EPSILON}
    blocks = {"block_length": BLOCK}
    fast = {"epsilon": EPSILON, "block_length": 32}
    parts: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "greedy, no cache": ("none+greedy", {}, blocks),
        "greedy, Flash-Cache": ("flash+greedy", _flash(task), {}),
        "confidence, no cache": ("none+threshold", {}, {**confident, **blocks}),
        "Fast-dLLM": ("dual+threshold", {}, fast),
        "Elastic-Cache": ("elastic+threshold", {"window": 16}, confident),
        "confidence, Flash-Cache": ("flash+threshold", _flash(task), confident),
        "Flash-Verify, no cache": ("none+verify", {"window": CANDIDATES}, gamma),
        "Flash-Verify, Flash-Cache": ("flash+verify", _flash(task), gamma),
        "dKV-Cache": ("dkv-decode+greedy", {}, {}),
        "FlashDLM": ("freecache+guided", {}, {}),
        "dLLM-Cache": ("dllm-cache+greedy", {}, {}),
        "Dynamic-dLLM": ("dynamic+threshold", {}, confident),
        "FreeDave": ("dual+freedave", {}, {}),
    }
    method, options, params = parts[name]
    pace = {"greedy": (1.0, 0.0), "threshold": (2.8, 0.0), "verify": (2.8, 2.9)}
    commits, accepts = pace.get(method.partition("+")[2], (1.0, 0.0))
    return {"method": method, "options": options, "params": params, "commits": commits, "accepts": accepts}


def _cell(row: str, column: str, name: str, task: str = "gsm8k", **more: Any) -> Cell:
    return replace(Cell(row, column, **_method(name, task), task=task, shots=SHOTS[task]), **more)


def _table1() -> Plan:
    cells = [
        _cell(
            f"{TITLES[task]}-{length}", name, name, task, length=length,
            published=published.table1(task, length, name),
        )
        for task in SHOTS for length in (256, 512) for name in published.METHODS
    ]  # fmt: skip
    return Plan(
        "table1", "four benchmarks, eight methods", tuple(cells), (_BATCH, _FAST, *published.CONTRADICTIONS)
    )


_BATCH = "the paper does not say with how many slots its baselines ran; Fast-dLLM's own code takes one prompt at a time"
_FAST = "the paper does not say which of Fast-dLLM's two caches it ran; the dual cache with blocks of 32 stands here"


def _table2() -> Plan:
    cells = [_cell(name, "", name, published=figures) for name, figures in published.TABLE2.items()]
    notes = (
        _BATCH,
        _FAST,
        "settings of the other papers' methods are their own defaults; FlashDLM's passes do not include its guide's",
    )
    return Plan("table2", "other acceleration methods, GSM8K-512", tuple(cells), notes)


def _table4() -> Plan:
    return Plan(
        "table4", "verification threshold and tracking budget, GSM8K-512", tuple(_sweep()), (_SEEDS, _GAMMA)
    )


_SEEDS = "the paper averages five seeds; decoding at temperature 0 is deterministic here, so one run stands for all"
_GAMMA = "at gamma 1.00 the paper's accuracy and rate are those of confidence-aware decoding"


def _sweep() -> list[Cell]:
    return [
        _cell(
            f"gamma {gamma:.2f}", f"budget {budget}", "Flash-Verify, Flash-Cache",
            options=_flash("gsm8k", budget), params={"epsilon": EPSILON, "gamma": gamma},
            published=published.table4(gamma, budget),
        )
        for gamma in published.GAMMAS for budget in published.BUDGETS
    ]  # fmt: skip


def _table5() -> Plan:
    cells = []
    for (what, name), columns in published.TABLE5.items():
        for value, figures in columns.items():
            more: dict[str, Any] = {"length": value} if what == "length" else {"shots": value}
            column = f"length {value}" if what == "length" else f"{value}-shot"
            cells.append(_cell(name, column, name, batch=16, published=figures, **more))
    return Plan("table5", "answer length and number of examples, GSM8K", tuple(cells))


def _table6() -> Plan:
    # Few slots first, here and in Figure 4: where time ends early, every method has been seen.
    cells = [
        _cell(
            name, f"batch {batch}", name, batch=batch, options=_flash("gsm8k", 80), published=columns[batch]
        )
        for batch in published.BATCHES
        for name, columns in published.TABLE6.items()
    ]
    notes = ("the rates of Table 6 match a tracking budget of 80 in Table 4, so that is used here",)
    return Plan("table6", "number of slots, GSM8K-512", tuple(cells), notes)


def _fig1() -> Plan:
    notes = (
        f"1a: a fused pipeline is {published.FUSED_SPEEDUP} times as fast a layer in the paper (RTX 3090); "
        "`flash-dllm bench kernels` measures this on a GPU",
        f"1b: the {published.TOP_TOKENS} most attended decoded tokens get about {published.TOP_SHARE:.0%} of the "
        "attention in the middle layers of LLaDA-1.5",
        "1c: in the paper, higher average confidence goes with more tokens that could be decoded early; no numbers are "
        "printed",
    )
    return Plan("fig1", "what attention and confidence show", (), notes, ("concentration", "early"))


def _fig4() -> Plan:
    names = {"LLaDA-1.5": "greedy, no cache", "Fast-dLLM": "Fast-dLLM", "dLLM-Cache": "dLLM-Cache",
             "Flash-dLLM": "Flash-Verify, Flash-Cache"}  # fmt: skip
    cells = []
    for batch in published.BATCHES:
        for row, name in names.items():
            rate = published.TABLE6[name][batch].tokens_per_second if name in published.TABLE6 else None
            memory = published.MEMORY.get((name, batch))
            figures = Figures(tokens_per_second=rate, memory_gb=memory)
            cells.append(_cell(row, f"batch {batch}", name, batch=batch, shots=1, published=figures))
    notes = (
        "only two points of the memory curves are in the text; rates of Flash-dLLM are those of Table 6 (5-shot)",
        "in the paper Fast-dLLM runs out of memory at 24 slots; its left-to-right reference, Llama3-8B, is not run",
    )
    return Plan("fig4", "throughput and memory by number of slots, GSM8K-512", tuple(cells), notes)


def _fig5() -> Plan:
    confident = [
        _cell(
            f"confidence {epsilon:.2f}", f"budget {budget}", "confidence, Flash-Cache",
            options=_flash("gsm8k", budget), params={"epsilon": epsilon}, note="threshold of the curve: our reading",
        )
        for epsilon in (0.6, 0.7, 0.8, 0.9) for budget in published.BUDGETS
    ]  # fmt: skip
    notes = (_SEEDS, "the points of the confidence-aware curve are not in the text")
    return Plan("fig5", "accuracy against throughput, GSM8K-512", (*_sweep(), *confident), notes)


def _fig6() -> Plan:
    cells = []
    for threshold in (0.60, 0.70, 0.80, 0.90):
        column = f"threshold {threshold:.2f}"
        cells.append(
            _cell("confidence, Flash-Cache", column, "confidence, Flash-Cache", params={"epsilon": threshold})
        )
        cells.append(
            _cell(
                "Flash-Verify, Flash-Cache", column, "Flash-Verify, Flash-Cache",
                params={"epsilon": EPSILON, "gamma": threshold},
            )
        )  # fmt: skip
    reading = "the threshold is epsilon for confidence-aware decoding and gamma for Flash-Verify: our reading"
    return Plan("fig6", "tokens a step by threshold, GSM8K-512", tuple(cells), (published.FIGURE6, reading))


def _fig7() -> Plan:
    cells = [
        _cell(name, f"window {masked}", name, options=_flash("gsm8k", masked=masked))
        for masked in (32, 64, 96, 128)
        for name in ("confidence, Flash-Cache", "Flash-Verify, Flash-Cache")
    ]
    reading = (
        "which windows the figure has is not in the text: ours are 16 candidates and the rest look-ahead"
    )
    return Plan("fig7", "size of the masked window, GSM8K-512", tuple(cells), (published.FIGURE7, reading))


PLANS: dict[str, Callable[[], Plan]] = {
    "table1": _table1, "table2": _table2, "table4": _table4, "table5": _table5, "table6": _table6,
    "fig1": _fig1, "fig4": _fig4, "fig5": _fig5, "fig6": _fig6, "fig7": _fig7,
}  # fmt: skip
