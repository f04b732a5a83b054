"""The methods by name: `cache[+decoding]`.

Adding one is a class in a file of this folder and a line in ``CACHES`` or ``DECODINGS`` below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from flash_dllm.core.method import Blocks, CachePolicy, Method, Rule, Schedule, Verifier, Whole, Window

from .fast_dllm import AsReleased

FAMILIES = ("llada", "dream")


class MethodError(ValueError):
    """A method, pair or option that does not exist; the message names it and what there is."""


@dataclass(frozen=True)
class Entry:
    """A cache policy or a decoding.

    Attributes:
        where: ``module:attribute`` under `flash_dllm.methods` that builds it; imported on first use.
        summary: one line for listings.
        paper: arXiv id, or "" where it is ours.
        options: constructor options and their defaults.
        schedules: schedules it accepts, its default first.
        families: model families it is defined for.
        caches: for a decoding, the caches it runs over (empty: all).
        decodings: for a cache, the decodings it accepts (empty: all).
    """

    where: str
    summary: str
    paper: str = ""
    options: dict[str, Any] | None = None
    schedules: tuple[str, ...] = ("blocks", "window", "blocks-as-released")
    families: tuple[str, ...] = FAMILIES
    caches: tuple[str, ...] = ()
    decodings: tuple[str, ...] = ()

    def build(self, **options: Any) -> Any:
        """Import and construct."""
        module, name = self.where.split(":")
        factory: Callable[..., Any] = getattr(import_module(f"flash_dllm.{module}"), name)
        return factory(**options)


CACHES: dict[str, Entry] = {
    "none": Entry("core.method:CachePolicy", "every position recomputed in every pass", schedules=()),
    "prefix": Entry(
        "methods.fast_dllm:PrefixCache", "whole refresh at block boundaries; then block and suffix", "2505.22618",
        schedules=("blocks", "blocks-as-released"),
    ),
    "dual": Entry(
        "methods.fast_dllm:DualCache", "whole refresh at block boundaries; then the block alone", "2505.22618",
        schedules=("blocks", "blocks-as-released"),
    ),
}
DECODINGS: dict[str, Entry] = {
    "threshold": Entry(
        "methods.fast_dllm:Threshold", "commit what is at least epsilon sure, at least one", "2505.22618"
    ),
    "greedy": Entry(
        "methods.llada:LowConfidence", "fixed number a step, most confident first", "2502.09992",
        schedules=("blocks", "blocks-as-released"),
    ),
    "random": Entry(
        "methods.llada:RandomOrder", "fixed number a step, in random order", "2502.09992", schedules=("blocks",)
    ),
    "factor": Entry("methods.fast_dllm:Factor", "as many as their confidences carry together", "2505.22618"),
    "origin": Entry("methods.dream:Origin", "Dream's random order", "2508.15487", schedules=("whole",)),
    "maskgit_plus": Entry(
        "methods.dream:Ranked", "Dream's time schedule, by top-1 probability", "2508.15487",
        {"name": "maskgit_plus", "measure": "prob"}, ("whole",),
    ),
    "entropy": Entry(
        "methods.dream:Ranked", "Dream's time schedule, by negative entropy", "2508.15487",
        {"name": "entropy", "measure": "neg_entropy"}, ("whole",),
    ),
    "topk_margin": Entry(
        "methods.dream:Ranked", "Dream's time schedule, by top-1 minus top-2", "2508.15487",
        {"name": "topk_margin", "measure": "margin"}, ("whole",),
    ),
}  # fmt: skip
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "blocks": Blocks,
    "window": Window,
    "whole": Whole,
    "blocks-as-released": AsReleased,
}
WINDOW = 16


def _known(kind: str, name: str, table: dict[str, Any]) -> Any:
    if name not in table:
        raise MethodError(f"unknown {kind} {name!r}; known: {', '.join(table)}")
    return table[name]


def split_name(name: str) -> tuple[str, str | None]:
    """``"flash+verify"`` -> ("flash", "verify"); a decoding left out is None."""
    cache, _, decoding = name.partition("+")
    return cache, decoding or None


def build_method(
    cache: str, decoding: str, *, family: str, schedule: str | None = None, **options: Any
) -> Method:
    """Construct a method.

    Args:
        cache, decoding: names from ``CACHES`` and ``DECODINGS``.
        family: of the model, "llada" or "dream".
        schedule: one that both accept; by default the first that they share.
        **options: constructor options of the cache or the decoding, and ``window`` (size of that schedule).

    Raises:
        MethodError: an unknown name, an incompatible pair, or an option that neither of them reads.
    """
    cache_entry: Entry = _known("cache", cache, CACHES)
    entry: Entry = _known("decoding", decoding, DECODINGS)
    for kind, name, e in (("cache", cache, cache_entry), ("decoding", decoding, entry)):
        if family not in e.families:
            raise MethodError(f"{kind} {name!r} is not defined for {family} models (only {', '.join(e.families)})")
    if entry.caches and cache not in entry.caches:
        raise MethodError(f"decoding {decoding!r} does not run over cache {cache!r}; it runs over {', '.join(entry.caches)}")
    if cache_entry.decodings and decoding not in cache_entry.decodings:
        raise MethodError(
            f"cache {cache!r} does not run with decoding {decoding!r}; it runs with {', '.join(cache_entry.decodings)}"
        )
    chosen = _schedule(cache, cache_entry, decoding, entry, schedule)
    used: set[str] = set()

    def take(e: Entry) -> dict[str, Any]:
        defaults = dict(e.options or {})
        mine = {k: options[k] for k in defaults if k in options}
        used.update(mine)
        return {**defaults, **mine}

    policy: CachePolicy = cache_entry.build(**take(cache_entry))
    part = entry.build(**take(entry))
    plan: Schedule
    if chosen == "window":
        size = options.get("window", WINDOW)
        used.add("window")
        plan = Window(size)
    else:
        plan = SCHEDULES[chosen]()
    unread = set(options) - used
    if unread:
        names = sorted({*(cache_entry.options or {}), *(entry.options or {})} | ({"window"} if chosen == "window" else set()))
        raise MethodError(
            f"option {sorted(unread)[0]!r} is not read by {cache}+{decoding}; its options: {', '.join(names) or 'none'}"
        )
    rule, verifier = part if isinstance(part, tuple) else (part, None)
    return assemble(policy, plan, rule, verifier)


def assemble(policy: CachePolicy, schedule: Schedule, rule: Rule, verifier: Verifier | None = None) -> Method:
    """Put parts together; request options that the schedule has no use for are not offered."""
    reads = set(rule.options) | set(getattr(verifier, "options", ()))
    if schedule.name != "blocks":
        reads.discard("block_length")
    return Method(policy, schedule, rule, verifier, frozenset(reads))


def _schedule(cache: str, cache_entry: Entry, decoding: str, entry: Entry, wanted: str | None) -> str:
    both = [s for s in (cache_entry.schedules or entry.schedules) if s in entry.schedules]
    if not both:
        raise MethodError(
            f"cache {cache!r} (schedules: {', '.join(cache_entry.schedules)}) and decoding {decoding!r} "
            f"(schedules: {', '.join(entry.schedules)}) have none in common"
        )
    if wanted is None:
        return both[0]
    if wanted not in both:
        raise MethodError(f"{cache}+{decoding} does not run on schedule {wanted!r}; it runs on {', '.join(both)}")
    return wanted
