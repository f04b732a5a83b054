"""The methods by name: `cache[+decoding]`.

Adding one is a class in a file of this folder and a line in ``CACHES`` or ``DECODINGS`` below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from flash_dllm.core.method import Blocks, CachePolicy, Method, Rule, Schedule, Verifier, Whole, Window
from flash_dllm.errors import FlashDLLMError

from .dynamic_dllm import BlocksAhead
from .fast_dllm import AsReleased, DreamAsReleased

FAMILIES = ("llada", "dream")


class MethodError(FlashDLLMError):
    """A method, pair or option that does not exist; the message names it and what there is."""


@dataclass(frozen=True)
class Entry:
    """A cache policy or a decoding.

    Attributes:
        where: ``module:attribute`` under `flash_dllm.methods` that builds it; imported on first use.
        summary: one line for listings.
        paper: arXiv id, or "" where it is ours.
        options: constructor options and their defaults; ``fixed`` those that the name implies.
        schedules: schedules it accepts, its default first.
        families: model families it is defined for.
        caches: for a decoding, the caches it runs over (empty: all).
        decodings: for a cache, the decodings it accepts (empty: all).
        per_family: its constructor also takes the model's ``family``.
    """

    where: str
    summary: str
    paper: str = ""
    options: dict[str, Any] | None = None
    schedules: tuple[str, ...] = ("blocks", "window", "blocks-as-released", "blocks-dream-as-released")
    families: tuple[str, ...] = FAMILIES
    caches: tuple[str, ...] = ()
    decodings: tuple[str, ...] = ()
    fixed: dict[str, Any] | None = None
    per_family: bool = False

    def build(self, **options: Any) -> Any:
        """Import and construct."""
        module, name = self.where.split(":")
        factory: Callable[..., Any] = getattr(import_module(f"flash_dllm.{module}"), name)
        return factory(**(self.fixed or {}), **options)


BLOCK_SCHEDULES = ("blocks", "blocks-as-released", "blocks-dream-as-released")
DREAM_SCHEDULES = ("whole", "blocks", "blocks-dream-as-released")
CACHES: dict[str, Entry] = {
    "none": Entry("core.method:CachePolicy", "every position recomputed in every pass", schedules=()),
    "prefix": Entry(
        "methods.fast_dllm:PrefixCache",
        "whole refresh at block starts; then block and suffix",
        "2505.22618",
        schedules=BLOCK_SCHEDULES,
    ),
    "dual": Entry(
        "methods.fast_dllm:DualCache",
        "whole refresh at block starts; then the block alone",
        "2505.22618",
        schedules=BLOCK_SCHEDULES,
    ),
    "dkv-decode": Entry(
        "methods.dkv_cache:DecodeCache",
        "a token is kept from one step after it was decoded",
        "2505.15781",
        {"refresh": None, "shift_type": "un"},
        ("whole", "blocks", "window"),
        per_family=True,
    ),
    "dkv-greedy": Entry(
        "methods.dkv_cache:GreedyCache",
        "planned random order; only what is due and its window",
        "2505.15781",
        {"refresh": 2, "window": 4},
        ("blocks",),
        decodings=("random",),
    ),
    "dkv-prefill": Entry(
        "methods.dkv_cache:PrefillCache",
        "the prompt is computed once",
        "2505.15781",
        {"shift_type": "un"},
        ("whole", "blocks", "window"),
        per_family=True,
    ),
    "dkv-pd": Entry(
        "methods.dkv_cache:PdCache",
        "the prompt once, the answer as dkv-decode",
        "2505.15781",
        {"refresh": None, "shift_type": "un"},
        ("whole", "blocks", "window"),
        per_family=True,
    ),
    "freecache": Entry(
        "methods.flashdlm:FreeCache",
        "prompt and finished blocks are frozen for good",
        "2505.21467",
        {"freeze": "last-step"},
        ("blocks", "whole"),
        per_family=True,
    ),
    "flash": Entry(
        "methods.flash:FlashCache",
        "a masked window and a budget of tracked tokens every step",
        "2609.26796",
        {
            "lookahead": 48,
            "track": 64,
            "track_by": "attention",
            "score_layers": "all",
            "pin": "all",
            "refresh_every": 0,
            "refresh_on_drift": 0.0,
        },
        schedules=("window",),
    ),
    "elastic": Entry(
        "methods.elastic:ElasticCache",
        "a window and what was decoded; deeper layers when attention drifts",
        "2510.14973",
        {"drift": 0.9, "track_num": 1, "block_caching": True, "similarity": "heads"},
        schedules=("window", "blocks"),
    ),
    "dllm-cache": Entry(
        "methods.dllm_cache:DLLMCache",
        "prompt and response at intervals; then what moved most",
        "2506.06295",
        {"kp": 50, "kr": 7, "rho": 0.25, "split": "predicted"},
        schedules=(),
    ),
    "dynamic": Entry(
        "methods.dynamic_dllm:DynamicCache",
        "a window at the last commit and what moved most",
        "2606.26120",
        {
            "window_size": 32,
            "layer_budget": 32,
            "kp": 5000,
            "kr": 5000,
            "budget": "released",
            "compare": "value",
            "split": "predicted",
        },
        schedules=(),
    ),
}
DECODINGS: dict[str, Entry] = {
    "threshold": Entry(
        "methods.fast_dllm:Threshold", "commit what is at least epsilon sure, at least one", "2505.22618"
    ),
    "greedy": Entry(
        "methods.llada:LowConfidence", "fixed number a step, most confident first", "2502.09992",
        schedules=("blocks", "window", "blocks-as-released", "blocks-dream-as-released"),
    ),
    "random": Entry(
        "methods.llada:RandomOrder", "fixed number a step, in random order", "2502.09992",
        schedules=("blocks", "window"),
    ),
    "verify": Entry(
        "methods.verify:verify", "threshold, then the model checks its own drafts in a second pass",
        "2609.26796", {"search": 8, "verify_rows": 32, "views": "paper", "window": 16}, ("window", "blocks"),
    ),
    "branch": Entry(
        "methods.branch:branch", "drafts tested inside the next pass, one pass a step", "",
        {"branches": 4, "window": 16}, ("window",),
    ),
    "guided": Entry(
        "methods.flashdlm:Guided", "the prefix of the draft that an autoregressive guide accepts", "2505.21467",
        {
            "guide": None, "guide_map": None, "strategy": "deterministic", "variant": "judge",
            "accept_top_k": 5, "accept_ratio": 0.95, "accept_threshold": 0.1, "chunk": 32,
        },
        ("whole",),
    ),
    "factor": Entry("methods.fast_dllm:Factor", "as many as their confidences carry together", "2505.22618"),
    "quota": Entry(
        "methods.fast_dllm:Quota", "a threshold with an even pace as the most a step", "2505.22618",
        schedules=DREAM_SCHEDULES,
    ),
    "origin": Entry(
        "methods.dream:Origin", "Dream's random order", "2508.15487", schedules=("whole", "blocks")
    ),
    "maskgit_plus": Entry(
        "methods.dream:Ranked", "Dream's time schedule, by top-1 probability", "2508.15487",
        schedules=DREAM_SCHEDULES, fixed={"name": "maskgit_plus", "measure": "prob"},
    ),
    "entropy": Entry(
        "methods.dream:Ranked", "Dream's time schedule, by negative entropy", "2508.15487",
        schedules=DREAM_SCHEDULES, fixed={"name": "entropy", "measure": "neg_entropy"},
    ),
    "topk_margin": Entry(
        "methods.dream:Ranked", "Dream's time schedule, by top-1 minus top-2", "2508.15487",
        schedules=DREAM_SCHEDULES, fixed={"name": "topk_margin", "measure": "margin"},
    ),
    "freedave": Entry(
        "methods.freedave:freedave", "each pass checks the last one's drafts, without loss", "2510.00294",
        {"draft_steps": None}, schedules=("blocks", "blocks-dream-as-released"), caches=("prefix", "dual"),
    ),
    "adaptive": Entry(
        "methods.dynamic_dllm:Adaptive", "thresholds that follow each position's distribution", "2606.26120",
        {"mode": 2, "alpha": 0.01, "beta": 0.15}, schedules=("blocks-ahead",),
    ),
}  # fmt: skip
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "blocks": Blocks,
    "window": Window,
    "whole": Whole,
    "blocks-as-released": AsReleased,
    "blocks-dream-as-released": DreamAsReleased,
    "blocks-ahead": BlocksAhead,
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
    _check_pair(cache, cache_entry, decoding, entry, family)
    chosen = _schedule(cache, cache_entry, decoding, entry, schedule)
    known = {
        *(cache_entry.options or {}),
        *(entry.options or {}),
        *(("window",) if chosen == "window" else ()),
    }
    for name in sorted(set(options) - known):
        its = ", ".join(sorted(known)) or "none"
        raise MethodError(f"option {name!r} is not read by {cache}+{decoding}; its options: {its}")

    def made(e: Entry) -> Any:
        mine = {name: options.get(name, default) for name, default in (e.options or {}).items()}
        try:
            return e.build(**mine, **({"family": family} if e.per_family else {}))
        except (TypeError, ValueError) as error:
            raise MethodError(f"{cache}+{decoding}: {error}") from error

    policy: CachePolicy = made(cache_entry)
    part = made(entry)
    plan = Window(_window(options)) if chosen == "window" else SCHEDULES[chosen]()
    rule, verifier = part if isinstance(part, tuple) else (part, None)
    return assemble(policy, plan, rule, verifier)


def _window(options: dict[str, Any]) -> int:
    size = options.get("window", WINDOW)
    if not isinstance(size, int) or size < 1:
        raise MethodError(f"window={size!r}: a number of candidates, at least 1")
    return size


def _check_pair(cache: str, cache_entry: Entry, decoding: str, entry: Entry, family: str) -> None:
    """Refuse what is not defined for the family and pairs that do not go together."""
    for kind, name, e in (("cache", cache, cache_entry), ("decoding", decoding, entry)):
        if family not in e.families:
            only = ", ".join(e.families)
            raise MethodError(f"{kind} {name!r} is not defined for {family} models (only {only})")
    if entry.caches and cache not in entry.caches:
        over = ", ".join(entry.caches)
        raise MethodError(f"decoding {decoding!r} does not run over cache {cache!r}; it runs over {over}")
    if cache_entry.decodings and decoding not in cache_entry.decodings:
        its = ", ".join(cache_entry.decodings)
        raise MethodError(f"cache {cache!r} does not run with decoding {decoding!r}; it runs with {its}")


def assemble(policy: CachePolicy, schedule: Schedule, rule: Rule, verifier: Verifier | None = None) -> Method:
    """Put parts together; request options that the schedule has no use for are not offered.

    Raises:
        MethodError: a verifier over a cache that has no plan for its rows to join.
    """
    if verifier is not None and policy.loop != "compact":
        raise MethodError(
            f"cache {policy.name!r} does not run with decoding {verifier.name!r}: it recomputes other rows in each "
            "layer, so the verifier's rows have no pass to join"
        )
    reads = set(rule.options) | set(getattr(verifier, "options", ()))
    if not schedule.name.startswith("blocks"):
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
        raise MethodError(
            f"{cache}+{decoding} does not run on schedule {wanted!r}; it runs on {', '.join(both)}"
        )
    return wanted
