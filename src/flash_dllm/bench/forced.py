"""Decoding at a fixed rate, for models with random weights whose confidences mean nothing.

A wrapped method commits a given number of tokens a step, on average, whatever the model says; everything else (rows,
passes, choices by confidence or score) is that of the method. What is measured so is synthetic, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flash_dllm.bench.timing import BenchError
from flash_dllm.core.forward import Context
from flash_dllm.core.method import CachePolicy, Method, Rule, Search, Second, Verifier
from flash_dllm.core.noise import Noise
from flash_dllm.core.select import rank_of
from flash_dllm.core.state import State
from flash_dllm.core.step import Folded, TwoPass
from flash_dllm.core.types import Candidates, Draft, Lanes, Plan
from flash_dllm.kernels.head_confidence import HeadOut


def quota(step: Tensor, rate: float) -> Tensor:
    """How many tokens step ``step`` [S] takes so that n steps take floor(n * rate), [S] int64."""
    # A small margin keeps 0.1 * 10 from falling below 1.
    upto = ((step + 1).double() * rate + 1e-9).floor()
    return (upto - (step.double() * rate + 1e-9).floor()).long()


class ForcedRule(Rule):
    """Commits the most confident candidates, ``rate`` a step."""

    def __init__(self, inner: Rule, rate: float) -> None:
        self.inner, self.rate = inner, rate
        self.name, self.measure, self.categorical = inner.name, inner.measure, inner.categorical
        self.options, self.defaults = inner.options, inner.defaults

    def prepare(self, numbers: Sequence[Mapping[str, float]]) -> None:
        self.inner.prepare(numbers)

    def modes(self) -> tuple[bool, ...]:
        return self.inner.modes()

    def slot_tensors(self) -> tuple[Tensor, ...] | None:
        return self.inner.slot_tensors()

    def commit(self, state: State, cand: Candidates, draft: Draft, noise: Noise) -> Tensor:
        count = quota(state.step, self.rate)
        return (rank_of(draft.confidence, cand.valid) < count[:, None]) & cand.valid


class ForcedVerify(TwoPass):
    """Runs the second pass as ever and accepts ``rate`` drafts a step."""

    def __init__(self, inner: TwoPass, rate: float) -> None:
        self.inner, self.rate = inner, rate
        self.name, self.options, self.defaults = inner.name, inner.options, inner.defaults  # type: ignore[misc]

    def slot_tensors(self) -> tuple[Tensor, ...] | None:
        return self.inner.slot_tensors()

    def scratch(self) -> int:
        return self.inner.scratch()

    def room(self, width: int) -> int:
        return self.inner.room(width)

    def expand(
        self,
        state: State,
        lanes: Lanes,
        cand: Candidates,
        draft: Draft,
        taken: Tensor,
        policy: CachePolicy,
        ctx: Context,
    ) -> tuple[Search, Plan]:
        return self.inner.expand(state, lanes, cand, draft, taken, policy, ctx)

    def accept(self, state: State, search: Search, second: Second) -> Tensor:
        places = torch.arange(search.pos.shape[1], device=state.device)
        return (places < quota(state.step, self.rate)[:, None]) & search.valid


class ForcedBranch(Folded):
    """Rides in the denoise pass as ever and accepts ``rate`` drafts a step."""

    def __init__(self, inner: Folded, rate: float) -> None:
        self.inner, self.rate = inner, rate
        self.name, self.options, self.defaults = inner.name, inner.options, inner.defaults  # type: ignore[misc]

    def slot_tensors(self) -> tuple[Tensor, ...] | None:
        return self.inner.slot_tensors()

    def scratch(self) -> int:
        return self.inner.scratch()

    def room(self, width: int) -> int:
        return self.inner.room(width)

    def fold(
        self, state: State, lanes: Lanes, cand: Candidates, plan: Plan, ctx: Context
    ) -> tuple[Search, Plan]:
        return self.inner.fold(state, lanes, cand, plan, ctx)

    def entries(self, search: Search) -> int:
        return self.inner.entries(search)

    def settle(
        self, state: State, search: Search, cand: Candidates, seen: HeadOut
    ) -> tuple[Tensor, Draft, Second]:
        assert seen.prob_wanted is not None
        # Probability 1 up to the quota and 0 behind it is what the product rule accepts as far as that.
        places = torch.arange(seen.prob_wanted.shape[1], device=state.device)
        sure = places < quota(state.step, self.rate)[:, None]
        prob = sure[..., None].expand(seen.prob_wanted.shape).to(seen.prob_wanted.dtype)
        return self.inner.settle(state, search, cand, replace(seen, prob_wanted=prob))

    def confirms(self, state: State, draft: Draft, accepted: Tensor) -> Tensor:
        return torch.ones_like(draft.confidence, dtype=torch.bool)

    def remember(self, state: State, cand: Candidates, draft: Draft, taken: Tensor) -> None:
        self.inner.remember(state, cand, draft, taken)


def forced(method: Method, commits: float, accepts: float = 0.0) -> Method:
    """``method`` at a fixed rate.

    Args:
        commits: tokens a step by confidence, at least 1.
        accepts: drafts accepted a step, for a method that verifies.

    Raises:
        BenchError: a rate that cannot be, or drafts accepted by a method that has none.
    """
    if not 1 <= commits <= 1000:
        raise BenchError(f"commit-per-step={commits}: from 1 to 1000")
    if accepts < 0 or (accepts and method.verifier is None):
        why = "at least 0" if accepts < 0 else f"{method.name} verifies nothing"
        raise BenchError(f"accept-per-step={accepts}: {why}")
    verifier: Verifier | None = method.verifier
    if isinstance(verifier, TwoPass):
        verifier = ForcedVerify(verifier, accepts)
    elif isinstance(verifier, Folded):
        verifier = ForcedBranch(verifier, accepts)
    return replace(method, rule=ForcedRule(method.rule, commits), verifier=verifier)
