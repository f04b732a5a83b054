"""The cache toy: the engine's own policies run on the fixed schedule of :mod:`.script`.

The engine decodes with a tiny random model; what the model would decide (which tokens are committed, what attention
and values say) is replaced by the script, and everything else is the engine's: schedule, policy, loop over layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flash_dllm.core.delta import Turn
from flash_dllm.core.forward import Context
from flash_dllm.core.method import Rule
from flash_dllm.core.noise import Noise
from flash_dllm.core.select import highest
from flash_dllm.core.state import Canvas, State
from flash_dllm.core.step import StepRecord, Vocabulary
from flash_dllm.core.types import Candidates, Draft, Lanes
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.request import Request
from flash_dllm.methods import build_method
from flash_dllm.methods.dllm_cache import DLLMCache
from flash_dllm.methods.elastic import Drift, ElasticCache, spread
from flash_dllm.models.config import SHAPES, ModelConfig
from flash_dllm.models.layers import Model, random_model

from .script import LAYERS, LENGTH, PROMPT, WINDOW, Script, default_script


@dataclass(frozen=True)
class Setting:
    """A policy of the toy with its options, named as in the engine, and per-request numbers."""

    policy: str
    options: dict[str, Any]
    numbers: dict[str, int]

    def key(self) -> str:
        """Name in the exported data."""
        given = {**self.options, **self.numbers}
        return ",".join([self.policy, *(f"{name}={given[name]}" for name in sorted(given))])


def setting(policy: str, **given: Any) -> Setting:
    """A setting; ``block_length`` is the request's, everything else the policy's."""
    numbers = {name: given.pop(name) for name in ("block_length",) if name in given}
    return Setting(policy, given, numbers)


DEFAULTS = (
    setting("none"),
    setting("dual", block_length=8),
    setting("flash", track=4, lookahead=4, track_by="attention", refresh_every=0),
    setting("dkv-decode", refresh=8),
    setting("dllm-cache", kp=50, kr=7, rho=0.25),
    setting("elastic", drift=0.9, track_num=1),
)
"""What the page shows at first."""


@dataclass(frozen=True)
class Run:
    """What a policy recomputed.

    Attributes:
        recomputed: positions recomputed in the last layer, by step.
        rows: rows of each step as the engine counts them: the mean over the layers, rounded up.
    """

    recomputed: list[list[int]]
    rows: list[int]


class Scripted(Rule):
    """Commits what the script says."""

    name = "scripted"

    def __init__(self, script: Script) -> None:
        self.commit_at = torch.tensor(script.commit_at)

    def commit(self, state: State, cand: Candidates, draft: Draft, noise: Noise) -> Tensor:
        return cand.valid & (self.commit_at[cand.pos] == state.step[:, None])


class _Turn(Turn):
    """A turn that is told how far values moved."""

    told: Tensor

    def pick(self, layer: int, moved: Tensor | None) -> tuple[Tensor, list[int]]:
        return super().pick(layer, None if moved is None else self.told)


class _DLLMCache(DLLMCache):
    def __init__(self, script: Script, **options: Any) -> None:
        super().__init__(**options)
        self.script = script

    def turn(self, state: State, lanes: Lanes, config: ModelConfig) -> Turn:
        turn = _Turn(**vars(super().turn(state, lanes, config)))
        turn.told = torch.tensor([self.script.moved[int(state.step[0])]])
        return turn


class _Drift(Drift):
    script: Script

    def _compare(self, was: Tensor, now: Tensor) -> Tensor:
        told = self.script.similarity[int(self.state.step[0])][len(self.similarity)]
        compared = self.tracked[1].any(1)
        return torch.where(compared, told, float("nan"))

    def _track(self, queries: Tensor, keys: Tensor) -> Tensor:
        score = torch.tensor([self.script.score[int(self.state.step[0])]])
        best = highest(score, self.known, self.policy.track_num)
        return spread(*best, self.state.positions)


class _ElasticCache(ElasticCache):
    def __init__(self, script: Script, **options: Any) -> None:
        super().__init__(**options)
        self.script = script

    def watcher(self, ctx: Context, state: State, lanes: Lanes, fed: Tensor) -> Drift:
        assert self.store is not None
        seen = _Drift(ctx, state, lanes, fed, self.store)
        seen.script = self.script
        return seen


TOLD: dict[str, type[_DLLMCache] | type[_ElasticCache]] = {
    "dllm-cache": _DLLMCache,
    "elastic": _ElasticCache,
}
"""Policies that learn from a pass; here the script tells them."""


@lru_cache
def _model() -> Model:
    shape = replace(
        SHAPES["llada-tiny"], n_layers=LAYERS, d_model=16, n_heads=1, n_kv_heads=1, head_dim=16, d_ffn=16,
        vocab_size=32, n_tokens=32, max_positions=LENGTH, mask_id=31, eos_ids=(30,), pad_id=30,
    )  # fmt: skip
    return random_model(shape)


def _engine(chosen: Setting, script: Script) -> Engine:
    options = dict(chosen.options)
    if chosen.policy in ("flash", "elastic"):
        options["window"] = WINDOW
    method = build_method(chosen.policy, "threshold", family="llada", **options)
    if chosen.policy in TOLD:
        method.cache = TOLD[chosen.policy](script, **chosen.options)
    method.rule = Scripted(script)
    return Engine(_model(), method, Vocabulary(30, 31), slots=1, positions=LENGTH)


def run_policy(chosen: Setting, script: Script | None = None) -> Run:
    """Decode the script with a policy.

    Raises:
        MethodError: an unknown policy or option, or a value that it refuses.
    """
    script = script or default_script()
    engine = _engine(chosen, script)
    recomputed: list[list[int]] = []
    rows: list[int] = []

    def look(engine: Engine, record: StepRecord) -> None:
        (done,) = record.passes
        if done.rows is not None:
            places = done.rows.pos[done.rows.valid]
        else:
            assert done.marks is not None
            places = done.marks[0].nonzero().flatten()
        recomputed.append(sorted(places.tolist()))
        rows.append(int(done.recomputed[0]))
        # What the next step's policy finds is the script's, not the random model's.
        engine.state.score[0] = torch.tensor(script.score[len(rows) - 1])

    engine.observer = look
    ids = [1] * PROMPT + [31] * (LENGTH - PROMPT)
    numbers = {"stop_at_eos": 0.0, **chosen.numbers}
    engine.add(Request("toy", Canvas(ids, [i >= PROMPT for i in range(LENGTH)], (), numbers)))
    while not engine.idle:
        engine.step()
    return Run(recomputed, rows)
