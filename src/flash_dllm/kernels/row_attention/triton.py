"""Triton kernels: attention of the rows of a pass, and the attention score of Flash-Cache inside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_dllm.kernels.devices import has_descriptors, limits, precision

from .groups import TABLES, Group
from .tiles import Tiles, few, stored_tiles, tiles_for

READS = 64
"""Scoring rows added at once; one number, so that the order of the sum does not depend on how many there may be."""
SCORED = 16
"""Places a program scores where attention does not make the score."""
LANES = 8
"""Parts of the score that a program may keep for its KV head."""
JOINED = 16
"""Heads (of one row or several) whose key ranges a program joins."""
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(pointer, descriptor, first, at, column, stride, seen, N: tl.constexpr, DIM: tl.constexpr,
          PAD: tl.constexpr, MASKED: tl.constexpr, DESCRIPTOR: tl.constexpr):  # fmt: skip
    """Keys or values [N, PAD] of the places from ``at`` on, of a slot whose places begin at row ``first``.

    What nobody may see can hold anything, NaN included: where ``MASKED`` it reads as zero.
    """
    d = tl.arange(0, PAD)
    if DESCRIPTOR and MASKED:
        tile = descriptor.load([first + at, column])
        return tl.where(seen[:, None], tile, 0.0)
    elif DESCRIPTOR:
        return descriptor.load([first + at, column])
    else:
        start = pointer + (first.to(tl.int64) + at) * stride + column
        offset = tl.arange(0, N)[:, None] * stride + d[None, :]
        if MASKED:
            return tl.load(start + offset, mask=seen[:, None] & (d < DIM)[None, :], other=0.0)
        elif PAD == DIM:
            return tl.load(start + offset)
        else:
            return tl.load(start + offset, mask=(d < DIM)[None, :], other=0.0)


@triton.jit
def _fold(raw, value, top, mass, acc, factor, PRECISION: tl.constexpr):
    """One tile of keys into a running softmax of powers of two; ``raw`` is still to be multiplied by ``factor`` > 0.

    That and the subtraction of the maximum are one instruction a logit.
    """
    high = tl.maximum(top, tl.max(raw, 1) * factor)
    level = tl.where(high == float("-inf"), 0.0, high)
    weight = tl.exp2(raw * factor - level[:, None])
    fade = tl.exp2(top - level)
    mass = mass * fade + tl.sum(weight, 1)
    acc = tl.dot(weight.to(value.dtype), value, acc * fade[:, None], input_precision=PRECISION)
    return high, mass, acc


@triton.jit
def _by_lanes(x, LANES: tl.constexpr):
    """Sums [LANES, N] over the lines of ``x`` [M, N]: those that one warp holds, of every 16 x LANES lines 16.

    A sum over all lines would go through shared memory, and every warp would wait for every other in each tile.
    """
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    if LANES == 1:
        return tl.sum(x, 0)[None, :]
    if M > LANES * 16:
        x = tl.sum(tl.reshape(x, (M // (LANES * 16), LANES * 16, N)), 0)
    return tl.sum(tl.reshape(x, (LANES, 16, N)), 1)


@triton.jit
def _add_score(target, raw, counts, each, adds, LANES: tl.constexpr):
    """Add one tile's logits ``raw`` [M, N] of the lines that count, ``each`` of them worth so much, to the score."""
    tl.atomic_add(target, _by_lanes(tl.where(counts, raw, 0.0), LANES) * each, mask=adds, sem="relaxed")


@triton.jit(do_not_specialize=["n_rows"])
def _attend(
    q, k, v, key_tiles, value_tiles, out, part, stats, table, rank, lo, hi, ends, shares, score,
    scale, base, row_stride, places, positions, n_rows, n_kv,
    GROUP: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, WHOLE: tl.constexpr, SCORE: tl.constexpr,
    LANES: tl.constexpr, PARTS: tl.constexpr,
    DESCRIPTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a block of rows of one slot, one KV head, one range of keys."""
    # Heads first: what runs at the same time then reads neighbouring memory.
    head, entry, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    line = table + entry * 5
    slot, first, count = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    m, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, PAD)
    dims = d < DIM
    row = first + m // GROUP
    own = m < count * GROUP
    column = (head * GROUP + m % GROUP) * DIM
    query = tl.load(
        q + row.to(tl.int64)[:, None] * row_stride + column[:, None] + d[None, :],
        mask=own[:, None] & dims[None, :], other=0.0,
    )  # fmt: skip
    if WHOLE:
        begin, end = base, tl.load(ends + slot)
        ranks = m
    else:
        # Behind a canvas nothing is visible; its end is data, the table's is the longest canvas'.
        begin, end = 0, tl.minimum(tl.load(line + 3), tl.load(ends + slot))
        ranks = tl.load(rank + row, mask=own, other=-1)
    span = tl.cdiv(tl.cdiv(end - begin, N), SPLITS) * N
    start = begin + split * span
    stop = tl.minimum(end, start + span)
    if SCORE:
        # A mean of raw logits over the scoring rows, which have equal shares: the sum of a tile's columns over them.
        # The first block of a slot scores its keys, the others none. A row that does not count may hold anything.
        share = tl.load(shares + row, mask=own, other=0.0) * tl.load(line + 4).to(tl.float32)
        each = tl.max(share, 0)
        counts = (share > 0)[:, None]
        adds = tl.max(_by_lanes(share[:, None], LANES), 1)[:, None] > 0
        # A part for each lane: with one to add it up, a sum has one order.
        first_part = (slot.to(tl.int64) * n_kv + head) * PARTS
        target = score + (first_part + tl.arange(0, LANES)[:, None]) * positions - base
    place0, kv_column, stride = slot * places, head * DIM, n_kv * DIM
    factor = scale * LOG2E
    top = tl.full((M,), float("-inf"), tl.float32)
    mass = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, PAD), tl.float32)
    if WHOLE:
        full = start + tl.maximum(stop - start, 0) // N * N
        for at in tl.range(start, full, N):
            key = _load(k, key_tiles, place0, at, kv_column, stride, n, N, DIM, PAD, False, DESCRIPTOR)
            raw = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision=PRECISION)
            if SCORE:
                _add_score(target + at + n[None, :], raw, counts, each, adds, LANES)
            value = _load(v, value_tiles, place0, at, kv_column, stride, n, N, DIM, PAD, False, DESCRIPTOR)
            top, mass, acc = _fold(raw, value.to(query.dtype), top, mass, acc, factor, PRECISION)
        if full < stop:
            seen = full + n < stop
            key = _load(k, key_tiles, place0, full, kv_column, stride, seen, N, DIM, PAD, True, False)
            raw = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision=PRECISION)
            if SCORE:
                _add_score(target + full + n[None, :], raw, counts, each, adds & seen[None, :], LANES)
            value = _load(v, value_tiles, place0, full, kv_column, stride, seen, N, DIM, PAD, True, False)
            raw = tl.where(seen[None, :], raw, float("-inf"))
            top, mass, acc = _fold(raw, value.to(query.dtype), top, mass, acc, factor, PRECISION)
    else:
        for at in tl.range(start, stop, N):
            place = at + n
            inside = place < stop
            low = tl.load(lo + slot.to(tl.int64) * places + place, mask=inside, other=0)
            high = tl.load(hi + slot.to(tl.int64) * places + place, mask=inside, other=0)
            seen = low < high
            # A key that nobody sees may come as it is: its logits are not used.
            key = _load(
                k, key_tiles, place0, at, kv_column, stride, seen, N, DIM, PAD, not DESCRIPTOR, DESCRIPTOR
            )
            raw = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision=PRECISION)
            visible = (low[None, :] <= ranks[:, None]) & (ranks[:, None] < high[None, :])
            raw = tl.where(visible, raw, float("-inf"))
            value = _load(v, value_tiles, place0, at, kv_column, stride, seen, N, DIM, PAD, True, DESCRIPTOR)
            top, mass, acc = _fold(raw, value.to(query.dtype), top, mass, acc, factor, PRECISION)
    cells = row.to(tl.int64)[:, None] * (n_kv * GROUP * DIM) + column[:, None] + d[None, :]
    keep = own[:, None] & dims[None, :]
    if SPLITS == 1:
        # A row that sees nothing has no mass; a NaN mass has to stay one.
        done = acc / tl.where(mass == 0.0, 1.0, mass)[:, None]
        tl.store(out + cells, done.to(out.dtype.element_ty), mask=keep)
    else:
        lane = split.to(tl.int64) * n_rows * n_kv * GROUP
        tl.store(part + lane * DIM + cells, acc, mask=keep)
        cell = (lane + row.to(tl.int64) * (n_kv * GROUP) + head * GROUP + m % GROUP) * 2
        tl.store(stats + cell, top, mask=own)
        tl.store(stats + cell + 1, mass, mask=own)


@triton.jit(do_not_specialize=["n_rows"])
def _combine(
    part, stats, out, table, n_rows, heads, DIM: tl.constexpr, PAD: tl.constexpr, SPLITS: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Join the key ranges of ``C`` heads, of as many rows as they are of, in fixed order."""
    line = table + tl.program_id(0) * 5
    first, count = tl.load(line + 1), tl.load(line + 2)
    c, d = tl.program_id(1) * C + tl.arange(0, C), tl.arange(0, PAD)
    own = c < count * heads
    cell = first.to(tl.int64) * heads + c
    lane = tl.cast(n_rows, tl.int64) * heads
    top = tl.full((C,), float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        top = tl.maximum(top, tl.load(stats + (split * lane + cell) * 2, mask=own, other=float("-inf")))
    level = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros((C,), tl.float32)
    mixed = tl.zeros((C, PAD), tl.float32)
    keep = own[:, None] & (d < DIM)[None, :]
    for split in tl.static_range(SPLITS):
        at = split * lane + cell
        weight = tl.exp2(tl.load(stats + at * 2, mask=own, other=float("-inf")) - level)
        total += weight * tl.load(stats + at * 2 + 1, mask=own, other=0.0)
        mixed += weight[:, None] * tl.load(part + at[:, None] * DIM + d[None, :], mask=keep, other=0.0)
    done = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + cell[:, None] * DIM + d[None, :], done.to(out.dtype.element_ty), mask=keep)


@triton.jit
def _mean_query(
    q, reads, flags, mean, counts, row_stride, n_reads, n_kv,
    GROUP: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Mean query of one slot and KV head over its scoring rows and the head's queries, divided by all heads; and how
    many scoring rows there are.
    """
    slot, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, PAD)
    total = tl.zeros((PAD,), tl.float32)
    found = 0.0
    for begin in range(0, n_reads, C):
        c = begin + tl.arange(0, C)
        inside = c < n_reads
        on = tl.load(flags + slot * n_reads + c, mask=inside, other=0) != 0
        row = tl.load(reads + slot * n_reads + c, mask=on, other=0)
        found += tl.sum(on.to(tl.float32), 0)
        for g in tl.static_range(GROUP):
            cell = row.to(tl.int64)[:, None] * row_stride + (head * GROUP + g) * DIM + d[None, :]
            x = tl.load(q + cell, mask=on[:, None] & (d < DIM)[None, :], other=0.0)
            total += tl.sum(x.to(tl.float32), 0)
    total = total / (tl.maximum(found, 1.0) * (n_kv * GROUP))
    tl.store(mean + (slot * n_kv + head) * DIM + d, total, mask=d < DIM)
    tl.store(counts + slot, found, mask=head == 0)


@triton.jit
def _score_keys(
    k, mean, counts, lo, hi, ends, score, base, places, positions, width, lines,
    T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The attention score of ``T`` places of one slot: the mean query of all heads against the whole key."""
    slot = tl.program_id(0).to(tl.int64)
    if tl.load(counts + slot) > 0:
        place = base + tl.program_id(1) * T + tl.arange(0, T)
        inside = place < tl.load(ends + slot)
        cell = slot * places + place
        low = tl.load(lo + cell, mask=inside, other=0)
        high = tl.load(hi + cell, mask=inside, other=0)
        seen = low < high
        total = tl.zeros((T,), tl.float32)
        for begin in tl.range(0, width, C):
            c = begin + tl.arange(0, C)
            center = tl.load(mean + slot * width + c, mask=c < width, other=0.0)
            key = tl.load(
                k + cell[:, None] * width + c[None, :], mask=seen[:, None] & (c < width)[None, :], other=0.0
            )
            total += tl.sum(key.to(tl.float32) * center[None, :], 1)
        spot = score + slot * lines * positions + place - base
        tl.store(spot, tl.load(spot, mask=seen, other=0.0) + total, mask=seen)


@dataclass(frozen=True)
class Score:
    """What the attention score is made from and where it goes.

    Attributes:
        total: running sum over layers [S, Hkv x LANES, L] float32, which this layer is added to; it counts summed over
            the middle.
        mean: gives mean queries [S, Hkv, D] float32 and the number of rows behind each [S] float32.
        shares: gives the share of each row in its slot's score, [N] float32, 0 for rows that do not count; None
            where a scoring row may lie outside its slot's canvas rows.
    """

    total: Tensor
    mean: Callable[[], tuple[Tensor, Tensor]]
    shares: Callable[[], Tensor] | None = None


def mean_query(q: Tensor, reads: Tensor, flags: Tensor, n_kv: int) -> tuple[Tensor, Tensor]:
    """Mean query of each slot's flagged reads, summed over the heads of each KV head, over all heads' number.

    Args:
        q: [N, H, D], heads contiguous; ``reads`` [S, C] int64 rows; ``flags`` [S, C] bool.

    Returns:
        [S, Hkv, D] float32; its dot product with a key, summed over KV heads, is the score of one layer. And the
        number of flagged reads [S] float32.
    """
    slots, n_reads = reads.shape
    heads, dim = q.shape[1:]
    mean = torch.empty((slots, n_kv, dim), dtype=torch.float32, device=q.device)
    counts = torch.empty(slots, dtype=torch.float32, device=q.device)
    _mean_query[(slots, n_kv)](
        q, reads.contiguous(), flags.contiguous().view(torch.int8), mean, counts, q.stride(0), n_reads, n_kv,
        GROUP=heads // n_kv, DIM=dim, PAD=_pad(dim), C=READS,
    )  # fmt: skip
    return mean, counts


def score_keys(keys: Tensor, score: Score, interval: tuple[Tensor, Tensor], ends: Tensor, base: int) -> None:
    """Add one layer to the attention score, in one order whatever else is in the pass.

    Args:
        keys: [S, P, Hkv, D] contiguous; ``interval``, ``ends`` and ``base`` as in ``attend_rows``.
    """
    slots, places, n_kv, dim = keys.shape
    mean, counts = score.mean()
    lines, positions = score.total.shape[1:]
    _score_keys[(slots, triton.cdiv(positions, SCORED))](
        keys, mean, counts, *interval, ends, score.total, base, places, positions, n_kv * dim, lines,
        T=SCORED, C=256, num_warps=4, num_stages=3,
    )  # fmt: skip


def attend_rows(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    groups: list[Group],
    rank: Tensor,
    interval: tuple[Tensor, Tensor],
    ends: Tensor,
    base: int,
    score: Score | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Attention of all rows of a pass; see :func:`flash_dllm.kernels.row_attention.attend_rows`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rank, ends = rank.contiguous(), ends.contiguous()
    whole = tuple(g for g in groups if g.whole and g.size)
    others = tuple(g for g in groups if not g.whole and g.size)
    # Where slots are few neither launch fills the GPU, so they run side by side.
    beside = bool(whole and others) and q.is_cuda and few(_blocks(whole, q, kv[0]), limits(q.device))
    side = side_stream(q.device) if beside else None
    if others:
        chosen = tiles or _choose(q, kv[0], others, False, beside)
        if side is not None:
            side.wait_stream(torch.cuda.current_stream(q.device))
        with torch.cuda.stream(side):
            _launch(out, q, kv, others, rank, interval, ends, base, None, chosen)
    if whole:
        chosen = tiles or _choose(q, kv[0], whole, score is not None, beside)
        inside = (
            score if score is not None and _scores_inside(whole, others, q, kv[0], score, chosen) else None
        )
        _launch(out, q, kv, whole, rank, interval, ends, base, inside, chosen)
        score = None if inside else score
    if score is not None:
        score_keys(kv[0], score, interval, ends, base)
    if side is not None:
        torch.cuda.current_stream(q.device).wait_stream(side)
    return out


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for what runs beside the current one; joined again before anything else is launched."""
    return torch.cuda.Stream(device)


def _blocks(groups: tuple[Group, ...], q: Tensor, keys: Tensor) -> int:
    """Programs of a launch before any split, with the largest blocks."""
    n_kv = keys.shape[2]
    group = q.shape[1] // n_kv
    return n_kv * sum(len(g.slots) * -(-g.width * group // 128) for g in groups)


def _choose(q: Tensor, keys: Tensor, groups: tuple[Group, ...], score: bool, beside: bool) -> Tiles:
    """Tiles for the blocks of ``groups``: stored ones, or those of the table. What was stored ran alone."""
    (_, heads, dim), n_kv = q.shape, keys.shape[2]
    group, widest = heads // n_kv, max(g.width for g in groups)
    stored = None if beside else stored_tiles(sum(g.size for g in groups), widest, group, dim, score)
    return stored or tiles_for(widest, _blocks(groups, q, keys), group, q.dtype, limits(q.device), beside)


def _scores_inside(
    whole: tuple[Group, ...], others: tuple[Group, ...], q: Tensor, keys: Tensor, score: Score, tiles: Tiles
) -> bool:
    """Whether attention can make the score too: each slot's canvas rows are one block, which has all scoring rows."""
    group = q.shape[1] // keys.shape[2]
    if score.shares is None or any(g.width > _lines(tiles, group) // group for g in whole):
        return False
    return {s for g in others for s in g.slots} <= {s for g in whole for s in g.slots}


def _lines(tiles: Tiles, group: int) -> int:
    """Lines of a block; each of its rows takes ``group`` of them."""
    return max(tiles.m, int(triton.next_power_of_2(group)), 16)


def _launch(
    out: Tensor,
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    groups: tuple[Group, ...],
    rank: Tensor,
    interval: tuple[Tensor, Tensor],
    ends: Tensor,
    base: int,
    score: Score | None,
    tiles: Tiles,
) -> None:
    keys, values = kv
    (n, heads, dim), (_, places, n_kv, _) = q.shape, keys.shape
    group = heads // n_kv
    m = _lines(tiles, group)
    table = TABLES.get(groups, m // group, q.device)
    part = stats = out
    if tiles.splits > 1:
        part = torch.empty((tiles.splits, n, heads, dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((tiles.splits, n, heads, 2), dtype=torch.float32, device=q.device)
    shares, total = out, out
    if score is not None:
        assert score.shares is not None
        shares, total = score.shares(), score.total
    sources = _descriptors(q, keys, values, tiles)
    _attend[(n_kv, table.shape[0], tiles.splits)](
        q, keys, values, *(sources or kv), out, part, stats, table, rank, *interval, ends, shares, total,
        dim**-0.5, base, q.stride(0), places, total.shape[-1], n, n_kv,
        GROUP=group, DIM=dim, PAD=_pad(dim), M=m, N=tiles.n, SPLITS=tiles.splits,
        WHOLE=groups[0].whole, SCORE=score is not None, LANES=lanes(m, tiles.warps, q.dtype), PARTS=LANES,
        DESCRIPTOR=sources is not None, PRECISION=precision(q.dtype),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if tiles.splits > 1:
        _combine[(table.shape[0], triton.cdiv(m // group * heads, JOINED))](
            part, stats, out, table, n, heads, DIM=dim, PAD=_pad(dim), SPLITS=tiles.splits, C=JOINED,
        )  # fmt: skip


def lanes(m: int, warps: int, dtype: torch.dtype) -> int:
    """How many warps hold other lines of a tile of logits than the rest: from 64 lines on each has 16 of its own."""
    return min(warps, m // 16, LANES) if m >= 64 and dtype != torch.float32 else 1


def _descriptors(q: Tensor, keys: Tensor, values: Tensor, tiles: Tiles) -> tuple[Any, Any] | None:
    """Keys and values as TMA takes them, [S x P, Hkv x D] in tiles of one head; None where they come by pointer."""
    dim = keys.shape[-1]
    fits = keys.dtype == q.dtype and _pad(dim) == dim and keys.is_contiguous() and values.is_contiguous()
    aligned = all(t.data_ptr() % 16 == 0 for t in (keys, values)) and dim * keys.element_size() % 16 == 0
    if not (tiles.descriptor and fits and aligned and has_descriptors()):
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    flat = (t.view(-1, keys.shape[2] * dim) for t in (keys, values))
    first, second = (TensorDescriptor.from_tensor(t, [tiles.n, dim]) for t in flat)
    return first, second


def _pad(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))
