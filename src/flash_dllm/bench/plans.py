"""The ablations, as data: each plan asks one question and changes one word of a method at a time.

The bundled models' canvases are 200 to 300 positions, so Flash-Cache's budget is scaled down from the paper's
16 + 48 + 64 rows: 16 candidates, 16 look-ahead and 32 tracked rows, a quarter of a canvas.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from flash_dllm.errors import FlashDLLMError
from flash_dllm.methods import CACHES, DECODINGS

_NONE = object()
SMALL: dict[str, Any] = {"lookahead": 16, "track": 32}
"""Flash-Cache's budget on the bundled models."""
STRUCTURED = ("gsm", "arith", "list", "convert", "code", "json")
"""Families whose answer has one right form or value."""
OPEN_ENDED = ("story", "letter")
"""Families whose answer is free text, checked for what it has to contain."""


class PlanError(FlashDLLMError):
    """A plan or a kind of problems that does not exist."""


@dataclass(frozen=True)
class Case:
    """One setting: a method by name, its options and the request's fields."""

    label: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)

    def key(self, problems: str) -> str:
        """What makes two measurements the same, whatever plan asks for them; an option at its default is none."""
        cache, decoding = self.method.split("+")
        usual = {**(CACHES[cache].options or {}), **(DECODINGS[decoding].options or {})}
        options = {name: value for name, value in self.options.items() if usual.get(name, _NONE) != value}
        return json.dumps([self.method, options, self.request, problems], sort_keys=True)


@dataclass(frozen=True)
class Plan:
    """A question, the settings that answer it (the first is what the others are compared with), and the problems."""

    name: str
    question: str
    cases: tuple[Case, ...]
    problems: tuple[str, ...] = ("gsm",)

    @property
    def baseline(self) -> Case:
        return self.cases[0]


def _flash(
    label: str, decoding: str = "threshold", request: dict[str, Any] | None = None, **options: Any
) -> Case:
    return Case(label, f"flash+{decoding}", {**SMALL, **options}, request or {})


def _tracking(name: str, track: int, problems: tuple[str, ...], question: str) -> Plan:
    by = ("attention", "recent", "random", "none")
    cases = [_flash(f"{how}, {track} rows", track=track, track_by=how) for how in by]
    return Plan(name, question, tuple(cases), problems)


_EXACT = Case("no cache", "none+threshold", {"schedule": "window"})
_GAMMA = {"gamma": 0.8}
_SAME = "Which committed rows are worth recomputing, at an equal budget of {} rows a step?"

PLANS: dict[str, Plan] = {
    plan.name: plan
    for plan in (
        _tracking("tracking", 32, ("gsm",), _SAME.format(32)),
        _tracking("tracking-small", 8, ("gsm",), _SAME.format(8)),
        _tracking("tracking-long", 32, ("gsm-2shot",), _SAME.format(32) + " (prompts with two worked examples)"),
        Plan(
            "budget", "How many tracked rows does it take?",
            (
                _EXACT, *(_flash(f"attention, {n} rows", track=n) for n in (64, 32, 16, 8)),
                _flash("nothing recomputed after its commit", track=0),
            ),
        ),
        Plan(
            "score-layers", "Do the first two layers belong in the score?",
            (
                _flash("all layers (paper)"), _flash("from the third (released code)", score_layers="from-third"),
            ),
        ),
        Plan(
            "score-layers-small", "Do the first two layers belong in the score, at a budget of 8 rows?",
            (
                _flash("all layers (paper), 8 rows", track=8),
                _flash("from the third (released code), 8 rows", track=8, score_layers="from-third"),
            ),
        ),
        Plan(
            "pinning", "Must a token committed by confidence be recomputed once?",
            (
                _flash("every new token (paper)", "verify", _GAMMA),
                _flash("verified tokens only (released code)", "verify", _GAMMA, pin="verified"),
            ),
        ),
        Plan(
            "views", "What does the mask view's leak cost or buy?",
            (
                _flash("paper", "verify", _GAMMA, views="paper"),
                _flash("leak-free", "verify", _GAMMA, views="leak-free"),
                _flash("branch", "verify", _GAMMA, views="branch"),
                _flash("no verification"),
                _flash("folded branch, K 4", "branch", {"gamma": 0.6}, branches=4),
                _flash("folded branch, K 2", "branch", {"gamma": 0.6}, branches=2),
            ),
        ),
        Plan(
            "acceptance", "Product of probabilities or argmax agreement?",
            tuple(
                _flash(f"{rule}, gamma {gamma}", "verify", {"rule": rule, "gamma": gamma})
                for gamma in (0.8, 0.6) for rule in ("product", "paper")
            ),
        ),
        Plan(
            "window", "How many candidates, and how many masked rows behind them?",
            (
                _flash("window 16, look-ahead 16"), _flash("window 16, look-ahead 0", lookahead=0),
                _flash("window 16, look-ahead 48", lookahead=48),
                _flash("window 8, look-ahead 24", window=8, lookahead=24),
                _flash("window 32, look-ahead 0", window=32, lookahead=0),
            ),
        ),
        Plan(
            "refresh", "Does a whole refresh now and then pay?",
            (
                _flash("never"), _flash("every 16 steps", refresh_every=16), _flash("every 8 steps", refresh_every=8),
                _flash("every 4 steps", refresh_every=4),
                _flash("when confidence falls by 0.05", refresh_on_drift=0.05),
                _EXACT,
            ),
        ),
        Plan(
            "text", "Does parallel decoding cost more in open-ended text than in structured answers?",
            (
                Case("one token a pass", "none+greedy", {"schedule": "window"}), _EXACT, _flash("flash+threshold"),
                _flash("flash+verify", "verify", _GAMMA),
            ),
            (*STRUCTURED, *OPEN_ENDED),
        ),
    )
}  # fmt: skip


_BLOCK: dict[str, Any] = {"block_length": 32}
_IN_BLOCKS = (
    "none+threshold", "prefix+threshold", "dual+threshold", "dllm-cache+threshold", "dynamic+threshold",
    "dkv-decode+threshold", "dkv-pd+threshold", "dkv-prefill+threshold", "freecache+threshold", "none+factor",
    "dual+factor", "none+adaptive", "dynamic+adaptive", "dual+freedave", "prefix+freedave", "none+greedy",
    "freecache+greedy", "none+random", "dkv-greedy+random",
)  # fmt: skip
METHODS = Plan(
    "methods", "Every method on the same problems, at its defaults; blocks of 32 where a method has blocks",
    (
        *(Case(name, name, {}, _BLOCK) for name in _IN_BLOCKS),
        *(
            Case(name, name)
            for name in (
                "flash+threshold", "flash+verify", "flash+branch", "none+verify", "none+branch", "elastic+threshold"
            )
        ),
        Case("none+guided", "none+guided", {"guide": "flash-dllm/tiny-guide"}),
        *(Case(f"none+{name}", f"none+{name}", {}, {"steps": 64}) for name in ("entropy", "maskgit_plus")),
    ),
    ("mixed",),
)  # fmt: skip
"""What ``bench methods`` runs."""


def find(names: str) -> list[Plan]:
    """Plans by comma-separated names; ``all`` is every one.

    Raises:
        PlanError: a name that is none.
    """
    wanted = list(PLANS) if names == "all" else [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in PLANS:
            raise PlanError(f"plan {name!r} is not known; there are {', '.join(PLANS)}, and all")
    if not wanted:
        raise PlanError("no plan is named")
    return [PLANS[name] for name in wanted]
