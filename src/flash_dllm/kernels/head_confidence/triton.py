"""Triton kernels: the LM head reduced over the vocabulary while it is computed, so that logits never reach memory."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_dllm.kernels import tuned
from flash_dllm.kernels.devices import aligned, has_descriptors, limits, precision

from .common import ARGMAX, CATEGORICAL, ENTROPY, GUMBEL, MARGIN, NEG_INF, NOBODY, gumbel
from .filters import apply_filters
from .ref import HeadOut, HeadSpec
from .tiles import Tile, tile_for

MEASURES = {"prob": 0, "margin": 1, "neg_entropy": 2}
# Planes of the partial results, each [rows, splits] float32.
TOP, MASS, CHOSEN, EXTRA, WANTED = (tl.constexpr(i) for i in range(5))
PLANES = 5
KEPT_ROWS = 512
"""Rows whose logits are held at a time where a filter needs them: 259 MB with a vocabulary of 126,464."""


@triton.jit
def _without(x, column, flagged, IDS: tl.constexpr):
    """``x`` [rows, columns] with -inf at the columns ``IDS`` of the flagged rows."""
    for i in tl.static_range(len(IDS)):
        x = tl.where(flagged[:, None] & (column == IDS[i])[None, :], NEG_INF, x)
    return x


@triton.jit
def _product(
    h, w, row, column, rows, vocab, depth, stride, weight_stride,
    M: tl.constexpr, V: tl.constexpr, K: tl.constexpr, SWAP: tl.constexpr, DESCRIPTOR: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits [M, V] float32 of rows ``row`` .. and tokens ``column`` ..; anything beyond the matrices."""
    m, v, k = tl.arange(0, M), tl.arange(0, V), tl.arange(0, K)
    acc = tl.zeros((V, M) if SWAP else (M, V), tl.float32)
    if not DESCRIPTOR:
        left = h + (row + m).to(tl.int64)[:, None] * stride + k[None, :]
        right = w + (column + v).to(tl.int64)[:, None] * weight_stride + k[None, :]
        own, there = (row + m < rows)[:, None], (column + v < vocab)[:, None]
    for at in tl.range(0, depth, K):
        if DESCRIPTOR:
            a = h.load([row, at])
            b = w.load([column, at])
        elif EVEN:
            a = tl.load(left + at, mask=own, other=0.0)
            b = tl.load(right + at, mask=there, other=0.0)
        else:
            a = tl.load(left + at, mask=own & (at + k < depth)[None, :], other=0.0)
            b = tl.load(right + at, mask=there & (at + k < depth)[None, :], other=0.0)
        if SWAP:
            acc = tl.dot(b, tl.trans(a), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    if SWAP:
        acc = tl.trans(acc)
    return acc


@triton.jit
def _absorb(
    x, column, mode, target, heat, first, second, n_tokens, mask_id, vocab,
    top, mass, extra, asked, best, chosen, choice,
    MEASURE: tl.constexpr, SAMPLE: tl.constexpr, SUPPRESS: tl.constexpr, ASKED: tl.constexpr,
    EOS: tl.constexpr, QUIET: tl.constexpr,
):  # fmt: skip
    """Add the logits ``x`` [rows, columns] of tokens ``column`` to what is known of the rows."""
    x = tl.where((column < vocab)[None, :], x, NEG_INF)
    if SUPPRESS:
        x = _without(x, column, mode == 1, EOS)
        x = _without(x, column, mode == 3, QUIET)
    if SAMPLE == CATEGORICAL:
        x = x / tl.where(heat > 0, tl.maximum(heat, 1e-6), 1.0)[:, None]

    # The choice; on a tie the lower id, so what comes later has to be better.
    allowed = tl.where(((column < n_tokens) & (column != mask_id))[None, :], x, NEG_INF)
    if SAMPLE == ARGMAX:
        key = allowed
    else:
        noise = gumbel(first[:, None], second[:, None], column[None, :])
        if SAMPLE == GUMBEL:
            key = allowed.to(tl.float64) + heat.to(tl.float64)[:, None] * noise
        else:
            key = tl.where((heat > 0)[:, None], allowed.to(tl.float64) + noise, allowed.to(tl.float64))
    found = tl.max(key, 1)
    mine = tl.min(tl.where(key == found[:, None], column[None, :], NOBODY), 1)
    better = found > best
    if SAMPLE == ARGMAX:
        chosen = tl.where(better, found, chosen)
    else:
        logit = tl.sum(tl.where(column[None, :] == mine[:, None], x, 0.0), 1)
        chosen = tl.where(better, logit, chosen)
    best = tl.where(better, found, best)
    choice = tl.where(better, mine, choice)

    # The distribution: running maximum, mass, and what the measure needs.
    if SUPPRESS:
        x = _without(x, column, mode == 2, QUIET)
    peak = tl.max(x, 1)
    if MEASURE == MARGIN:
        at = tl.min(tl.where(x == peak[:, None], column[None, :], NOBODY), 1)
        others = tl.where(column[None, :] == at[:, None], NEG_INF, x)
        extra = tl.maximum(tl.minimum(top, peak), tl.maximum(extra, tl.max(others, 1)))
    high = tl.maximum(top, peak)
    level = tl.where(high == NEG_INF, 0.0, high)
    weight = tl.exp(x - level[:, None])
    fade = tl.exp(top - level)
    if MEASURE == ENTROPY:
        fall = tl.where(top == NEG_INF, 0.0, top - level)
        lift = tl.where(weight > 0, weight * (x - level[:, None]), 0.0)
        extra = fade * (extra + mass * fall) + tl.sum(lift, 1)
    mass = mass * fade + tl.sum(weight, 1)
    if ASKED:
        asked += tl.sum(tl.where(column[None, :] == target[:, None], x, 0.0), 1)
    return high, mass, extra, asked, best, chosen, choice


@triton.jit
def _halves(x):
    """The left and the right half of the columns of ``x``."""
    pair = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    return tl.split(tl.permute(pair, (0, 2, 1)))


@triton.jit(do_not_specialize=["rows", "tiles", "splits", "n_tokens", "mask_id"])
def _scan(
    h, w, suppress, wanted, temperature, top_p, top_k, hash_first, hash_second, part, score, token, keep,
    rows, vocab, depth, stride, weight_stride, n_tokens, mask_id, tiles, splits,
    MEASURE: tl.constexpr, SAMPLE: tl.constexpr, FILTER: tl.constexpr, SUPPRESS: tl.constexpr, ASKED: tl.constexpr,
    EOS: tl.constexpr, QUIET: tl.constexpr,
    M: tl.constexpr, V: tl.constexpr, K: tl.constexpr, SWAP: tl.constexpr, PARTS: tl.constexpr,
    DESCRIPTOR: tl.constexpr, FLAT: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a block of rows, ``tiles`` adjacent tiles of the vocabulary.

    With FILTER the logits of the rows that have a filter go to ``keep`` [rows, vocab] too.
    """
    # Blocks of rows are neighbours in launch order: they read the same weights, at the same time, from L2.
    blocks = tl.cdiv(rows, M)
    row, split = tl.program_id(0) % blocks * M, tl.program_id(0) // blocks
    m = row + tl.arange(0, M)
    own = m < rows
    top = tl.full((M,), NEG_INF, tl.float32)
    mass = tl.zeros((M,), tl.float32)
    extra = top if MEASURE == MARGIN else mass
    asked = tl.zeros((M,), tl.float32)
    chosen = top
    choice = tl.zeros((M,), tl.int32)
    best = top if SAMPLE == ARGMAX else top.to(tl.float64)
    mode = tl.load(suppress + m, mask=own, other=0) if SUPPRESS else choice
    target = tl.load(wanted + m, mask=own, other=-1) if ASKED else choice
    heat, first, second = mass, choice, choice
    if SAMPLE != ARGMAX:
        heat = tl.load(temperature + m, mask=own, other=0.0)
        first = tl.load(hash_first + m, mask=own, other=0).to(tl.uint32)
        second = tl.load(hash_second + m, mask=own, other=0).to(tl.uint32)
    if FILTER:
        kept = tl.load(top_p + m, mask=own, other=1.0) < 1
        kept = own & (kept | (tl.load(top_k + m, mask=own, other=0) > 0))
        into = keep + m.to(tl.int64)[:, None] * vocab
    begin = split * tiles
    for tile in tl.range(begin, tl.minimum(begin + tiles, tl.cdiv(vocab, V)), flatten=FLAT):
        logits = _product(
            h, w, row, tile * V, rows, vocab, depth, stride, weight_stride,
            M, V, K, SWAP, DESCRIPTOR, EVEN, PRECISION,
        )  # fmt: skip
        # In parts, for few registers; from left to right, for the ties.
        W: tl.constexpr = V // PARTS
        if PARTS == 1:
            parts = (logits,)
        elif PARTS == 2:
            parts = _halves(logits)
        else:
            left, right = _halves(logits)
            parts = _halves(left) + _halves(right)
        for i in tl.static_range(PARTS):
            column = tile * V + i * W + tl.arange(0, W)
            if FILTER:
                tl.store(into + column[None, :], parts[i], mask=kept[:, None] & (column < vocab)[None, :])
            top, mass, extra, asked, best, chosen, choice = _absorb(
                parts[i], column, mode, target, heat, first, second,
                n_tokens, mask_id, vocab, top, mass, extra, asked, best, chosen, choice,
                MEASURE, SAMPLE, SUPPRESS, ASKED, EOS, QUIET,
            )  # fmt: skip
    cell = m.to(tl.int64) * splits + split
    plane = rows.to(tl.int64) * splits
    tl.store(part + TOP * plane + cell, top, mask=own)
    tl.store(part + MASS * plane + cell, mass, mask=own)
    tl.store(part + CHOSEN * plane + cell, chosen, mask=own)
    if MEASURE != 0:
        tl.store(part + EXTRA * plane + cell, extra, mask=own)
    if ASKED:
        tl.store(part + WANTED * plane + cell, asked, mask=own)
    if SAMPLE != ARGMAX:
        tl.store(score + cell, best, mask=own)
    tl.store(token + cell, choice, mask=own)


@triton.jit(do_not_specialize=["rows", "splits"])
def _join(
    part, score, token, suppress, out_token, out_prob, out_measure, out_wanted, out_z, rows, splits,
    MEASURE: tl.constexpr, SAMPLE: tl.constexpr, FILTER: tl.constexpr, SUPPRESS: tl.constexpr, ASKED: tl.constexpr,
    QUIET: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """One program: the parts of the vocabulary of one row, in fixed order."""
    row = tl.program_id(0)
    s = tl.arange(0, S)
    here = s < splits
    cell = row.to(tl.int64) * splits + s
    plane = rows.to(tl.int64) * splits
    top = tl.load(part + TOP * plane + cell, mask=here, other=NEG_INF)
    mass = tl.load(part + MASS * plane + cell, mask=here, other=0.0)
    chosen = tl.load(part + CHOSEN * plane + cell, mask=here, other=NEG_INF)
    ids = tl.load(token + cell, mask=here, other=NOBODY)
    high = tl.max(top, 0)
    level = tl.where(high == NEG_INF, 0.0, high)
    weight = tl.exp(top - level)
    total = tl.sum(mass * weight, 0)
    log_z = level + tl.log(total)

    key = chosen if SAMPLE == ARGMAX else tl.load(score + cell, mask=here, other=NEG_INF)
    pick = tl.min(tl.where(key == tl.max(key, 0), ids, NOBODY), 0)
    # Every logit is NaN: any token will do, its probability is NaN.
    pick = tl.where(pick == NOBODY, 0, pick)
    logit = tl.max(tl.where(ids == pick, chosen, NEG_INF), 0)
    if SUPPRESS:
        quiet = tl.load(suppress + row) == 2
        for i in tl.static_range(len(QUIET)):
            logit = tl.where(quiet & (pick == QUIET[i]), NEG_INF, logit)
    prob = tl.exp(logit - log_z)
    tl.store(out_token + row, pick.to(tl.int64))
    tl.store(out_prob + row, prob)
    if FILTER:
        tl.store(out_z + row, log_z)
    if MEASURE == MARGIN:
        extra = tl.load(part + EXTRA * plane + cell, mask=here, other=NEG_INF)
        owner = tl.min(tl.where(top == high, s, S), 0)
        second = tl.max(tl.where(s == owner, extra, top), 0)
        tl.store(out_measure + row, tl.exp(high - log_z) - tl.exp(second - log_z))
    if MEASURE == ENTROPY:
        extra = tl.load(part + EXTRA * plane + cell, mask=here, other=0.0)
        fall = tl.where(top == NEG_INF, 0.0, top - level)
        tl.store(out_measure + row, tl.sum(weight * (extra + mass * fall), 0) / total - tl.log(total))
    if ASKED:
        asked = tl.sum(tl.load(part + WANTED * plane + cell, mask=here, other=0.0), 0)
        tl.store(out_wanted + row, tl.exp(asked - log_z))


def head_confidence(
    h: Tensor, weight: Tensor, spec: HeadSpec, tile: Tile | None = None, invariant: bool = False
) -> HeadOut:
    """See :func:`flash_dllm.kernels.head_confidence.head_confidence`; ``tile`` is for measuring.

    The caller has checked that the kernel knows what ``spec`` asks for.
    """
    h, weight = (t if t.stride(1) == 1 else t.contiguous() for t in (h, weight))
    (rows, depth), device = h.shape, h.device
    sampling = spec.sampling
    noisy = sampling is not None
    if tile is None and not noisy and not invariant:
        tile = stored_tile(rows, depth)
    if tile is None:
        tile = tile_for(rows, h.element_size(), noisy, limits(device), invariant)
    prob = torch.empty(rows, dtype=torch.float32, device=device)
    token = torch.empty(rows, dtype=torch.int64, device=device)
    measure = prob if spec.measure == "prob" else torch.empty_like(prob)
    asked = None if spec.wanted is None else torch.empty_like(prob)
    given, out = _given(spec, h), (token, prob, measure, prob if asked is None else asked)
    # With filters a chunk of rows at a time, since their logits are held.
    step = KEPT_ROWS if sampling is not None and sampling.filters else max(rows, 1)
    for at in range(0, rows, step):
        chunk = slice(at, at + step)
        _launch(h[chunk], weight, spec, tile, tuple(t[chunk] for t in given), tuple(t[chunk] for t in out))
    return HeadOut(token, prob, measure, asked)


def _launch(
    h: Tensor, weight: Tensor, spec: HeadSpec, tile: Tile, given: tuple[Tensor, ...], out: tuple[Tensor, ...]
) -> None:
    """``out`` (token, prob, measure, prob_wanted) of the rows ``h``; ``given`` is :func:`_given`."""
    (rows, depth), vocab, device, sampling = h.shape, weight.shape[0], h.device, spec.sampling
    filters = sampling is not None and sampling.filters
    splits, tiles = _split(rows, vocab, tile, limits(device).processors)
    part = torch.empty((PLANES, rows, splits), dtype=torch.float32, device=device)
    ids = torch.empty((rows, splits), dtype=torch.int32, device=device)
    score = part if sampling is None else torch.empty((rows, splits), dtype=torch.float64, device=device)
    kept = torch.empty((rows, vocab), dtype=torch.float32, device=device) if filters else part
    log_z = torch.empty(rows, dtype=torch.float32, device=device) if filters else part
    asks: dict[str, Any] = {
        "MEASURE": MEASURES[spec.measure],
        "SAMPLE": 0 if sampling is None else 2 if sampling.categorical else 1,
        "SUPPRESS": spec.suppress is not None,
        "ASKED": spec.wanted is not None,
        "QUIET": tuple(spec.quiet_ids) if spec.suppress is not None else (),
    }
    eos = tuple(spec.eos_ids) if spec.suppress is not None else ()
    operands, shape = _operands(h, weight, tile)
    _scan[(triton.cdiv(rows, tile.rows) * splits,)](
        *operands, *given, part, score, ids, kept, rows, vocab, depth, h.stride(0), weight.stride(0),
        spec.n_tokens, spec.mask_id, tiles, splits, EOS=eos, FILTER=filters, **asks, **shape,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    _join[(rows,)](
        part, score, ids, given[0], *out, log_z, rows, splits, S=triton.next_power_of_2(splits), FILTER=filters, **asks
    )  # fmt: skip
    if filters:
        apply_filters(kept, (*given, log_z), out, spec.n_tokens, spec.mask_id, {**asks, "EOS": eos})


def stored_tile(rows: int, depth: int) -> Tile | None:
    """What was measured on this device for the nearest number of rows, if anything was."""
    entry = tuned.current().find("head_confidence", rows, depth=depth)
    return None if entry is None else Tile(**entry.tiles)


def _split(rows: int, vocab: int, tile: Tile, processors: int) -> tuple[int, int]:
    """Into how many parts the vocabulary is cut, and the tiles of each."""
    count = triton.cdiv(vocab, tile.vocab)
    tiles = 1
    if tile.persistent:
        wanted = max(1, processors * tile.persistent // triton.cdiv(rows, tile.rows))
        tiles = triton.cdiv(count, wanted)
    return triton.cdiv(count, tiles), tiles


def _operands(h: Tensor, weight: Tensor, tile: Tile) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """The matrices as the kernel takes them, and the constants that say how."""
    descriptor = tile.descriptor and aligned(h, weight) and has_descriptors()
    shape = {
        "M": tile.rows, "V": tile.vocab, "K": tile.depth, "SWAP": tile.swap, "PARTS": tile.parts, "FLAT": tile.flat,
        "DESCRIPTOR": descriptor, "EVEN": h.shape[1] % tile.depth == 0, "PRECISION": precision(h.dtype),
    }  # fmt: skip
    if not descriptor:
        return (h, weight), shape
    from triton.tools.tensor_descriptor import TensorDescriptor

    left = TensorDescriptor.from_tensor(h, [tile.rows, tile.depth])
    return (left, TensorDescriptor.from_tensor(weight, [tile.vocab, tile.depth])), shape


def _given(spec: HeadSpec, h: Tensor) -> tuple[Tensor, ...]:
    """What a row brings along: suppress, wanted, temperature, top_p, top_k and the hashes that the noise continues.

    Anything with as many rows stands where ``spec`` has nothing.
    """
    suppress, wanted = (h if t is None else t.contiguous() for t in (spec.suppress, spec.wanted))
    sampling = spec.sampling
    if sampling is None:
        return (suppress, wanted, *[h] * 5)
    assert sampling.counter is not None
    numbers = (sampling.temperature, sampling.top_p, sampling.top_k)
    return (suppress, wanted, *(t.contiguous() for t in numbers), *sampling.counter())
