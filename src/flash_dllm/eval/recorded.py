"""Figure 1 of the Flash-dLLM paper from recorded passes: where attention goes, and what confidence says.

A recording is a decoding with the guesses of every step; the passes are then run again by the plain forward, which
gives the attention weights that the engine never keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flash_dllm.llm import LLM
from flash_dllm.models.layers import Model
from flash_dllm.models.reference import forward
from flash_dllm.requests import Job

TOPS = (4, 8, 16, 32, 64)
RESAMPLES = 1000


@dataclass(frozen=True)
class Moment:
    """One step: the canvas before it, and (position, token, confidence) of each candidate.

    ``committed`` are the positions among them that the step committed.
    """

    ids: list[int]
    candidates: list[tuple[int, int, float]]
    committed: frozenset[int]


@dataclass(frozen=True)
class Recording:
    """A decoding step by step; ``final`` is the canvas at its end, ``first`` the first position of the answer."""

    moments: list[Moment]
    final: list[int]
    first: int


def record(llm: LLM, job: Job) -> Recording:
    """Decode one job and keep what every step saw."""
    ids, moments = list(job.ids), []
    final: list[int] = []
    for event in llm.watch(job):
        if event.positions or event.guesses:
            taken = list(zip(event.positions, event.tokens, event.confidences, strict=True))
            moments.append(Moment(list(ids), [*taken, *event.guesses], frozenset(event.positions)))
        for position, token in zip(event.positions, event.tokens, strict=True):
            ids[position] = token
        final = list(ids)
    return Recording(moments, final, job.first)


@torch.inference_mode()
def concentration(
    model: Model, recordings: Sequence[Recording], mask_id: int, every: int = 4, tops: Sequence[int] = TOPS
) -> dict[str, Any]:
    """Share of the attention of masked candidates that goes to the most attended decoded tokens, by layer.

    Args:
        model: whose passes were recorded.
        recordings: decodings; every ``every``-th step of each is run again.
        mask_id: MASK.
        tops: how many of the most attended tokens count.

    Returns:
        For all ``decoded`` tokens (prompt and committed) and for those of the ``answer`` alone: by layer the share of
        the k most attended and of all of them (heads, candidates and steps averaged); what even attention would give;
        counts.
    """
    kinds = ("decoded", "answer")
    sums = {kind: np.zeros((model.config.n_layers, len(tops) + 1)) for kind in kinds}
    even = {kind: np.zeros(len(tops) + 1) for kind in kinds}
    sizes, steps = dict.fromkeys(kinds, 0), 0
    for recording in recordings:
        for moment in recording.moments[::every]:
            rows = torch.tensor([p for p, _, _ in moment.candidates], device=model.device)
            ids = torch.tensor(moment.ids, device=model.device)
            known = (ids != mask_id).nonzero().flatten()
            places = {"decoded": known, "answer": known[known >= recording.first]}

            def look(
                layer: int, weights: torch.Tensor, rows: torch.Tensor = rows, places: Any = places
            ) -> None:
                mean = weights[0][:, rows].float().mean((0, 1))
                for kind, where in places.items():
                    ordered = mean[where].sort(descending=True).values
                    shares = [float(ordered[:k].sum()) for k in (*tops, len(ordered))]
                    sums[kind][layer] += shares

            forward(model, ids[None], rows=rows[None, :1], watch=look)
            steps += 1
            for kind, where in places.items():
                even[kind] += [min(k, len(where)) / len(ids) for k in (*tops, len(where))]
                sizes[kind] += len(where)
    names = [*(f"top {k}" for k in tops), "all"]

    def named(values: np.ndarray) -> dict[str, float]:
        return {name: round(float(v) / max(steps, 1), 4) for name, v in zip(names, values, strict=True)}

    return {
        kind: {
            "layers": [named(row) for row in sums[kind]],
            "even": named(even[kind]),
            "mean_tokens": round(sizes[kind] / max(steps, 1), 1),
        }
        for kind in kinds
    } | {"steps": steps, "decodings": len(recordings)}


def early(recordings: Sequence[Recording], mask_id: int) -> dict[str, Any]:
    """How a step's average confidence goes with the number of its early-decodable tokens.

    Early-decodable: a candidate that the step did not commit although its token is the one committed in the end.
    Candidates that were never decoded (behind the end of the answer) do not count.

    Returns:
        Pearson's and Spearman's correlation over all steps, and Pearson's between each waiting candidate's confidence
        and its being right, with 95 % intervals (resampled by decoding, since the steps of one are not independent);
        the mean confidence by number of such tokens; their share of the uncommitted.
    """
    per = [p for p in (_pairs(r, mask_id) for r in recordings) if len(p)]
    if not per:
        return dict.fromkeys(("pearson", "spearman", "by_token", "share")) | {
            "steps": 0,
            "decodings": 0,
            "by_count": [],
        }
    every = np.concatenate(per)
    counts = every[:, 1].astype(int)
    by_count = [
        {
            "early": int(n),
            "steps": int((counts == n).sum()),
            "confidence": round(float(every[counts == n, 0].mean()), 4),
        }
        for n in np.unique(counts)
    ]
    waiting = every[:, 2].sum()
    return {
        "steps": len(every), "decodings": len(per),
        "pearson": _with_interval(per, _pearson), "spearman": _with_interval(per, _spearman),
        "by_token": _with_interval([_tokens(r, mask_id) for r in recordings], _pearson),
        "share": round(float(counts.sum() / waiting), 4) if waiting else None, "by_count": by_count,
    }  # fmt: skip


def _pairs(recording: Recording, mask_id: int) -> np.ndarray:
    """Average confidence, early-decodable tokens and uncommitted candidates of each step, [steps, 3]."""
    rows = []
    for moment in recording.moments:
        real = [(p, t, c) for p, t, c in moment.candidates if recording.final[p] != mask_id]
        waiting = [(p, t) for p, t, _ in real if p not in moment.committed]
        if waiting:
            right = sum(recording.final[p] == t for p, t in waiting)
            rows.append((sum(c for _, _, c in real) / len(real), right, len(waiting)))
    return np.array(rows, dtype=float).reshape(-1, 3)


def _tokens(recording: Recording, mask_id: int) -> np.ndarray:
    """Confidence of each uncommitted candidate of each step, and whether it is right, [candidates, 2]."""
    pairs = [
        (confidence, recording.final[position] == token)
        for moment in recording.moments
        for position, token, confidence in moment.candidates
        if position not in moment.committed and recording.final[position] != mask_id
    ]
    return np.array(pairs, dtype=float).reshape(-1, 2)


def _pearson(pairs: np.ndarray) -> float:
    x, y = pairs[:, 0] - pairs[:, 0].mean(), pairs[:, 1] - pairs[:, 1].mean()
    below = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / below if below else 0.0


def _spearman(pairs: np.ndarray) -> float:
    return _pearson(np.stack([_ranks(pairs[:, 0]), _ranks(pairs[:, 1])], 1))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    ranks: np.ndarray = ((ends - counts + ends - 1) / 2)[inverse]
    return ranks


def _with_interval(per: Sequence[np.ndarray], measure: Any) -> dict[str, Any]:
    value = measure(np.concatenate(per))
    if len(per) < 2:
        return {"value": round(value, 4), "interval": None}
    noise = np.random.default_rng(0)
    found = [
        measure(np.concatenate([per[i] for i in noise.integers(len(per), size=len(per))]))
        for _ in range(RESAMPLES)
    ]
    low, high = np.quantile(found, [0.025, 0.975])
    return {"value": round(value, 4), "interval": [round(float(low), 4), round(float(high), 4)]}
