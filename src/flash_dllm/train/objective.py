"""Corruption and loss: the masked diffusion objective (both forms) and the causal one, on packed batches.

A packed batch is int16 [B, T]: the token id, plus `MASKABLE` where the objective may hide or score the token.
The SFT form flags the response with its EOS padding, the pre-training form every position but BOS, an
infilling canvas its gaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_dllm.train.data import MASKABLE
from flash_dllm.train.model import StackedTransformer
from flash_dllm.train.tokenizer import MASK

_ID = MASKABLE - 1


@dataclass(slots=True)
class Corrupted:
    """A batch ready for the model. `rows` are the flat rows that are scored, padded to a fixed count C.

    ids int64 [B, T]; rows int64 [C] (padding points at row 0) and `home` int64 [C] (padding points one past
    the end); targets int64 [C]; weights float32 [C] (0 for padding).
    """

    ids: Tensor
    rows: Tensor
    home: Tensor
    targets: Tensor
    weights: Tensor


def corrupt(packed: Tensor, shift: int, causal: bool, capacity: int, generator: torch.Generator) -> Corrupted:
    """Masks a packed batch and lists the rows to score.

    Each sequence has its own t, stratified over the batch; a token is hidden with p = 0.999 t + 0.001 and
    weighs 1 / p, divided by the batch's number of maskable tokens. Causal: nothing is hidden, every flagged
    token weighs the same. Row j - shift predicts position j. Scored tokens beyond `capacity` are dropped.
    """
    batch, length = packed.shape
    device = packed.device
    flags, tokens = packed >= MASKABLE, (packed & _ID).long()
    share = 1.0 / flags.sum().clamp(min=1).float()
    if causal:
        scored, ids = flags, tokens
        weight = share.expand(batch, length)
    else:
        offset = torch.rand((), device=device, generator=generator)
        p = (torch.arange(batch, device=device) + offset) / batch * 0.999 + 0.001
        scored = flags & (torch.rand(batch, length, device=device, generator=generator) < p[:, None])
        ids = torch.where(scored, MASK, tokens)
        weight = (share / p)[:, None].expand(batch, length)
    flat = scored.reshape(-1)
    total = flat.numel()
    place = torch.where(flat, flat.cumsum(0) - 1, capacity).clamp(max=capacity)
    # `total` marks an unused entry; the extra last entry takes everything that is not scored.
    chosen = torch.full((capacity + 1,), total, device=device)
    chosen = chosen.scatter_(0, place, torch.arange(total, device=device))[:capacity]
    used = chosen < total
    position = torch.where(used, chosen, 0)
    home = torch.where(used, chosen - shift, total)
    return Corrupted(
        ids,
        torch.where(used, home, 0),
        home,
        tokens.reshape(-1)[position],
        weight.reshape(-1)[position] * used,
    )


class _TakeRows(torch.autograd.Function):
    """`x[rows]` for different rows, whose backward is a plain copy: the stock one sorts and accumulates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, home: Tensor) -> Tensor:
        ctx.save_for_backward(home)
        ctx.count = x.shape[0]
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (home,), (grad,) = ctx.saved_tensors, grads
        full = grad.new_zeros(ctx.count + 1, grad.shape[1])
        return full.index_copy_(0, home, grad)[:-1], None, None


def loss_of(model: StackedTransformer, batch: Corrupted) -> tuple[Tensor, Tensor]:
    """The objective (with gradient), and the mean cross entropy of the scored rows (nats a token,
    without).
    """
    rows = _TakeRows.apply(model.trunk(batch.ids), batch.rows, batch.home)  # type: ignore[no-untyped-call]
    both = model.loss(rows, batch.targets, batch.weights)
    return both[0], both[1].detach() / (batch.weights > 0).sum().clamp(min=1)
