"""A plain batched threshold decoder, enough to watch training; the engine is the real one.

Rows of a batch have prompts of different lengths. Each row is its prompt, `length` masked positions, and EOS
up to the batch's common width, as in the training data.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_dllm.train.tokenizer import EOS, EOT, MASK

Forward = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class Decoded:
    """A row's response up to its stop token, passes in which it took part, and its tokens including the stop
    token.
    """

    ids: list[int]
    passes: int
    tokens: int


@torch.no_grad()
def decode(
    forward: Forward,
    canvases: Sequence[list[int]],
    block: int,
    threshold: float,
    width: int,
    device: torch.device,
    until: float = math.inf,
) -> list[Decoded]:
    """Fills the MASK ids of each canvas, `block` positions at a time.

    `forward` maps ids int64 [B, T] to logits [B, T, V] of each position itself. Each pass commits, in a row's
    first unfinished block, every masked position whose confidence reaches `threshold`, and always the best
    one. A row stops when everything before its first stop token is filled. Raises TimeoutError when
    `time.monotonic()` passes `until`.
    """
    ids = torch.full((len(canvases), width), EOS, dtype=torch.long)
    for i, canvas in enumerate(canvases):
        ids[i, : len(canvas)] = torch.tensor(canvas)
    ids = ids.to(device)
    masked = ids == MASK
    first = masked.int().argmax(1)
    end = width - masked.flip(1).int().argmax(1)
    start, passes = first.clone(), torch.zeros(len(canvases), dtype=torch.long, device=device)
    places = torch.arange(width, device=device)
    active = torch.arange(len(canvases), device=device)
    while active.numel():
        if time.monotonic() > until:
            raise TimeoutError("decoding ran into its deadline")
        filled = _step(forward, ids[active], start[active], places, block, threshold)
        ids[active] = filled
        passes[active] += 1
        left = filled == MASK
        start[active] = _advance(left, start[active], places, block, end[active])
        stop = ((filled == EOS) | (filled == EOT)) & (places >= first[active][:, None])
        before = torch.where(stop.any(1), stop.int().argmax(1), width)
        active = active[(left & (places < before[:, None])).any(1)]
    return [
        _result(row, int(a), int(b), int(n))
        for row, a, b, n in zip(ids.cpu().tolist(), first.cpu(), end.cpu(), passes.cpu(), strict=True)
    ]


def _step(
    forward: Forward, ids: Tensor, start: Tensor, places: Tensor, block: int, threshold: float
) -> Tensor:
    logits = forward(ids).float()
    logits[..., MASK] = -torch.inf
    confidence, guess = logits.softmax(-1).max(-1)
    inside = (places >= start[:, None]) & (places < start[:, None] + block) & (ids == MASK)
    confidence = torch.where(inside, confidence, -1.0)
    best = torch.zeros_like(inside).scatter_(1, confidence.argmax(1, keepdim=True), True)
    return torch.where(inside & ((confidence >= threshold) | best), guess, ids)


def _advance(left: Tensor, start: Tensor, places: Tensor, block: int, end: Tensor) -> Tensor:
    """The start of each row's block, moved on where the block is full and another one follows."""
    inside = (places >= start[:, None]) & (places < start[:, None] + block)
    full = ~(left & inside).any(1) & (start + block < end)
    return torch.where(full, start + block, start)


def _result(row: list[int], first: int, end: int, passes: int) -> Decoded:
    response = row[first:end]
    size = next((i for i, token in enumerate(response) if token in (EOS, EOT)), len(response))
    return Decoded(response[:size], passes, min(size + 1, len(response)))
