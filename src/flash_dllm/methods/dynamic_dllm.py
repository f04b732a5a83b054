"""Dynamic-dLLM (arXiv 2606.26120): dynamic cache update (DCU, a cache) and adaptive parallel decoding (APD).

**DCU** is dLLM-Cache (refreshes every Kp and Kr passes, layer 0 in full) with another choice of rows in
between: a window of rows around the last commit, and of the other response rows those that moved furthest,
as many as the layer's budget allows. Row j moved by d_j = 1 - cosine between now and the pass before. The
published code and the paper differ twice; the defaults are the code's:

- ``budget="released"``: ``layer_budget`` rows in the second pass, then int(32 ``layer_budget`` / L), since
  the code multiplies by a hard-wired 32 layers and by softmax weights that are uniform in float32.
  ``budget="paper"``: a layer gets its share s_l / sum s_k of the last mean d. Layer 0, computed in full,
  takes no part, so the whole is ``layer_budget`` (L - 1): equal shares give each layer ``layer_budget``.
- ``compare="value"``: d from the projected values, which replace the cached ones of all response rows.
  ``compare="input"`` (paper): d from the normed layer inputs; the values of other rows stay as they were.

**APD** keeps a threshold tau for each position (``mode=2``, the paper), for the request (``mode=1``), or
constant (``mode=0``, Fast-dLLM's). From the second pass on, tau <- tau - alpha c + beta H with c = 1 - the
second largest probability and H = 1 - cosine between the position's distributions now and in the pass
before; mode 1 takes the means over the masks of the block. Masks of the block with confidence >= tau are
committed, at least the best. tau_0 is the request's ``epsilon``; tau is neither clamped nor reset at block
borders.

Defaults, LLaDA and all tasks: window 32, layer budget 32, Kp = Kr = 5000 (the demo: 100/7), alpha 0.01, beta
0.15, tau_0 0.9 (1.0 in the code's signature); GSM8K has 256 tokens in blocks of 8. There is no public code
for Dream: DCU on shifted models is ours, with dLLM-Cache's ``split``, and Dream's defaults are LLaDA's.

Cost of a step above layer 0: window + budget rows, and N value projections with ``compare="value"``; layer
0: T rows. Memory: as dLLM-Cache, and [T, d] a layer more with ``compare="input"``. APD reads all masked
positions in every pass and keeps their distributions: 4 V bytes a position (LLaDA-8B: 0.5 MiB).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_dllm.core.delta import DeltaOut, Turn
from flash_dllm.core.method import Blocks, Rule, at_least_best
from flash_dllm.core.noise import Noise
from flash_dllm.core.select import leftmost
from flash_dllm.core.state import State
from flash_dllm.core.types import GIVEN, Candidates, Draft, Lanes
from flash_dllm.models.config import ModelConfig

from .dllm_cache import IntervalCache
from .fast_dllm import Threshold

BUDGETS = ("released", "paper")
COMPARISONS = ("value", "input")
RELEASED_LAYERS = 32


class DynamicCache(IntervalCache):
    """DCU.

    Args:
        window_size: rows around the last commit: one more if even, all rows from the response's length on.
        layer_budget: other rows a layer.
        kp, kr, split: see :class:`IntervalCache`.
        budget: "released" or "paper"; ``compare``: "value" or "input"; see the module.

    Raises:
        ValueError: a negative number or an unknown name, and as :class:`IntervalCache`.
    """

    name = "dynamic"

    def __init__(
        self,
        window_size: int = 32,
        layer_budget: int = 32,
        kp: int = 5000,
        kr: int = 5000,
        budget: str = "released",
        compare: str = "value",
        split: str = "predicted",
    ) -> None:
        super().__init__(kp, kr, split)
        for key, value, known in (("budget", budget, BUDGETS), ("compare", compare, COMPARISONS)):
            if value not in known:
                raise ValueError(f"unknown {key} {value!r}; known: {', '.join(known)}")
        if window_size < 0 or layer_budget < 0:
            raise ValueError(f"negative window_size={window_size} or layer_budget={layer_budget}")
        self.window, self.layer_budget, self.budget = window_size, layer_budget, budget
        self.compare_inputs = compare == "input"
        self.moved: Tensor | None = None
        # How the paper's budget is shared out follows from what moved in the pass before.
        self.asks = budget == "released"

    def slot_tensors(self) -> tuple[Tensor, ...] | None:
        own = super().slot_tensors()
        return own if own is None or self.moved is None else (*own, self.moved.T)

    def odd(self, state: State) -> Tensor | None:
        refreshes = super().odd(state)
        assert refreshes is not None
        # Up to the second pass the released budget is another one.
        return refreshes | (state.step < 2)

    def reset(self, slot: int) -> None:
        if self.moved is not None:
            self.moved[:, slot] = 0.0

    def between(self, state: State, turn: Turn, start: Tensor, layers: int, clock: list[int] | None) -> Turn:
        sizes, size, odd_window = turn.n_probed, turn.probed.sum(1)[:, None], self.window // 2 * 2 + 1
        # Bounds stay bounds: of more rows the window is never a narrower one.
        widths = [n if self.window >= n else min(n, odd_window) for n in sizes]
        width = torch.where(size <= self.window, size, size.clamp_max(odd_window))
        answered = torch.where(state.known & (state.order >= state.first[:, None]), state.committed_at, GIVEN)
        newest = answered == answered.amax(1, keepdim=True)
        centre = torch.where(newest, state.order, -1).amax(1, keepdim=True) - start
        last = (state.total[:, None] - start - width).clamp_min(0)
        begin = start + torch.minimum((centre - self.window // 2).clamp_min(0), last)
        turn.fixed = turn.fixed | (turn.probed & (state.order >= begin) & (state.order < begin + width))
        turn.n_fixed = [a + b for a, b in zip(turn.n_fixed, widths, strict=True)]
        wanted = self.budgets(state, layers, clock)
        # The window of fewer rows may be narrower than that of the bound; window and rest together are within it.
        room = [n - w for n, w in zip(sizes, widths, strict=True)]
        turn.extra = [[min(b, r) for b, r in zip(line, room, strict=True)] for line in wanted]
        if self.budget == "released":
            most = torch.where(state.step < 2, self.layer_budget, self._later(layers))
            turn.amount = torch.minimum(most, (size - width)[:, 0]).expand(layers, -1)
        else:
            turn.amount = torch.tensor(turn.extra, device=state.device)
        return turn

    def _later(self, layers: int) -> int:
        """The released budget of a layer from the third pass on."""
        return RELEASED_LAYERS * self.layer_budget // layers

    def budgets(self, state: State, layers: int, clock: list[int] | None) -> list[list[int]]:
        """Rows that each layer may recompute beside the window, a list of slots for each layer."""
        plain = self.layer_budget
        if clock is None:
            return [[self._later(layers)] * state.slots] * layers
        if self.budget == "released":
            return [[plain if c < 2 else self._later(layers) for c in clock]] * layers
        if self.moved is None:
            return [[plain] * state.slots] * layers
        moved: list[list[float]] = self.moved.tolist()
        whole = [sum(column) for column in zip(*moved, strict=True)]
        pot = plain * (layers - 1)
        # Up to a request's first probe ``moved`` is its former tenant's.
        shared = [c > 1 and w > 0 for c, w in zip(clock, whole, strict=True)]
        return [
            [int(pot * m / w) if share else plain for m, w, share in zip(line, whole, shared, strict=True)]
            for line in moved
        ]

    def learn(self, state: State, lanes: Lanes, out: DeltaOut) -> None:
        if self.moved is None:
            self.moved = torch.zeros_like(out.moved)
        # In place: a recorded step goes on writing here.
        torch.where(out.moved.sum(0) > 0, out.moved, self.moved, out=self.moved)


class BlocksAhead(Blocks):
    """Blocks whose steps read every position still to be decoded; the rule keeps to the block."""

    name = "blocks-ahead"

    def width(self, lengths: list[int], blocks: list[int]) -> int:
        return max(lengths)

    def candidates(self, state: State, width: int) -> Candidates:
        self.enter(state)
        return Candidates(*leftmost(state.wanted, width))


class Adaptive(Rule):
    """APD.

    Args:
        mode: 2 for a threshold a position, 1 for one a request, 0 for a constant.
        alpha, beta: weights of the second largest probability and of the change since the last pass.

    Attributes:
        tau: thresholds by distance from the first masked position, [S, W + 1] float32; one column is spare.
        seen: distributions of the last pass, [S, W + 1, V] float32, likewise.

    Raises:
        ValueError: an unknown mode.
    """

    name = "adaptive"
    options = Threshold.options

    def __init__(self, mode: int = 2, alpha: float = 0.01, beta: float = 0.15) -> None:
        if mode not in (0, 1, 2):
            raise ValueError(f"unknown mode {mode}; known: 0, 1, 2")
        self.mode, self.alpha, self.beta = mode, alpha, beta
        # What it keeps grows with the longest answer, so a recorded step would go on with what was there before.
        self.sync = mode != 0
        self.tau: Tensor | None = None
        self.seen: Tensor | None = None

    def slot_tensors(self) -> tuple[Tensor, ...] | None:
        return tuple(t for t in (self.tau, self.seen) if t is not None)

    def bytes_per_position(self, config: ModelConfig, size: int) -> int:
        """The last distribution of every position, and what comparing it with the new one takes, in float32."""
        tensors = 2 if self.mode == 0 else 8
        return tensors * config.vocab_size * torch.float32.itemsize

    def in_block(self, state: State, cand: Candidates) -> Tensor:
        """Candidates up to the end of the current block, [S, C] bool."""
        end = state.first + (state.block + 1) * state.num["block_length"]
        return cand.valid & (cand.pos < end[:, None])

    def _column(self, state: State, cand: Candidates) -> Tensor:
        assert self.tau is not None
        return torch.where(cand.valid, cand.pos - state.first[:, None], self.tau.shape[1] - 1)

    def _grow(self, slots: int, width: int, like: Tensor) -> None:
        old = 0 if self.tau is None else self.tau.shape[1] - 1
        if self.tau is not None and self.tau.shape[0] == slots and old >= width:
            return
        tau, seen = like.new_zeros(slots, width + 1), like.new_zeros(slots, width + 1, like.shape[-1])
        if self.tau is not None and self.seen is not None and self.tau.shape[0] == slots:
            tau[:, :old], seen[:, :old] = self.tau[:, :old], self.seen[:, :old]
        self.tau, self.seen = tau, seen

    def see(self, state: State, cand: Candidates, logits: Tensor) -> None:
        if self.mode == 0:
            return
        self._grow(state.slots, cand.pos.shape[1], logits)
        assert self.tau is not None and self.seen is not None
        where = (torch.arange(state.slots, device=state.device)[:, None], self._column(state, cand))
        probs = logits.softmax(-1)
        surprise = 1 - F.cosine_similarity(probs, self.seen[where], dim=-1)
        self.seen[where] = probs
        change = self.beta * surprise - self.alpha * (1 - probs.topk(2, dim=-1).values[..., 1])
        if self.mode == 1:
            inside = self.in_block(state, cand)
            total = torch.where(inside, change, 0).sum(1, keepdim=True)
            change = (total / inside.sum(1, keepdim=True).clamp_min(1)).expand_as(change)
        start = state.num["epsilon"][:, None].expand_as(change)
        self.tau[where] = torch.where(state.step[:, None] == 0, start, self.tau[where] + change)

    def commit(self, state: State, cand: Candidates, draft: Draft, noise: Noise) -> Tensor:
        tau = state.num["epsilon"][:, None]
        if self.tau is not None:
            tau = self.tau.gather(1, self._column(state, cand))
        return at_least_best(draft.confidence >= tau, draft.confidence, self.in_block(state, cand))
