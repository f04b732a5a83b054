"""One step of every live slot: plan, forward, draft, commit, verify, commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_dllm.kernels.head_confidence import (
    HeadOut,
    HeadSpec,
    Sampling,
    confidence,
    head_confidence,
    head_logits,
)

from .constants import where
from .forward import Context, compact
from .method import CachePolicy, Method, PassOut, Search, Second, Verifier
from .noise import CounterNoise, Noise, TorchCPUNoise
from .rows import count_rows
from .state import State
from .types import Candidates, Draft, Lanes, Plan


@dataclass(frozen=True)
class Vocabulary:
    """Which ids may be produced.

    Attributes:
        n_tokens: ids at or beyond it lie outside the tokenizer.
        mask_id: never produced.
        eos_ids: what ``suppress = 1`` (``eos="suppress_logits"``) removes.
        quiet_ids: what ``suppress = 2`` (``eos="suppress_confidence"``) commits last and ``suppress = 3`` (gaps of a
            fixed length) removes: EOS and end of turn.
    """

    n_tokens: int
    mask_id: int
    eos_ids: tuple[int, ...] = ()
    quiet_ids: tuple[int, ...] = ()


@dataclass
class Hints:
    """What the host knows of the live requests, so that rare paths cost nothing when nobody needs them."""

    sampling: bool = False
    filters: bool = False
    suppress: bool = False


@dataclass
class StepRecord:
    """What happened in a step, as device tensors (nothing is copied unless somebody looks).

    ``passes`` are in order. ``take`` [S, C] are commits by confidence; ``search`` and ``accepted`` [S, K] the
    drafts under test and those accepted; ``step`` [S] is the step number before the step.
    """

    step: Tensor
    cand: Candidates
    draft: Draft
    take: Tensor
    passes: list[PassOut]
    search: Search | None = None
    accepted: Tensor | None = None
    second: Second | None = None
    swept: tuple[int, ...] = ()


class TwoPass(Verifier):
    """A verifier that runs a second pass after the commits by confidence."""

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
        """The drafts to test and the rows of the second pass; its reads [S, K] are the mask views."""
        raise NotImplementedError

    def accept(self, state: State, search: Search, second: Second) -> Tensor:
        """Accepted drafts, [S, K] bool, a prefix of the search order."""
        raise NotImplementedError


class Folded(Verifier):
    """A verifier whose rows ride in the denoise pass (folded branch decoding)."""

    folded = True

    def fold(
        self, state: State, lanes: Lanes, cand: Candidates, plan: Plan, ctx: Context
    ) -> tuple[Search, Plan]:
        """Drafts left from the last step, and ``plan`` with the branch rows added.

        The plan's reads become [S, C * (K + 1)]: the canvas candidates, then each branch's.
        """
        raise NotImplementedError

    def entries(self, search: Search) -> int:
        """What the pass reads for each candidate: the canvas and each branch (one a draft, unless it says so)."""
        return search.pos.shape[1] + 1

    def settle(
        self, state: State, search: Search, cand: Candidates, seen: HeadOut
    ) -> tuple[Tensor, Draft, Second]:
        """Decide from what the canvas rows and the branches saw.

        Args:
            seen: fields are [S, K + 1, C]; entry 0 is the canvas, entry k branch k; ``prob_wanted`` of entry k
                is the probability of draft k's token.

        Returns:
            Accepted drafts [S, K]; the draft of the rest of the step [S, C] (branch a's); what was seen.
        """
        raise NotImplementedError

    def confirms(self, state: State, draft: Draft, accepted: Tensor) -> Tensor:
        """Commits by confidence that stand, [S, C] bool: none is forced where a draft was accepted."""
        raise NotImplementedError

    def remember(self, state: State, cand: Candidates, draft: Draft, taken: Tensor) -> None:
        """Keep the drafts of the uncommitted candidates for the next step."""
        raise NotImplementedError


class Decoder:
    """Runs steps of one method over the slots of a state.

    Args:
        ctx: model, cache and rotary tables.
        state: the slots.
        method: cache policy, schedule, rule and verifier.
        vocabulary: which ids may be produced.
        noise: where random numbers come from.
    """

    def __init__(
        self, ctx: Context, state: State, method: Method, vocabulary: Vocabulary, noise: Noise | None = None
    ) -> None:
        self.ctx, self.state, self.method = ctx, state, method
        self.vocabulary = vocabulary
        self.noise: Noise = noise or CounterNoise()
        self.hints = Hints()
        method.rule.bind(ctx, state, vocabulary)

    @torch.inference_mode()
    def step(self, lanes: Lanes) -> StepRecord:
        """One commit round of every live slot."""
        state, method, policy = self.state, self.method, self.method.cache
        before = state.step.clone()
        if method.verifier is not None:
            self.ctx.kv.reserve(method.verifier.room(lanes.width))
        cand = method.schedule.candidates(state, lanes.width)
        cand = Candidates(cand.pos, cand.valid & state.running[:, None])
        lanes = self._with_due(lanes)
        self.noise.begin(state.num["seed"], state.step, max(lanes.total[s] for s in lanes.live))
        cand = policy.begin(state, cand, self.noise)
        plan = policy.plan(state, lanes, cand, self.ctx) if policy.loop == "compact" else None
        if isinstance(method.verifier, Folded):
            record = self._folded(method.verifier, lanes, cand, plan)
        else:
            record = self._two_pass(lanes, cand, plan)
        record.step, record.swept = before, tuple(lanes.sweep)
        policy.observe(state, lanes, record)
        state.end_step(method.schedule.done(state))
        return record

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """The canvas in slot ``source`` goes on in the free slot ``target``; ``source`` is then as a cleared slot.

        Its state, its keys and values with the scratch places, and what the method keeps of it are copied on the
        device, behind the work that is queued; the host waits for nothing.

        Raises:
            ValueError: a part of the method does not say what it keeps by slot.
        """
        own = self.method.slot_tensors()
        if own is None:
            raise ValueError(f"method {self.method.name} has canvases that stay in their slots")
        kv = self.ctx.kv
        for tensor in (*kv.keys, *kv.values, *own):
            tensor[target] = tensor[source]
        self.state.move(source, target)

    @torch.inference_mode()
    def ask(self, lanes: Lanes) -> tuple[Lanes, bool]:
        """``lanes`` as the next step will run them, and whether that step is steady. Reads that back, at once.

        For policies that :attr:`CachePolicy.asks`. Slots whose sweep is due sweep. Slots enter their blocks as they do
        in the step, where they then are already.
        """
        policy, state = self.method.cache, self.state
        self.method.schedule.candidates(state, lanes.width)
        questions = {"due": policy.due(state), "odd": policy.odd(state), "fed": policy.counts(state)}
        asked = {name: answer.long() for name, answer in questions.items() if answer is not None}
        read = dict(zip(asked, torch.stack(list(asked.values())).tolist(), strict=True)) if asked else {}
        due, odd, fed = (read.get(name, [0] * state.slots) for name in questions)
        lanes = _moved_to_sweep(lanes, due)
        # Where every slot is done already there is one row, which is not valid.
        most = max(1, *(fed[s] for s in lanes.run)) if "fed" in read and lanes.run else 0
        return replace(lanes, asked=True, fed=most), not (lanes.sweep or any(odd[s] for s in lanes.run))

    def _with_due(self, lanes: Lanes) -> Lanes:
        policy = self.method.cache
        if policy.always_sweeps():
            return replace(lanes, sweep=lanes.live, run=[])
        if not policy.sync or not lanes.run or lanes.asked:
            return lanes
        due = policy.due(self.state)
        return lanes if due is None else _moved_to_sweep(lanes, due.tolist())

    def _two_pass(self, lanes: Lanes, cand: Candidates, plan: Plan | None) -> StepRecord:
        state, method = self.state, self.method
        out = method.cache.run(self.ctx, state, lanes, cand, plan)
        self._count(out)
        draft = self._read(out.hidden, cand, lanes)
        take = method.rule.commit(state, cand, draft, self.noise) & cand.valid
        take = method.schedule.revise(state, cand, take)
        self._commit(lanes, cand, draft, take)
        record = StepRecord(state.step, cand, draft, take, [out])
        if isinstance(method.verifier, TwoPass):
            self._verify(method.verifier, lanes, record)
        return record

    def _verify(self, verifier: TwoPass, lanes: Lanes, record: StepRecord) -> None:
        state = self.state
        search, plan = verifier.expand(
            state, lanes, record.cand, record.draft, record.take, self.method.cache, self.ctx
        )
        back = compact(self.ctx, plan)
        out = PassOut(back.hidden, count_rows(state, plan.rows), plan.rows, kind="verify")
        self._count(out)
        seen = self._head(back.hidden, search.token, lanes)
        assert seen.prob_wanted is not None
        shape = search.pos.shape
        second = Second(*(t.view(shape) for t in (seen.token, seen.prob, seen.prob_wanted)))
        accepted = verifier.accept(state, search, second)
        self._accept(search, second, accepted)
        record.passes.append(out)
        record.search, record.accepted, record.second = search, accepted, second

    def _folded(self, verifier: Folded, lanes: Lanes, cand: Candidates, plan: Plan | None) -> StepRecord:
        state, method = self.state, self.method
        assert plan is not None
        search, plan = verifier.fold(state, lanes, cand, plan, self.ctx)
        out = method.cache.run(self.ctx, state, lanes, cand, plan)
        self._count(out)
        shape = (state.slots, verifier.entries(search), cand.pos.shape[1])
        # The last branch tests nothing, so what is wanted of it is any token.
        tested = torch.cat([search.token, search.token[:, :1]], 1)[:, : shape[1]]
        flat = self._head(out.hidden, tested[..., None].expand(shape).flatten(1), lanes)
        assert flat.prob_wanted is not None
        parts = (flat.token, flat.prob, flat.measure, flat.prob_wanted)
        seen = HeadOut(*(t.view(shape) for t in parts))
        accepted, draft, second = verifier.settle(state, search, cand, seen)
        self._accept(search, second, accepted)
        left = Candidates(cand.pos, cand.valid & state.wanted.gather(1, cand.pos))
        take = method.rule.commit(state, left, draft, self.noise) & left.valid
        take &= verifier.confirms(state, draft, accepted)
        take = method.schedule.revise(state, left, take)
        self._commit(lanes, left, draft, take)
        verifier.remember(state, left, draft, take)
        return StepRecord(state.step, left, draft, take, [out], search, accepted, second)

    def _accept(self, search: Search, second: Second, accepted: Tensor) -> None:
        """Commit verified drafts; they lie within 1 - prod(c) of what their views say."""
        self.state.commit(search.pos, search.token, second.prob_draft, accepted)
        self.state.by_verify.add_(accepted.sum(1))
        self.state.bound.add_(1 - where(accepted, second.prob_draft, 1.0).prod(1))

    def _count(self, out: PassOut) -> None:
        self.state.rows.add_(out.recomputed)
        self.state.nfe.add_(out.recomputed > 0)

    def _commit(self, lanes: Lanes, cand: Candidates, draft: Draft, take: Tensor) -> None:
        for main, shadow in lanes.partner.items():
            take[shadow] = take[main]
            draft.token[shadow], draft.prob[shadow] = draft.token[main], draft.prob[main]
        self.state.commit(cand.pos, draft.token, draft.prob, take)
        count = take.sum(1)
        bound = confidence_bound(draft.prob, take, count)
        self.state.by_confidence.add_(count)
        self.state.unbounded.add_(count * (bound >= 1))
        self.state.bound.add_(bound)
        for main, shadow in lanes.partner.items():
            self.state.stop_pos[shadow] = self.state.stop_pos[main]

    def _spec(self, rows_of: int, cand: Candidates | None) -> HeadSpec:
        """Head options for ``rows_of`` reads a slot."""
        state, vocabulary, rule = self.state, self.vocabulary, self.method.rule
        suppress = sampling = None
        if self.hints.suppress:
            suppress = state.num["suppress"].repeat_interleave(rows_of)
        if self.hints.sampling and cand is not None:
            numbers = {k: state.num[k].repeat_interleave(rows_of) for k in ("temperature", "top_p", "top_k")}
            noise, pos, valid = self.noise, cand.pos, cand.valid
            choose = counter = None
            if isinstance(noise, TorchCPUNoise):
                choose = partial(noise.choose, valid=valid)
            elif isinstance(noise, CounterNoise):
                counter = partial(noise.token_hashes, pos)
            sampling = Sampling(
                **numbers,
                uniform=partial(noise.per_token, pos),
                categorical=rule.categorical,
                filters=self.hints.filters,
                choose=choose,
                counter=counter,
            )
        return HeadSpec(
            vocabulary.n_tokens,
            vocabulary.mask_id,
            rule.measure,
            suppress,
            vocabulary.eos_ids,
            vocabulary.quiet_ids,
            sampling,
            shard=self.ctx.model.shard,
        )

    def _read(self, hidden: Tensor, cand: Candidates, lanes: Lanes) -> Draft:
        """Drafts of the candidates from their hidden states [S, C, d]."""
        shape = hidden.shape[:2]
        spec, rows = self._spec(shape[1], cand), hidden.flatten(0, 1)
        if lanes.partner or self.method.rule.reads_logits:
            logits = head_logits(rows, self.ctx.model.head)
            if lanes.partner:
                logits = self._guide(logits.unflatten(0, shape), lanes).flatten(0, 1)
            self.method.rule.see(self.state, cand, logits.view(*shape, -1))
            out = confidence(logits, spec)
        elif not self.hints.sampling:
            out = self._confidence(hidden, spec, lanes)
        else:
            out = head_confidence(rows, self.ctx.model.head, spec, impl=self.ctx.kernels.head_confidence)
        return Draft(*(t.view(shape) for t in (out.token, out.prob, out.measure)))

    def _guide(self, logits: Tensor, lanes: Lanes) -> Tensor:
        """Classifier-free guidance (LLaDA): unconditional + (w + 1) (conditional - unconditional)."""
        for main, shadow in lanes.partner.items():
            base = logits[shadow]
            logits[main] = base + (self.state.num["cfg_scale"][main] + 1) * (logits[main] - base)
        return logits

    def _head(self, hidden: Tensor, wanted: Tensor, lanes: Lanes) -> HeadOut:
        spec = replace(self._spec(wanted.shape[1], None), wanted=wanted.flatten(), measure="prob")
        return self._confidence(hidden, spec, lanes)

    def _confidence(self, hidden: Tensor, spec: HeadSpec, lanes: Lanes) -> HeadOut:
        """The head over hidden states [S, R, d], flat; slots behind the last live one are left out, and read 0."""
        leading, (slots, width, _) = 1 + max(lanes.live), hidden.shape
        kept = leading * width
        part = replace(
            spec,
            suppress=None if spec.suppress is None else spec.suppress[:kept],
            wanted=None if spec.wanted is None else spec.wanted[:kept],
        )
        out = head_confidence(
            hidden[:leading].flatten(0, 1), self.ctx.model.head, part, impl=self.ctx.kernels.head_confidence
        )
        if leading == slots:
            return out
        rest = (0, slots * width - kept)
        wanted = None if out.prob_wanted is None else F.pad(out.prob_wanted, rest)
        return HeadOut(F.pad(out.token, rest), F.pad(out.prob, rest), F.pad(out.measure, rest), wanted)


def _moved_to_sweep(lanes: Lanes, due: Sequence[int]) -> Lanes:
    """``lanes`` with the running slots that are ``due`` among those that sweep."""
    moved = [s for s in lanes.run if due[s]]
    return replace(lanes, sweep=lanes.sweep + moved, run=[s for s in lanes.run if not due[s]])


def confidence_bound(prob: Tensor, take: Tensor, n: Tensor | None = None) -> Tensor:
    """Bound on the distance of tokens committed together from their joint distribution, [S] float32.

    Fast-dLLM's theorem (arXiv 2505.22618, Theorem 1): n tokens, each with probability above 1 - delta, are within
    (3 n - 1) / 2 delta in total variation if (n + 1) delta <= 1; there is no bound (1) otherwise. One token alone
    is within delta, whatever delta.

    Args:
        prob: [S, C] float32; ``take`` [S, C] bool; ``n`` [S] int64, how many are taken, if that is known.
    """
    n = take.sum(1) if n is None else n
    # Of no token delta is 0.
    delta = 1 - where(take, prob, 1.0).amin(1)
    joint = where((n + 1) * delta <= 1, (1.5 * n - 0.5) * delta, 1.0)
    return torch.where(n <= 1, delta, joint.clamp_max(1.0))
