"""Token choice and confidence where each rank has the logits of a part of the vocabulary only.

Ranks exchange a few numbers a row, never logits: the best of their tokens, its logit, and the logsumexp of what
they hold. Every rank then does the same arithmetic on the same numbers, so all of them choose alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_dllm.kernels.ranks import VocabShard

from .ref import NEG_INF, HeadOut, HeadSpec, Sampling, gumbel, tempered, without


def sharded_confidence(logits: Tensor, spec: HeadSpec, shard: VocabShard) -> HeadOut:
    """What :func:`flash_dllm.kernels.head_confidence.confidence` gives for the whole vocabulary.

    Args:
        logits: [M, shard.stop - shard.start] float32, the columns of this rank.
        spec: see :class:`HeadSpec`; ids are those of the whole vocabulary.

    Raises:
        ValueError: sampling with top_p or top_k, which rank the whole vocabulary, or with published noise.
    """
    for_confidence, allowed = _masked(logits, spec, shard)
    key: Tensor = allowed
    if spec.sampling is not None:
        key, for_confidence = _drawn(allowed, for_confidence, spec.sampling, shard)
    best, at = key.max(-1)
    own = for_confidence.gather(-1, at[:, None])[:, 0]
    columns = [best, at + shard.start, own, for_confidence.logsumexp(-1)]
    if spec.wanted is not None:
        mine = (spec.wanted >= shard.start) & (spec.wanted < shard.stop)
        column = torch.where(mine, spec.wanted - shard.start, 0)
        columns.append(torch.where(mine, for_confidence.gather(-1, column[:, None])[:, 0], NEG_INF))
    if spec.measure == "margin":
        top = for_confidence.topk(min(2, for_confidence.shape[-1]), dim=-1).values
        columns += top.unbind(-1) if top.shape[-1] == 2 else (top[:, 0], torch.full_like(own, NEG_INF))
    # float64 holds an id and a float32 exactly, so that one exchange carries both.
    seen = shard.ranks.gather(torch.stack([c.double() for c in columns], -1))
    winner = _first_best(seen[..., 0])
    token, logit = (seen[..., i].gather(0, winner[None])[0] for i in (1, 2))
    log_z = seen[..., 3].logsumexp(0)
    prob = (logit - log_z).exp().float()
    wanted = (seen[..., 4].amax(0) - log_z).exp().float() if spec.wanted is not None else None
    return HeadOut(token.long(), prob, _measure(for_confidence, seen, log_z, prob, spec), wanted)


def _masked(logits: Tensor, spec: HeadSpec, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """The logits that confidence is taken from, and those among which a token is chosen."""

    def mine(ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(i - shard.start for i in ids if shard.start <= i < shard.stop)

    for_confidence = logits
    if spec.suppress is not None:
        logits = without(logits, mine(spec.eos_ids), spec.suppress == 1)
        logits = without(logits, mine(spec.quiet_ids), spec.suppress == 3)
        for_confidence = without(logits, mine(spec.quiet_ids), spec.suppress == 2)
    beyond = range(max(shard.start, spec.n_tokens), shard.stop)
    allowed = without(logits, mine((spec.mask_id,)), None)
    if beyond:
        allowed = allowed.clone()
        allowed[:, beyond.start - shard.start :] = NEG_INF
    return for_confidence, allowed


def _drawn(
    allowed: Tensor, for_confidence: Tensor, sampling: Sampling, shard: VocabShard
) -> tuple[Tensor, Tensor]:
    """What the drawn token has most of, float64, and the logits that its confidence is taken from."""
    if sampling.filters:
        raise ValueError("top_p and top_k rank the whole vocabulary, of which a rank has a part")
    if sampling.choose is not None:
        raise ValueError("published noise draws from the whole vocabulary, of which a rank has a part")
    noise = gumbel(sampling.uniform(shard.stop, shard.start))
    warm = sampling.temperature.double()[:, None]
    if not sampling.categorical:
        return allowed.double() + warm * noise, for_confidence
    shaped = tempered(allowed, sampling.temperature).double()
    key = torch.where(warm > 0, shaped + noise, shaped)
    return key, tempered(for_confidence, sampling.temperature)


def _first_best(keys: Tensor) -> Tensor:
    """The rank with the largest of ``keys`` [ranks, M], the lowest of those that tie: the lower token wins."""
    winner, best = torch.zeros_like(keys[0], dtype=torch.int64), keys[0]
    for rank in range(1, keys.shape[0]):
        better = keys[rank] > best
        winner, best = torch.where(better, rank, winner), torch.where(better, keys[rank], best)
    return winner


def _measure(logits: Tensor, seen: Tensor, log_z: Tensor, prob: Tensor, spec: HeadSpec) -> Tensor:
    if spec.measure == "prob":
        return prob
    if spec.measure == "margin":
        top = (seen[..., -2:].movedim(0, 1).flatten(1) - log_z[:, None]).exp().topk(2, dim=-1).values
        return (top[:, 0] - top[:, 1]).float()
    if spec.measure == "neg_entropy":
        assert spec.shard is not None
        probs = (logits - log_z[:, None]).exp()
        parts = spec.shard.ranks.gather((probs * (probs + 1e-10).log()).sum(-1))
        return parts.sum(0).float()
    raise ValueError(f"unknown confidence measure {spec.measure!r}; known: prob, margin, neg_entropy")
