"""Attention of a block of rows over their slot's cache, with visibility by rank intervals."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .groups import Group


def row_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rank: Tensor | None = None,
    interval: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Softmax attention of R rows of each of B lanes over P key places.

    Args:
        q: rotated queries [B, R, H, D].
        keys: [B, P, Hkv, D]; ``values`` likewise.
        rank: [B, R] int32; None together with ``interval`` means that every place is visible to every row.
        interval: ``(lo, hi)``, each [B, P] int32: a place is visible to a row iff ``lo <= rank < hi``.

    Returns:
        [B, R, H, D], dtype of ``q``. A row that sees nothing gives zeros; a place that no rank can see may
        hold anything, NaN included.
    """
    mask = None
    if interval is not None and rank is not None:
        lo, hi = interval
        mask = (lo[:, None] <= rank[..., None]) & (rank[..., None] < hi[:, None])
        hidden = (hi <= lo)[..., None, None]
        keys, values = keys.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
        blind = ~mask.any(-1)
        mask = (mask | blind[..., None])[:, None]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=mask,
        enable_gqa=q.shape[2] != keys.shape[2],
    ).transpose(1, 2)
    if mask is not None:
        out = out.masked_fill(blind[..., None, None], 0)
    return out


def lane_keys(kv: Tensor, group: Group) -> Tensor:
    """The keys (or values) that a group looks at, [B, n_keys, Hkv, D]; a view where the slots are adjacent."""
    first, last = group.slots[0], group.slots[-1]
    if last - first + 1 == len(group.slots):
        return kv[first : last + 1, : group.n_keys]
    return kv[torch.tensor(group.slots, device=kv.device), : group.n_keys]


def attend_rows(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    groups: list[Group],
    rank: Tensor,
    interval: tuple[Tensor, Tensor],
    base: int,
) -> Tensor:
    """Attention of all rows of a pass, group by group; arguments as in the package's ``attend_rows``."""
    out = torch.empty_like(q)
    for group in groups:
        shape = (len(group.slots), group.width)
        mine = q[group.flat].unflatten(0, shape)
        keys, values = (lane_keys(t, group).to(q.dtype) for t in kv)
        if group.dense:
            part = row_attention(mine, keys[:, base:], values[:, base:])
        else:
            lo, hi = (lane_keys(t, group) for t in interval)
            part = row_attention(mine, keys, values, rank[group.flat].view(shape), (lo, hi))
        out[group.flat] = part.flatten(0, 1)
    return out


def key_score(mean_query: Tensor, keys: Tensor) -> Tensor:
    """Flash-Cache's attention score of each key (Flash-dLLM, Eq. 2, one layer).

    The mean over candidate rows and heads of the raw logits q.k equals one dot product of each head's mean
    query with the key, so no row-wise logits are formed.

    Args:
        mean_query: mean over the candidate rows, [S, H, D] float32.
        keys: [S, P, Hkv, D].

    Returns:
        [S, P] float32, no 1/sqrt(D) and no softmax.
    """
    n_heads, n_kv = mean_query.shape[1], keys.shape[2]
    grouped = mean_query.unflatten(1, (n_kv, n_heads // n_kv)).sum(2)
    return torch.einsum("shd,sphd->sp", grouped, keys.float()) / n_heads
