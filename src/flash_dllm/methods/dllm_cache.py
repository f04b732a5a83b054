"""dLLM-Cache (arXiv 2506.06295): prompt and response refreshed at intervals.

Pass c = 1, 2, ... of a request recomputes all prompt rows when (c - 1) mod Kp = 0 and all response rows when
(c - 1) mod Kr = 0. In between, every layer projects the values of all N response rows afresh ("V-verify")
and recomputes the int(rho N) rows whose values turned furthest (lowest cosine with the cached ones); the
others reuse their attention and feed-forward outputs. With rho = 0 nothing of the response is recomputed in
between. As in the code, not in the paper, layer 0 recomputes every row of every pass. The decoding is left
as it is.

Defaults are those of LLaDA-Instruct on GSM8K. Published Kp/Kr, with rho = 0.25 everywhere:

| task      | LLaDA-Base | LLaDA-Instruct | Dream-Base | Dream-Instruct |
| --------- | ---------- | -------------- | ---------- | -------------- |
| GSM8K     | 100/6      | 50/7           | 100/8      | 25/2           |
| MATH      | 50/8       | 50/1           | 100/4      | 50/1           |
| HumanEval | 50/5       | 50/8           | 5/1        | 50/1           |
| MBPP      | 50/4       | 100/5          | 25/8       | 10/8           |

Shifted models (Dream) read the prediction of the first response position at row P - 1. The published code
counts that row to the prompt, so above layer 0 that prediction is renewed every Kp steps only
(``split="row"``). Ours, ``split="predicted"`` (the default), counts a row to the part that it predicts.
LLaDA knows no difference. The published Dream code also indexes keys in a way that holds for one head count;
ours holds for all.

Cost of a step in between, above layer 0: rho N rows, N value projections and the norms of all T rows; layer
0: T rows. Memory beside K and V: two [T, d] outputs a layer (LLaDA-8B: 0.5 MiB a position in bfloat16).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_dllm.core.delta import DeltaPolicy, Turn
from flash_dllm.core.state import State
from flash_dllm.core.types import Lanes
from flash_dllm.models.config import ModelConfig

SPLITS = ("predicted", "row")


class IntervalCache(DeltaPolicy):
    """Refreshes of the prompt every ``kp`` and of the response every ``kr`` passes; subclasses do the rest.

    Args:
        kp, kr: intervals in passes, at least 1.
        split: "predicted" or "row": row P - 1 of a shifted model is the response's or the prompt's.

    Raises:
        ValueError: an interval below 1 or an unknown ``split``.
    """

    def __init__(self, kp: int, kr: int, split: str) -> None:
        if kp < 1 or kr < 1:
            raise ValueError(f"refresh intervals must be at least 1: kp={kp}, kr={kr}")
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
        self.kp, self.kr, self.split = kp, kr, split

    def odd(self, state: State) -> Tensor | None:
        return (state.step % self.kp == 0) | (state.step % self.kr == 0)

    def turn(self, state: State, lanes: Lanes, config: ModelConfig) -> Turn:
        # Passes whose numbers are bounds come in between refreshes, of all slots.
        clock: list[int] | None = state.step.tolist() if lanes.exact else None
        back = 1 if config.shift and self.split == "predicted" else 0
        live = set(lanes.live)
        starts = [max(0, first - back) for first in lanes.first]
        sizes = [total - start for total, start in zip(lanes.total, starts, strict=True)]

        def due(every: int) -> list[bool]:
            return [clock is not None and s in live and clock[s] % every == 0 for s in range(state.slots)]

        prompt_due, response_due = due(self.kp), due(self.kr)
        # A slot takes part in between only where its response is not refreshed.
        between = [n if s in live and not response_due[s] else 0 for s, n in enumerate(sizes)]
        start = (state.first - back).clamp_min(0)[:, None]
        prompt = state.inside & (state.order < start)
        response = state.inside & (state.order >= start) & state.running[:, None]
        prompt_now, response_now = (
            ((state.step % every == 0) & state.running)[:, None] for every in (self.kp, self.kr)
        )
        refreshed = (prompt & prompt_now) | (response & response_now)
        n_refreshed = [
            p * a + r * b for p, a, r, b in zip(starts, prompt_due, sizes, response_due, strict=True)
        ]
        turn = Turn(refreshed, response & ~response_now, n_refreshed, between)
        return self.between(state, turn, start, config.n_layers, clock)

    def between(self, state: State, turn: Turn, start: Tensor, layers: int, clock: list[int] | None) -> Turn:
        """``turn`` with the rows that are recomputed between refreshes.

        Args:
            turn: refreshed rows are fixed, the response rows of the other slots probed, there is nothing ``extra``.
            start: first response row, [S, 1] int64.
            clock: the passes so far of each slot; None where none is :meth:`odd`.
        """
        raise NotImplementedError


class DLLMCache(IntervalCache):
    """Between refreshes the ``rho`` share of the response whose values moved most.

    Args:
        kp, kr, split: see :class:`IntervalCache`.
        rho: in [0, 1].

    Raises:
        ValueError: ``rho`` outside [0, 1], and as :class:`IntervalCache`.
    """

    name = "dllm-cache"

    def __init__(self, kp: int = 50, kr: int = 7, rho: float = 0.25, split: str = "predicted") -> None:
        super().__init__(kp, kr, split)
        if not 0 <= rho <= 1:
            raise ValueError(f"rho={rho} is not in [0, 1]")
        self.rho = rho
        self._share: Tensor | None = None

    def between(self, state: State, turn: Turn, start: Tensor, layers: int, clock: list[int] | None) -> Turn:
        turn.extra = [[int(n * self.rho) for n in turn.n_probed]] * layers
        if self.rho == 0:
            turn.n_probed = [0] * state.slots
            return turn
        if self._share is None or len(self._share) != state.positions + 1:
            # Looked up: not every device multiplies as Python does.
            shares = [int(n * self.rho) for n in range(state.positions + 1)]
            self._share = torch.tensor(shares, device=state.device)
        turn.amount = self._share[turn.probed.sum(1)].expand(layers, -1)
        return turn
