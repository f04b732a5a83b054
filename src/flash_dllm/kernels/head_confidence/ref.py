"""LM head with token choice and confidence, for the rows that are read and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_dllm.kernels.ranks import VocabShard

NEG_INF = float("-inf")
MEASURES = ("prob", "margin", "neg_entropy")


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. One entry of each tensor a row; temperature 0 means argmax.

    Attributes:
        temperature: [M] float32.
        top_p: [M] float32, 1 keeps everything.
        top_k: [M] int64, 0 keeps everything.
        uniform: given ``stop`` and ``start`` (by default 0), gives [M, stop - start] float64 in (0, 1) for the Gumbel
            noise of tokens ``start`` .. ``stop - 1``.
        categorical: Dream's form: temperature and filters change the distribution *before* the confidence is
            taken, and the confidence is that distribution's probability of the drawn token.
        filters: False when no row uses top_p or top_k, which saves sorting the vocabulary here and keeping logits
            in the kernel.
        choose: draws an index from probabilities [M, V] -> [M]; None uses the Gumbel noise. It exists for the
            published traces, which used ``torch.multinomial``.
        counter: where ``uniform`` is counter-based, gives its two 32-bit hashes [M] int64 before the token's index,
            from which a kernel computes the same numbers.
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    uniform: Callable[..., Tensor]
    categorical: bool = False
    filters: bool = True
    choose: Callable[[Tensor], Tensor] | None = None
    counter: Callable[[], tuple[Tensor, Tensor]] | None = None


@dataclass(frozen=True)
class HeadSpec:
    """What the head does with the logits of M rows.

    Attributes:
        n_tokens: ids at or beyond it are never chosen (they lie beyond the tokenizer).
        mask_id: never chosen.
        measure: what ranks the rows: ``prob`` (probability of the token), ``margin`` (top-1 minus top-2) or
            ``neg_entropy`` (sum p log p), as in Dream.
        suppress: [M] int64 or None: 1 gives EOS the logit -inf, 2 takes away the confidence of EOS and EoT
            (LLaDA's ``logits_eos_inf`` and ``confidence_eos_eot_inf``), 3 gives both the logit -inf (gaps of a
            fixed length).
        eos_ids, quiet_ids: the ids that 1 and 2 act on.
        sampling: None for argmax.
        wanted: [M] int64 or None: report the probability of these tokens too.
        shard: the logits are some columns of the vocabulary, and other ranks have the others; None for all.
    """

    n_tokens: int
    mask_id: int
    measure: str = "prob"
    suppress: Tensor | None = None
    eos_ids: tuple[int, ...] = ()
    quiet_ids: tuple[int, ...] = ()
    sampling: Sampling | None = None
    wanted: Tensor | None = None
    shard: VocabShard | None = None


@dataclass(frozen=True)
class HeadOut:
    """Per row: the chosen ``token`` [M] int64, its ``prob`` and the ``measure`` [M] float32 that ranks it, and
    ``prob_wanted`` [M] float32 where tokens were asked for."""

    token: Tensor
    prob: Tensor
    measure: Tensor
    prob_wanted: Tensor | None = None


def check(spec: HeadSpec) -> None:
    """Raise a ValueError that names the measure if it is not known."""
    if spec.measure not in MEASURES:
        raise ValueError(f"unknown confidence measure {spec.measure!r}; known: {', '.join(MEASURES)}")


def head_logits(h: Tensor, weight: Tensor) -> Tensor:
    """Logits [M, V] in float32 of final-normed rows ``h`` [M, d] under the LM head ``weight`` [V, d]."""
    return F.linear(h, weight).float()


def head_confidence(h: Tensor, weight: Tensor, spec: HeadSpec) -> HeadOut:
    """LM head, then :func:`confidence`."""
    return confidence(head_logits(h, weight), spec)


def confidence(logits: Tensor, spec: HeadSpec) -> HeadOut:
    """Choose a token a row and measure how sure the model is of it.

    Probabilities are those of the whole vocabulary: a token that may not be chosen keeps its mass.

    Args:
        logits: [M, V] float32, or the columns of ``spec.shard``.
        spec: see :class:`HeadSpec`.
    """
    check(spec)
    if spec.shard is not None:
        from .sharded import sharded_confidence

        return sharded_confidence(logits, spec, spec.shard)
    for_confidence = logits
    if spec.suppress is not None:
        logits = without(logits, spec.eos_ids, spec.suppress == 1)
        logits = without(logits, spec.quiet_ids, spec.suppress == 3)
        for_confidence = without(logits, spec.quiet_ids, spec.suppress == 2)
    allowed = without(logits, (spec.mask_id,), None)
    allowed = allowed[:, : spec.n_tokens]
    sampling = spec.sampling
    if sampling is not None and sampling.categorical:
        shaped = _filtered(tempered(allowed, sampling.temperature), sampling)
        token = _draw(shaped, sampling)
        for_confidence = _filtered(tempered(for_confidence, sampling.temperature), sampling)
    elif sampling is not None:
        token = _gumbel_argmax(allowed, sampling)
    else:
        token = allowed.argmax(-1)
    log_z = for_confidence.logsumexp(-1)
    prob = (for_confidence.gather(-1, token[:, None])[:, 0] - log_z).exp()
    wanted = None
    if spec.wanted is not None:
        wanted = (for_confidence.gather(-1, spec.wanted[:, None])[:, 0] - log_z).exp()
    return HeadOut(token, prob, _measure(for_confidence, log_z, prob, spec.measure), wanted)


def _measure(logits: Tensor, log_z: Tensor, prob: Tensor, kind: str) -> Tensor:
    if kind == "prob":
        return prob
    probs = (logits - log_z[:, None]).exp()
    if kind == "margin":
        top = probs.topk(2, dim=-1).values
        return top[:, 0] - top[:, 1]
    return (probs * (probs + 1e-10).log()).sum(-1)


def without(logits: Tensor, ids: tuple[int, ...], rows: Tensor | None) -> Tensor:
    """``logits`` with -inf at ``ids`` (for the rows flagged)."""
    if not ids:
        return logits
    logits = logits.clone()
    for token in ids:
        column = logits[:, token]
        logits[:, token] = NEG_INF if rows is None else torch.where(rows, NEG_INF, column)
    return logits


def tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    # Below the floor the quotient could overflow; it is an argmax long before.
    return logits / torch.where(temperature > 0, temperature.clamp_min(1e-6), 1.0)[:, None]


def _filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Nucleus and top-k filter; the most probable token always stays."""
    if not sampling.filters:
        return logits
    ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    mass = ordered.softmax(-1).cumsum(-1)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    before = torch.cat([mass.new_zeros(mass.shape[0], 1), mass[:, :-1]], -1)
    # Rounded sums pass 1, so top_p = 1 keeps everything by name: filters may be on for a batch mate's sake.
    keep = (before <= sampling.top_p[:, None]) | (sampling.top_p[:, None] >= 1)
    keep &= (rank < sampling.top_k[:, None]) | (sampling.top_k[:, None] <= 0)
    keep[:, 0] = True
    return torch.full_like(logits, NEG_INF).scatter(-1, order, ordered.masked_fill(~keep, NEG_INF))


def _gumbel_argmax(logits: Tensor, sampling: Sampling) -> Tensor:
    """Draw from softmax(logits / T) by Gumbel noise in float64 (LLaDA); argmax where T is 0."""
    shaped = _filtered(tempered(logits, sampling.temperature), sampling)
    kept = torch.where(shaped == NEG_INF, shaped, logits).double()
    noise = gumbel(sampling.uniform(logits.shape[-1]))
    return (kept + sampling.temperature.double()[:, None] * noise).argmax(-1)


def gumbel(uniform: Tensor) -> Tensor:
    """Gumbel noise from uniform numbers in (0, 1)."""
    return -torch.log(-torch.log(uniform))


def _draw(logits: Tensor, sampling: Sampling) -> Tensor:
    best = logits.argmax(-1)
    if sampling.choose is not None:
        if not bool((sampling.temperature > 0).any()):
            return best
        drawn = sampling.choose(logits.softmax(-1))
    else:
        drawn = (logits.double() + gumbel(sampling.uniform(logits.shape[-1]))).argmax(-1)
    return torch.where(sampling.temperature > 0, drawn, best)
