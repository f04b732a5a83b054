"""The fixed decode schedule of the cache toy: what is committed when, and what a policy would observe.

A real model decides these numbers from its attention and values. Here they are written down, so that every policy
sees the same decoding and a page can repeat it without a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from flash_dllm.core.noise import counter_uniform

PROMPT, ANSWER, BLOCK, WINDOW, LAYERS = 16, 32, 8, 8, 4
LENGTH = PROMPT + ANSWER
ORDER = (
    ((0, 2), (1, 3, 5), (4, 7), (6,)),
    ((0,), (1, 2), (3, 4, 6), (5, 7)),
    ((1, 2), (0, 5), (3,), (4, 6, 7)),
    ((0, 3), (2, 4), (1, 6), (5, 7)),
)
"""Places inside each block of eight, by step: every schedule that the policies ask for allows it."""
SINKS = {0: 9.0, 4: 5.2, 11: 7.4}
"""Prompt positions that every step attends to, and how much."""


@dataclass(frozen=True)
class Script:
    """One decoding of ``LENGTH`` positions.

    Attributes:
        commit_at: step of each position's commit, -1 in the prompt.
        score: attention score of each position by step, [steps][LENGTH] (Flash-Cache, Eq. 2; Elastic-Cache).
        moved: 1 - cosine of each position's value with the cached one by step, [steps][LENGTH] (dLLM-Cache).
        similarity: of the tracked tokens' attention by step and layer, [steps][LAYERS] (Elastic-Cache).
    """

    commit_at: list[int]
    score: list[list[float]]
    moved: list[list[float]]
    similarity: list[list[float]]

    @property
    def steps(self) -> int:
        return len(self.score)


def _uniform(*words: int) -> float:
    return float(counter_uniform(*(torch.tensor(w) for w in words)))


def _commits() -> list[int]:
    out = [-1] * LENGTH
    step = 0
    for block, steps in enumerate(ORDER):
        for places in steps:
            for place in places:
                out[PROMPT + BLOCK * block + place] = step
            step += 1
    return out


def _score(commit_at: list[int], step: int) -> list[float]:
    """Sinks stay high; an answer token is looked at most by its neighbours, that is soon after its commit."""
    out = []
    for pos, when in enumerate(commit_at):
        noise = _uniform(1, step, pos)
        if when < 0:
            value = SINKS.get(pos, 0.2 + 0.05 * pos) + noise
        else:
            value = 2.0 + 5.5 * math.exp(-0.35 * max(0, step - when)) + 2.0 * noise
        out.append(round(value, 3))
    return out


def _moved(commit_at: list[int], step: int) -> list[float]:
    """Values move most where a token was just written, and next to it."""
    out = []
    for pos in range(LENGTH):
        near = min(
            (abs(pos - p) for p, when in enumerate(commit_at) if 0 <= step - 1 - when <= 1 and when >= 0),
            default=LENGTH,
        )
        out.append(round(0.6 * math.exp(-0.45 * near) + 0.25 * _uniform(2, step, pos), 4))
    return out


def _similarity(step: int) -> list[float]:
    """Drifts about every fourth step, at one layer or another."""
    drifts = {3: (2, 0.86), 6: (1, 0.89), 7: (3, 0.84), 10: (0, 0.88), 13: (2, 0.8)}
    layer, low = drifts.get(step, (-1, 1.0))
    return [
        low if index == layer else round(0.93 + 0.06 * _uniform(3, step, index), 3) for index in range(LAYERS)
    ]


@lru_cache
def default_script() -> Script:
    """The schedule of the page: 16 prompt positions, 32 answer positions, 16 steps of one to three commits."""
    commits = _commits()
    steps = range(max(commits) + 1)
    return Script(
        commits,
        [_score(commits, t) for t in steps],
        [_moved(commits, t) for t in steps],
        [_similarity(t) for t in steps],
    )
