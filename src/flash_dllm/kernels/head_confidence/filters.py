"""Triton kernel: top-k and top-p for the rows that ask for them, on the logits that the head kernel kept of these rows.

Nothing is sorted. What a filter keeps is a beginning of the order (logit down, token id up), so it is known by the
smallest logit that is kept and by how many tokens of just this logit; a bisection finds both. Its ends move to logits
that there are, so it is over as soon as one is left between them: 5 to 20 goes through a row. Middles are those of
values at first, then of float32's bits, which bounds their number.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import CATEGORICAL, ENTROPY, MARGIN, NEG_INF, NOBODY, gumbel

CUT = {"B": 4096, "num_warps": 32}
"""Goes through a row dozens of times: as many loads at once as a multiprocessor takes."""
DRAW = {"B": 1024, "num_warps": 4}
"""Makes noise for blocks of which something is kept, so blocks are small."""
RATE = {"B": 4096, "num_warps": 16}
FLIP = tl.constexpr(0x7FFFFFFF)
NEAR, HALVED = tl.constexpr(32.0), tl.constexpr(16)
"""How far below the maximum the first middle is, and how many middles are those of values."""
LOWEST = tl.constexpr(-0x7F800001)
"""The order of -inf: ``-0x7F800001``, see :func:`_order`."""


@triton.jit
def _order(x):
    """Whole numbers, int32, in the order of ``x`` float32; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ FLIP, bits)


@triton.jit
def _value(order):
    """The float32 of :func:`_order`."""
    return tl.where(order < 0, order ^ FLIP, order).to(tl.float32, bitcast=True)


@triton.jit
def _shaped(x, column, mode, CHOICE: tl.constexpr, EOS: tl.constexpr, QUIET: tl.constexpr):
    """``x`` of the tokens ``column`` without what ``mode`` suppresses (`HeadSpec.suppress`)."""
    for i in tl.static_range(len(EOS)):
        x = tl.where((mode == 1) & (column == EOS[i]), NEG_INF, x)
    quiet = (mode == 3) if CHOICE else (mode >= 2)
    for i in tl.static_range(len(QUIET)):
        x = tl.where(quiet & (column == QUIET[i]), NEG_INF, x)
    return x


@triton.jit
def _logits(
    at, logits, mode, heat, n_tokens, mask_id, vocab,
    CHOICE: tl.constexpr, HOT: tl.constexpr, SUPPRESS: tl.constexpr, EOS: tl.constexpr, QUIET: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """Logits [B] of the tokens ``at`` .. and these tokens.

    With CHOICE as the choice sees them, without what may not be chosen, else as the confidence does; with HOT over
    the temperature.
    """
    column = at + tl.arange(0, B)
    x = tl.load(logits + column, mask=column < vocab, other=NEG_INF)
    if SUPPRESS:
        x = _shaped(x, column, mode, CHOICE, EOS, QUIET)
    if CHOICE:
        x = tl.where((column < n_tokens) & (column != mask_id), x, NEG_INF)
    if HOT:
        x = x / tl.where(heat > 0, tl.maximum(heat, 1e-6), 1.0)
    return x, column


@triton.jit(do_not_specialize=["vocab", "n_tokens", "mask_id"])
def _cut(
    logits, suppress, temperature, top_p, top_k, order, amounts, vocab, n_tokens, mask_id,
    CHOICE: tl.constexpr, SUPPRESS: tl.constexpr, EOS: tl.constexpr, QUIET: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """One program: what a row's filter keeps. Nothing happens to a row that has none.

    Writes ``order`` [M]: all logits above it stay (see :func:`_order`), and of this very logit the first
    ``amounts[:, 0]``; then the maximum and the mass of all, ``amounts[:, 1]`` and ``[:, 2]``.
    """
    row = tl.program_id(0)
    heat = tl.load(temperature + row)
    p, k = tl.load(top_p + row), tl.load(top_k + row)
    if (p < 1) | (k > 0):
        logits += row.to(tl.int64) * vocab
        mode = tl.load(suppress + row) if SUPPRESS else 0
        best = tl.full((B,), NEG_INF, tl.float32)
        for at in range(0, vocab, B):
            x, _ = _logits(
                at, logits, mode, heat, n_tokens, mask_id, vocab, CHOICE, True, SUPPRESS, EOS, QUIET, B
            )
            best = tl.maximum(best, x)
        peak = tl.max(best, 0)
        level = tl.where(peak == NEG_INF, 0.0, peak)
        weight = tl.zeros((B,), tl.float32)
        for at in range(0, vocab, B):
            x, _ = _logits(
                at, logits, mode, heat, n_tokens, mask_id, vocab, CHOICE, True, SUPPRESS, EOS, QUIET, B
            )
            weight += tl.exp(x - level)
        mass = tl.sum(weight, 0)
        # `high` always passes: nothing lies above the maximum. A row that is not finite ends too, with anything.
        low, high = tl.full((), LOWEST, tl.int64) - 1, _order(peak).to(tl.int64)
        # What lies above `high`, and how much of it there is.
        above, heavy = tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float32)
        turn = tl.full((), 0, tl.int32)
        while high - low > 1:
            bottom, top = _value(tl.maximum(low, LOWEST).to(tl.int32)), _value(high.to(tl.int32))
            # From -inf there is no halfway.
            reach = level - NEAR * tl.exp2(turn.to(tl.float32))
            halfway = _order(tl.maximum((bottom + top) * 0.5, reach)).to(tl.int64)
            middle = tl.where(turn < HALVED, halfway, (low + high) >> 1)
            middle = tl.minimum(tl.maximum(middle, low + 1), high - 1)
            weight = tl.zeros((B,), tl.float32)
            count = tl.zeros((B,), tl.int32)
            under, beyond = tl.full((B,), LOWEST, tl.int32), tl.full((B,), FLIP, tl.int32)
            for at in range(0, vocab, B):
                x, _ = _logits(
                    at, logits, mode, heat, n_tokens, mask_id, vocab, CHOICE, True, SUPPRESS, EOS, QUIET, B
                )
                order_of = _order(x)
                over = order_of.to(tl.int64) > middle
                weight += tl.where(over, tl.exp(x - level), 0.0)
                count += over.to(tl.int32)
                under = tl.maximum(under, tl.where(over, LOWEST, order_of))
                beyond = tl.minimum(beyond, tl.where(over, order_of, FLIP))
            so_many, so_much = tl.sum(count, 0), tl.sum(weight, 0)
            passes = ((p >= 1) | (so_much <= p * mass)) & ((k <= 0) | (so_many < k))
            # Between the middle and the next logit below it, or above it, nothing changes.
            high = tl.where(passes, tl.max(under, 0).to(tl.int64), high)
            low = tl.where(passes, low, tl.min(beyond, 0).to(tl.int64) - 1)
            above, heavy = tl.where(passes, so_many, above), tl.where(passes, so_much, heavy)
            turn += 1
        ties = tl.full((), 1.0, tl.float32) * vocab
        ties = tl.where(k > 0, tl.minimum(ties, (k - above).to(tl.float32)), ties)
        one = tl.exp(_value(high.to(tl.int32)) - level)
        ties = tl.where(p < 1, tl.minimum(ties, tl.floor((p * mass - heavy) / one) + 1), ties)
        tl.store(order + row, high.to(tl.int32))
        tl.store(amounts + row * 3, tl.maximum(ties, 1.0))
        tl.store(amounts + row * 3 + 1, peak)
        tl.store(amounts + row * 3 + 2, mass)


@triton.jit
def _kept(x, low, ties, seen):
    """Which of ``x`` stay, and how many of the logit ``low`` there were until here."""
    order = _order(x)
    same = (order == low).to(tl.int32)
    place = seen + tl.cumsum(same, 0) - same
    return (order > low) | ((same > 0) & (place < ties)), seen + tl.sum(same, 0)


@triton.jit(do_not_specialize=["vocab", "n_tokens", "mask_id"])
def _draw(
    logits, suppress, wanted, temperature, top_p, top_k, hash_first, hash_second, log_z, order, amounts,
    out_token, out_prob, vocab, n_tokens, mask_id,
    SAMPLE: tl.constexpr, SUPPRESS: tl.constexpr, EOS: tl.constexpr, QUIET: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """One program: draw a row's token from what :func:`_cut` kept; its probability among all that there are.

    Where temperature and filters shape the distribution (CATEGORICAL) the probability is :func:`_rate`'s.
    """
    row = tl.program_id(0)
    heat = tl.load(temperature + row)
    if (tl.load(top_p + row) < 1) | (tl.load(top_k + row) > 0):
        logits += row.to(tl.int64) * vocab
        mode = tl.load(suppress + row) if SUPPRESS else 0
        first, second = tl.load(hash_first + row).to(tl.uint32), tl.load(hash_second + row).to(tl.uint32)
        low, ties = tl.load(order + row), tl.load(amounts + row * 3)
        best = tl.full((), NEG_INF, tl.float64)
        token = tl.full((), NOBODY, tl.int32)
        seen = tl.full((), 0, tl.int32)
        for at in range(0, vocab, B):
            x, column = _logits(
                at, logits, mode, heat, n_tokens, mask_id, vocab, True, True, SUPPRESS, EOS, QUIET, B
            )  # fmt: skip
            kept, seen = _kept(x, low, ties, seen)
            # Noise is dear, and most of the vocabulary is not kept.
            if tl.sum(kept.to(tl.int32), 0) > 0:
                noise = gumbel(first, second, column)
                if SAMPLE == CATEGORICAL:
                    key = tl.where(heat > 0, x.to(tl.float64) + noise, x.to(tl.float64))
                else:
                    cold, _ = _logits(
                        at, logits, mode, heat, n_tokens, mask_id, vocab, True, False, SUPPRESS, EOS, QUIET, B
                    )  # fmt: skip
                    key = cold.to(tl.float64) + heat.to(tl.float64) * noise
                key = tl.where(kept, key, NEG_INF)
                found = tl.max(key, 0)
                mine = tl.min(tl.where(key == found, column, NOBODY), 0)
                token = tl.where(found > best, mine, token)
                best = tl.where(found > best, found, best)
        # Every logit is NaN: any token will do, its probability is NaN.
        token = tl.where(token == NOBODY, 0, token)
        tl.store(out_token + row, token.to(tl.int64))
        if SAMPLE != CATEGORICAL:
            at = tl.load(logits + token)
            if SUPPRESS:
                at = _shaped(at, token, mode, False, EOS, QUIET)
            tl.store(out_prob + row, tl.exp(at - tl.load(log_z + row)))


@triton.jit(do_not_specialize=["vocab", "n_tokens", "mask_id"])
def _rate(
    logits, suppress, wanted, temperature, top_p, top_k, order, amounts,
    out_token, out_prob, out_measure, out_wanted, vocab, n_tokens, mask_id,
    MEASURE: tl.constexpr, SUPPRESS: tl.constexpr, ASKED: tl.constexpr,
    EOS: tl.constexpr, QUIET: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """One program: probability and measure of a row's token in the distribution that :func:`_cut` left of all."""
    row = tl.program_id(0)
    heat = tl.load(temperature + row)
    if (tl.load(top_p + row) < 1) | (tl.load(top_k + row) > 0):
        logits += row.to(tl.int64) * vocab
        mode = tl.load(suppress + row) if SUPPRESS else 0
        low, ties = tl.load(order + row), tl.load(amounts + row * 3)
        peak, mass = tl.load(amounts + row * 3 + 1), tl.load(amounts + row * 3 + 2)
        token = tl.load(out_token + row).to(tl.int32)
        level = tl.where(peak == NEG_INF, 0.0, peak)
        target = tl.load(wanted + row).to(tl.int32) if ASKED else token
        # A logit that is NaN is in the mass of all, whether it stays or not.
        total = mass - mass
        mine, theirs, lift = total, total, total
        top = tl.full((), NEG_INF, tl.float32)
        extra = tl.full((), NEG_INF, tl.float32)
        seen = tl.full((), 0, tl.int32)
        for at in range(0, vocab, B):
            x, column = _logits(
                at, logits, mode, heat, n_tokens, mask_id, vocab, False, True, SUPPRESS, EOS, QUIET, B
            )  # fmt: skip
            kept, seen = _kept(x, low, ties, seen)
            x = tl.where(kept, x, NEG_INF)
            weight = tl.exp(x - level)
            total += tl.sum(weight, 0)
            mine += tl.sum(tl.where(column == token, weight, 0.0), 0)
            if ASKED:
                theirs += tl.sum(tl.where(column == target, weight, 0.0), 0)
            if MEASURE == ENTROPY:
                lift += tl.sum(tl.where(weight > 0, weight * (x - level), 0.0), 0)
            if MEASURE == MARGIN:
                here = tl.max(x, 0)
                owner = tl.min(tl.where(x == here, column, NOBODY), 0)
                others = tl.max(tl.where(column == owner, NEG_INF, x), 0)
                extra = tl.maximum(tl.minimum(top, here), tl.maximum(extra, others))
                top = tl.maximum(top, here)
        tl.store(out_prob + row, mine / total)
        if ASKED:
            tl.store(out_wanted + row, theirs / total)
        if MEASURE == MARGIN:
            tl.store(out_measure + row, (1.0 - tl.exp(extra - level)) / total)
        if MEASURE == ENTROPY:
            tl.store(out_measure + row, lift / total - tl.log(total))


def apply_filters(
    logits: Tensor, rows: tuple[Tensor, ...], out: tuple[Tensor, ...], n_tokens: int, mask_id: int, asks: dict[str, Any]
) -> None:  # fmt: skip
    """Overwrite the results of the rows that have a filter.

    Args:
        logits: [M, V] float32, raw; only the rows with a filter are read.
        rows: suppress, wanted, temperature, top_p, top_k and the two hashes of the noise, each [M], and logsumexp [M]
            of the distribution whose probabilities are reported.
        out: token, prob, measure and prob_wanted, each [M].
        asks: the constants of the head kernel.
    """
    count, sizes = len(logits), (logits.shape[1], n_tokens, mask_id)
    suppress, wanted, temperature, top_p, top_k, *_ = rows
    shape = {name: asks[name] for name in ("SUPPRESS", "EOS", "QUIET")}
    order = torch.empty(count, dtype=torch.int32, device=logits.device)
    amounts = torch.empty((count, 3), dtype=torch.float32, device=logits.device)

    def cut(choice: bool) -> None:
        _cut[(count,)](
            logits, suppress, temperature, top_p, top_k, order, amounts, *sizes, CHOICE=choice, **shape, **CUT,
        )  # fmt: skip

    cut(True)
    _draw[(count,)](logits, *rows, order, amounts, *out[:2], *sizes, SAMPLE=asks["SAMPLE"], **shape, **DRAW)
    if asks["SAMPLE"] == CATEGORICAL.value:
        cut(False)
        _rate[(count,)](
            logits, suppress, wanted, temperature, top_p, top_k, order, amounts, *out, *sizes,
            MEASURE=asks["MEASURE"], ASKED=asks["ASKED"], **shape, **RATE,
        )  # fmt: skip
