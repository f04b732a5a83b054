"""Triton kernels: attention of the rows of a pass, and the attention score of Flash-Cache inside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_dllm.kernels import tuned
from flash_dllm.kernels.devices import Limits, limits, precision

from .groups import TABLES, Group

READS = 64
"""Scoring rows added at once; one number, so that the order of the sum does not depend on how many there may be."""
NO_SCORE, MEAN_GIVEN, OWN_ROWS = (tl.constexpr(i) for i in range(3))
"""No attention score; one from mean queries; one from the queries of the block itself, by their shares."""
LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Tiles:
    """Sizes of a launch: rows x query heads of a KV head (``m``), keys (``n``), and over how many key ranges."""

    m: int
    n: int
    splits: int = 1
    warps: int = 4
    stages: int = 2


@triton.jit(do_not_specialize=["n_rows"])
def _attend(
    q, k, v, out, part, stats, table, rank, lo, hi, ends, mean, score,
    scale, base, row_stride, places, positions, n_rows, n_kv,
    GROUP: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr,
    WHOLE: tl.constexpr, SCORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a block of rows of one slot, one KV head, one range of keys."""
    entry, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    line = table + entry * 5
    slot, first, count = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    slot64 = slot.to(tl.int64)
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
    if SCORE != NO_SCORE:
        # The first block of a slot scores its keys, the others none.
        scored = tl.load(line + 4) * stop
        if SCORE == OWN_ROWS:
            share = tl.load(mean + row, mask=own, other=0.0)
            # A row that does not count may hold anything.
            counted = tl.where((share > 0)[:, None], query.to(tl.float32), 0.0)
            center = tl.sum(counted * share[:, None], 0)
        else:
            center = tl.load(mean + (slot64 * n_kv + head) * DIM + d, mask=dims, other=0.0)
    cells = (slot64 * places * n_kv + head) * DIM
    top = tl.full((M,), float("-inf"), tl.float32)
    mass = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, PAD), tl.float32)
    for at in tl.range(start, stop, N):
        place = at + n
        seen = place < stop
        if not WHOLE:
            low = tl.load(lo + slot64 * places + place, mask=seen, other=0)
            high = tl.load(hi + slot64 * places + place, mask=seen, other=0)
            seen = low < high
        # What nobody may see can hold anything, NaN included, so it is never loaded.
        offset = cells + place.to(tl.int64)[:, None] * (n_kv * DIM) + d[None, :]
        there = seen[:, None] & dims[None, :]
        key = tl.load(k + offset, mask=there, other=0.0)
        if SCORE != NO_SCORE:
            raw = tl.sum(key.to(tl.float32) * center[None, :], 1)
            spot = score + (slot64 * n_kv + head) * positions + place - base
            mine = seen & (place >= base) & (place < scored)
            tl.store(spot, tl.load(spot, mask=mine, other=0.0) + raw, mask=mine)
        key = key.to(query.dtype)
        logit = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * LOG2E)
        if WHOLE:
            logit = tl.where(seen[None, :], logit, float("-inf"))
        else:
            visible = (low[None, :] <= ranks[:, None]) & (ranks[:, None] < high[None, :])
            logit = tl.where(visible, logit, float("-inf"))
        high_mark = tl.maximum(top, tl.max(logit, 1))
        level = tl.where(high_mark == float("-inf"), 0.0, high_mark)
        weight = tl.exp2(logit - level[:, None])
        fade = tl.exp2(top - level)
        mass = mass * fade + tl.sum(weight, 1)
        value = tl.load(v + offset, mask=there, other=0.0).to(query.dtype)
        acc = tl.dot(weight.to(query.dtype), value, acc * fade[:, None], input_precision=PRECISION)
        top = high_mark
    target = row.to(tl.int64)[:, None] * (n_kv * GROUP * DIM) + column[:, None] + d[None, :]
    keep = own[:, None] & dims[None, :]
    if SPLITS == 1:
        # A row that sees nothing has no mass; a NaN mass has to stay one.
        done = acc / tl.where(mass == 0.0, 1.0, mass)[:, None]
        tl.store(out + target, done.to(out.dtype.element_ty), mask=keep)
    else:
        lane = split.to(tl.int64) * n_rows * n_kv * GROUP
        tl.store(part + lane * DIM + target, acc, mask=keep)
        cell = (lane + row.to(tl.int64) * (n_kv * GROUP) + head * GROUP + m % GROUP) * 2
        tl.store(stats + cell, top, mask=own)
        tl.store(stats + cell + 1, mass, mask=own)


@triton.jit(do_not_specialize=["n_rows"])
def _combine(
    part, stats, out, table, n_rows, heads, DIM: tl.constexpr, PAD: tl.constexpr,
    SPLITS: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Join the key ranges of one row and one head, in fixed order."""
    line = table + tl.program_id(0) * 5
    offset, head = tl.program_id(1), tl.program_id(2)
    first, count = tl.load(line + 1), tl.load(line + 2)
    split, d = tl.arange(0, S), tl.arange(0, PAD)
    inside = split < SPLITS
    if offset < count:
        cell = (first + offset).to(tl.int64) * heads + head
        places = split.to(tl.int64) * n_rows * heads + cell
        top = tl.load(stats + places * 2, mask=inside, other=float("-inf"))
        mass = tl.load(stats + places * 2 + 1, mask=inside, other=0.0)
        acc = tl.load(
            part + places[:, None] * DIM + d[None, :],
            mask=inside[:, None] & (d < DIM)[None, :], other=0.0,
        )  # fmt: skip
        level = tl.max(top, 0)
        level = tl.where(level == float("-inf"), 0.0, level)
        weight = tl.exp2(top - level)
        total = tl.sum(mass * weight, 0)
        mixed = tl.sum(acc * weight[:, None], 0)
        done = mixed / tl.where(total == 0.0, 1.0, total)
        tl.store(out + cell * DIM + d, done.to(out.dtype.element_ty), mask=d < DIM)


@triton.jit
def _mean_query(
    q, reads, flags, mean, row_stride, n_reads, n_kv,
    GROUP: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Mean query of one slot and KV head over its scoring rows and the head's queries, divided by all heads."""
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


def tiles_for(rows: int, blocks: int, group: int, dtype: torch.dtype, chip: Limits) -> Tiles:
    """Tiles for blocks of ``rows`` rows each, ``blocks`` programs before any split."""
    if dtype == torch.float32:
        return Tiles(16 if rows * group <= 16 else 32, 32, warps=8)
    m = 16
    while m < min(rows * group, 128):
        m *= 2
    if m == 128 and chip.shared < 100 * 1024:
        m = 64
    n = 64 if m >= 64 else 128
    splits = 1
    while splits < 8 and blocks * splits * 2 <= chip.processors * 2:
        splits *= 2
    return Tiles(m, n, splits, 8 if m == 128 else 4, 3 if chip.shared > 128 * 1024 else 2)


def stored_tiles(rows: int, width: int, group: int, dim: int, score: bool) -> Tiles | None:
    """What was measured on this device for the nearest number of rows, ``width`` of them a slot, if anything was."""
    entry = tuned.current().find("row_attention", rows, group=group, dim=dim, width=width, score=int(score))
    return None if entry is None else Tiles(**entry.tiles)


def invariant_tiles(dtype: torch.dtype) -> Tiles:
    """Tiles that do not depend on the number of rows or slots."""
    return Tiles(32, 32, warps=8) if dtype == torch.float32 else Tiles(64, 64)


@dataclass(frozen=True)
class Score:
    """What the attention score is made from and where it goes.

    Attributes:
        total: running sum over layers [S, Hkv, L] float32, which this layer is added to.
        mean: gives mean queries [S, Hkv, D] float32.
        shares: gives the share of each row in its slot's score, [N] float32, 0 for rows that do not count; None
            where a scoring row may lie outside its slot's first block.
    """

    total: Tensor
    mean: Callable[[], Tensor]
    shares: Callable[[], Tensor] | None = None


def mean_query(q: Tensor, reads: Tensor, flags: Tensor, n_kv: int) -> Tensor:
    """Mean query of each slot's flagged reads, summed over the heads of each KV head, over all heads' number.

    Args:
        q: [N, H, D], heads contiguous; ``reads`` [S, C] int64 rows; ``flags`` [S, C] bool.

    Returns:
        [S, Hkv, D] float32; its dot product with a key, summed over KV heads, is the score of one layer.
    """
    slots, n_reads = reads.shape
    heads, dim = q.shape[1:]
    mean = torch.empty((slots, n_kv, dim), dtype=torch.float32, device=q.device)
    _mean_query[(slots, n_kv)](
        q, reads.contiguous(), flags.contiguous().view(torch.int8), mean, q.stride(0), n_reads, n_kv,
        GROUP=heads // n_kv, DIM=dim, PAD=_pad(dim), C=READS,
    )  # fmt: skip
    return mean


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
    for whole in (True, False):
        some = tuple(g for g in groups if g.whole == whole and g.size)
        if some:
            _launch(out, q, kv, some, rank, interval, ends, base, score if whole else None, tiles)
    return out


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
    tiles: Tiles | None,
) -> None:
    keys, values = kv
    (n, heads, dim), (_, places, n_kv, _) = q.shape, keys.shape
    group, whole = heads // n_kv, groups[0].whole
    if tiles is None:
        widest = max(g.width for g in groups)
        chip = limits(q.device)
        lanes = sum(len(g.slots) * -(-g.width * group // 128) for g in groups)
        rows = sum(g.size for g in groups)
        stored = stored_tiles(rows, widest, group, dim, score is not None)
        tiles = stored or tiles_for(widest, lanes * n_kv, group, q.dtype, chip)
    m = max(tiles.m, triton.next_power_of_2(group), 16)
    table = TABLES.get(groups, m // group, q.device)
    part = stats = out
    if tiles.splits > 1:
        part = torch.empty((tiles.splits, n, heads, dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((tiles.splits, n, heads, 2), dtype=torch.float32, device=q.device)
    source, total, kind = out, out, NO_SCORE
    if score is not None:
        alone = score.shares is not None and all(g.width <= m // group for g in groups)
        kind, total = OWN_ROWS if alone else MEAN_GIVEN, score.total
        source = score.shares() if alone and score.shares is not None else score.mean()
    _attend[(table.shape[0], n_kv, tiles.splits)](
        q, keys, values, out, part, stats, table, rank, *interval, ends, source, total,
        dim**-0.5, base, q.stride(0), places, total.shape[-1], n, n_kv,
        GROUP=group, DIM=dim, PAD=_pad(dim), M=m, N=tiles.n, SPLITS=tiles.splits,
        WHOLE=whole, SCORE=kind.value, PRECISION=precision(q.dtype),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if tiles.splits > 1:
        _combine[(table.shape[0], m // group, heads)](
            part, stats, out, table, n, heads, DIM=dim, PAD=_pad(dim), SPLITS=tiles.splits,
            S=triton.next_power_of_2(tiles.splits),
        )  # fmt: skip


def _pad(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))
