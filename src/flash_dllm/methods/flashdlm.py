"""FlashDLM (arXiv 2505.21467): FreeCache, and Guided Diffusion by a small autoregressive model.

FreeCache: the keys of the prompt and of finished blocks are frozen for good; a step recomputes
the current block and everything behind it. ``freeze`` says what a finished block leaves behind:
``last-step`` (default, as released): its keys of its last step, in which the tokens committed by that very
step were still MASK; ``unmasked`` (the paper: "once the block is fully unmasked"): it is recomputed once
more, in the first step of the next block; ``prompt``: nothing but the prompt is ever frozen (as released
with guidance). Dream's rows are shifted, so there the frozen prefix ends one position earlier. Its traces
could not be had: the Dream version is ours after the public text, with whatever decoding is chosen. No
refresh.

Guided diffusion: the diffusion model drafts every masked position, a causal guide reads the
draft from the left, position j accepted by ``strategy`` from p_j = p(. | all before it), until the first
refusal: ``deterministic`` (default) the draft is the argmax; ``topk`` it is among the ``accept_top_k`` best;
``topk_relative`` also p >= ``accept_ratio`` max p; ``dynamic_threshold`` p > ``accept_threshold``;
``aggressive`` top k, or p > 0.05, or inside the nucleus of mass ``accept_ratio``; ``original`` u < p with u
uniform. ``variant="judge"`` (default, the paper) writes accepted drafts, at least the first; ``correct`` (a
second released file) writes the guide's own token at the refusal: the best other one, or for the last three
strategies one drawn without the draft.

Defaults: block 32 (LLaDA), length 1024, ``chunk`` 32, k 5, ratio .95, threshold .1; per-task values are not
published. Cost a step: FreeCache T - start rows, nothing stored beside K and V. Guided: the rows of the
cache policy (over ``freecache`` with ``freeze="prompt"``: N), and of the guide ``chunk`` rows a pass, one
pass more for every full chunk accepted; the guide's weights, its K and V of every slot, and [slots x chunk,
V] float32 logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from flash_dllm.core.forward import Context
from flash_dllm.core.method import Rule
from flash_dllm.core.noise import Noise
from flash_dllm.core.select import leftmost
from flash_dllm.core.state import State
from flash_dllm.core.step import Vocabulary
from flash_dllm.core.types import NEVER, Candidates, Draft
from flash_dllm.kernels.head_confidence import head_logits
from flash_dllm.models.config import ModelConfig
from flash_dllm.models.layers import Model

from . import MethodError
from .fast_dllm import BlockCache
from .guide import Guide

FREEZE = ("last-step", "unmasked", "prompt")
STRATEGIES = ("deterministic", "topk", "topk_relative", "dynamic_threshold", "aggressive", "original")
VARIANTS = ("judge", "correct")
AGGRESSIVE_FLOOR = 0.05


class FreeCache(BlockCache):
    """Recompute the block and everything behind it; what lies before is frozen.

    Args:
        family: of the model; a shifted one (Dream) is fed from one position earlier.
        freeze: one of :data:`FREEZE`.
    """

    name = "freecache"

    def __init__(self, family: str = "llada", freeze: str = "last-step") -> None:
        if freeze not in FREEZE:
            raise MethodError(f"unknown freeze {freeze!r}; known: {', '.join(FREEZE)}")
        self.shift, self.freeze = int(family == "dream"), freeze

    def due(self, state: State) -> Tensor | None:
        return None

    def fed(self, state: State) -> Tensor:
        if self.freeze == "prompt":
            return state.inside & (state.order >= state.first[:, None])
        size = state.num["block_length"]
        start = state.block * size
        if self.freeze == "unmasked":
            # The last block was the one of the last commits; blocks without masks are passed over.
            last = torch.where(state.committed_at == state.step[:, None] - 1, state.order, NEVER).amin(1)
            before = (last - state.first) // size * size
            start = torch.where(state.block_step == 0, torch.minimum(start, before), start)
        return state.inside & (state.order >= (state.first + start - self.shift)[:, None])


@dataclass(frozen=True)
class Acceptance:
    """Which drafts a guide accepts, see the module's text."""

    strategy: str
    top_k: int
    ratio: float
    threshold: float

    def __call__(self, logits: Tensor, draft: Tensor, uniform: Tensor) -> Tensor:
        """``logits`` [M, V] float32 of the guide, ``draft`` [M] int64, ``uniform`` [M] -> [M] bool."""
        mine, ids = logits.gather(1, draft[:, None]), torch.arange(logits.shape[1], device=logits.device)
        better = (logits > mine) | ((logits == mine) & (ids < draft[:, None]))
        rank = better.sum(1)
        probs = logits.softmax(1)
        p = probs.gather(1, draft[:, None])[:, 0]
        match self.strategy:
            case "deterministic":
                return rank == 0
            case "topk":
                return rank < self.top_k
            case "topk_relative":
                return (rank < self.top_k) & (p >= self.ratio * probs.amax(1))
            case "dynamic_threshold":
                return p > self.threshold
            case "aggressive":
                nucleus = (probs * better).sum(1) < self.ratio
                return (rank < self.top_k) | (p > AGGRESSIVE_FLOOR) | nucleus
            case _:
                return uniform < p

    @property
    def draws(self) -> bool:
        """Whether a correction is drawn from the guide's distribution instead of being its best token."""
        return self.strategy in ("dynamic_threshold", "aggressive", "original")


@dataclass
class Verdict:
    """What the guide made of a draft, each [S].

    ``refused``: the first position refused, :data:`NEVER` for none; ``end``: no draft from here on was
    judged; ``read``: leading positions whose keys the guide has, drafts included; ``token`` and ``prob``: the
    guide's own choice at the refusal.
    """

    refused: Tensor
    end: Tensor
    read: Tensor
    token: Tensor
    prob: Tensor


class Guided(Rule):
    """Commit the longest prefix of the draft that the guide accepts.

    Args:
        guide: a causal model (family qwen2).
        guide_map: [V of the diffusion model] int64, each id's id in the guide, -1 for none; None for 1:1.
        strategy, variant, accept_top_k, accept_ratio, accept_threshold, chunk: see the module's text.
    """

    name = "guided"
    sync = True
    options = frozenset({"temperature", "top_p", "top_k", "eos"})

    def __init__(
        self,
        guide: Model | None = None,
        guide_map: Tensor | None = None,
        strategy: str = "deterministic",
        variant: str = "judge",
        accept_top_k: int = 5,
        accept_ratio: float = 0.95,
        accept_threshold: float = 0.1,
        chunk: int = 32,
    ) -> None:
        if guide is None:
            raise MethodError("decoding 'guided' needs a guide: option guide, an autoregressive model")
        for name, value, known in (("strategy", strategy, STRATEGIES), ("variant", variant, VARIANTS)):
            if value not in known:
                raise MethodError(f"unknown {name} {value!r} of guided; known: {', '.join(known)}")
        if chunk < 1:
            raise MethodError(f"chunk = {chunk}: the guide must read at least 1 row a pass")
        self._model, self._map = guide, guide_map
        self.accepts = Acceptance(strategy, accept_top_k, accept_ratio, accept_threshold)
        self.corrects, self.chunk = variant == "correct", chunk
        self.random_order = strategy == "original" or (self.corrects and self.accepts.draws)

    def bind(self, ctx: Context, state: State, vocabulary: Vocabulary) -> None:
        self.guide = Guide.bind(self._model, self._map, ctx, state)
        self.accepted = torch.zeros_like(state.step)
        self._writable = torch.arange(ctx.model.config.vocab_size, device=state.device) < vocabulary.n_tokens
        self._writable[vocabulary.mask_id] = False
        self._writable &= self.guide.vocab_map >= 0

    def bytes_per_position(self, config: ModelConfig, size: int) -> int:
        """The guide's keys and values."""
        return self._model.config.kv_bytes_per_position(self._model.embed.element_size())

    def notes(self, slot: int) -> dict[str, float]:
        return {"guide_passes": int(self.guide.passes[slot])}

    def commit(self, state: State, cand: Candidates, draft: Draft, noise: Noise) -> Tensor:
        guide, wide = self.guide, state.positions
        target = torch.where(cand.valid, cand.pos, wide)
        text = pad(state.ids, (0, 1)).scatter(1, target, draft.token)[:, :wide]
        drafted = pad(torch.zeros_like(state.masked), (0, 1)).scatter(1, target, True)[:, :wide]
        head = torch.where(drafted, state.order, NEVER).amin(1)
        self._catch_up(state, text, head)
        verdict = self._judge(state, text, drafted, head, noise)
        take = cand.valid & (cand.pos < torch.minimum(verdict.refused, verdict.end)[:, None])
        self.accepted = take.sum(1)
        if self.corrects:
            here = cand.valid & (cand.pos == verdict.refused[:, None])
            draft.token = torch.where(here, verdict.token[:, None], draft.token)
            draft.prob = torch.where(here, verdict.prob[:, None], draft.prob)
            guide.read = torch.minimum(verdict.read, verdict.refused)
            return take | here
        guide.read = torch.minimum(verdict.read, torch.maximum(verdict.refused, head + 1))
        return take | (cand.valid & (cand.pos == head[:, None]))

    def _catch_up(self, state: State, text: Tensor, head: Tensor) -> None:
        """Let the guide read what lies before the row that predicts the first draft, ``head`` [S]."""
        guide, fresh = self.guide, state.step == 0
        guide.read = torch.where(fresh, 0, guide.read)
        guide.passes = torch.where(fresh, 0, guide.passes)
        todo = (state.order >= guide.read[:, None]) & (state.order < head[:, None] - 1)
        todo &= (head < NEVER)[:, None]
        widest = int(todo.sum(1).max())
        if widest:
            guide.run(state, text, *leftmost(todo, widest))

    def _judge(self, state: State, text: Tensor, drafted: Tensor, head: Tensor, noise: Noise) -> Verdict:
        """Read the draft chunk by chunk until something is refused; nothing is read behind a drafted stop."""
        stops = drafted & state.num["stop_at_eos"][:, None]
        stops &= (text[..., None] == state.stop_ids[:, None]).any(-1)
        last = torch.where(drafted, state.order, -1).amax(1)
        end = torch.minimum(last, torch.where(stops, state.order, NEVER).amin(1)) + 1
        # Nothing precedes position 0, so its draft stands.
        start = torch.where(head < NEVER, head.clamp_min(1), end)
        none = torch.full_like(head, NEVER)
        out = Verdict(none, end, start - 1, torch.zeros_like(head), torch.zeros_like(state.bound))
        while bool((going := (start < end) & (out.refused == NEVER)).any()):
            pos = start[:, None] + torch.arange(self.chunk, device=state.device)
            valid = going[:, None] & (pos < end[:, None])
            pos = torch.where(valid, pos, 1)
            hidden = self.guide.run(state, text, pos - 1, valid)
            live = valid & drafted.gather(1, pos)
            ok, token, prob = self._ask(hidden[live], text.gather(1, pos)[live], pos, live, noise)
            good = torch.ones_like(live).masked_scatter(live, ok)
            fails, column = going & ~good.all(1), good.long().argmin(1, keepdim=True)
            for name, values in (("refused", pos[live]), ("token", token), ("prob", prob)):
                found = values.new_zeros(pos.shape).masked_scatter(live, values).gather(1, column)[:, 0]
                setattr(out, name, torch.where(fails, found, getattr(out, name)))
            start = torch.where(going, torch.minimum(start + self.chunk, end), start)
            out.read = torch.where(going, start - 1, out.read)
        return out

    def _ask(
        self, hidden: Tensor, drafts: Tensor, pos: Tensor, live: Tensor, noise: Noise
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Whether the guide accepts each draft [M], its own token instead and that one's probability."""
        ids = self.guide.vocab_map
        logits = head_logits(hidden, self.guide.ctx.model.head)
        uniform = torch.zeros_like(pos, dtype=torch.float32)
        if self.accepts.strategy == "original":
            uniform = noise.per_position(pos, live)
        ok = self.accepts(logits, ids[drafts].clamp_min(0), uniform[live]) & (ids[drafts] >= 0)
        if not self.corrects:
            return ok, drafts, torch.ones_like(drafts, dtype=torch.float32)
        own = logits[:, ids.clamp_min(0)].masked_fill(~self._writable, -torch.inf)
        own = own.scatter(1, drafts[:, None], -torch.inf)
        token = own.argmax(1)
        if self.accepts.draws:
            # Numbers behind those that may have drawn the draft; Gumbel noise because a draw by cumulated mass hangs
            # on rounding at every boundary.
            vocab = own.shape[1]
            uniform_token = noise.per_token(pos, 2 * vocab)[live.flatten(), vocab:]
            token = (own.double() - torch.log(-torch.log(uniform_token))).argmax(1)
        return ok, token, logits.softmax(1).gather(1, ids[token][:, None])[:, 0]
