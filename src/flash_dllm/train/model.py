"""Trainable transformer for the LLaDA, Dream and Qwen2 layouts.

Weights of all layers are stacked (`[layers, out, in]`), which lets the optimiser work on whole stacks. Tokens
flow as one flat axis N = batch * length through two functions a layer, `before_attention` and
`after_attention`; only the attention call between them sees the batch. So with a fixed number of tokens a
step each function has one shape and is compiled once, whatever the sequence length of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Layout = Literal["llada", "dream", "qwen2"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model. `layout` decides masking, prediction shift and names: see `shift`, `causal`,
    `qkv_bias`.
    """

    layout: Layout
    d_model: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int = 2048
    max_length: int = 1024
    rope_theta: float = 10_000.0
    eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def shift(self) -> int:
        """How many rows before a position its prediction is read: 0 for LLaDA, 1 for the others."""
        return 0 if self.layout == "llada" else 1

    @property
    def causal(self) -> bool:
        return self.layout == "qwen2"

    @property
    def qkv_bias(self) -> bool:
        return self.layout != "llada"

    @property
    def qkv_rows(self) -> list[int]:
        """Output rows of the query, key and value projections inside the fused one."""
        return [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises in float32, casts back to x's dtype, then multiplies by the weight. Shapes [..., d] and
    [d].
    """
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-rotation RoPE. x [N, heads, dim], cos and sin [N, 1, dim / 2] in the dtype the rotation runs
    in.
    """
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def before_attention(
    x: Tensor, norm: Tensor, weight: Tensor, bias: Tensor | None, places: Tensor, tables: Tensor, shape: Shape
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, fused projection and rotation.

    x [N, d], places int64 [N], tables float32 [2, max_length, dim / 2]. Returns q, k, v [N, heads, dim] each;
    keys and values are repeated for grouped queries.
    """
    h = F.linear(rms_norm(x, norm, shape.eps), weight, bias)
    parts = torch.split(h, shape.qkv_rows, -1)
    q, k, v = (part.view(x.shape[0], -1, shape.head_dim) for part in parts)
    # LLaDA rotates in float32, the Qwen2 family in the activation dtype.
    angles = tables if shape.layout == "llada" else tables.to(x.dtype)
    cos, sin = angles[0][places][:, None], angles[1][places][:, None]
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    group = shape.heads // shape.kv_heads
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return q, k, v.contiguous()


def after_attention(
    x: Tensor, mixed: Tensor, out: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float
) -> Tensor:
    """Output projection, residual, norm and gated feed-forward. x [N, d], mixed [N, heads * dim]; returns
    [N, d].
    """
    x = x + F.linear(mixed, out)
    gate, up = F.linear(rms_norm(x, norm, eps), gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, down)


def head_loss(
    rows: Tensor, norm: Tensor, head: Tensor, targets: Tensor, weights: Tensor, eps: float
) -> Tensor:
    """Weighted sum of cross entropies and their plain values: rows [C, d], targets int64 [C], weights float32
    [C].

    Returns float32 [2]: (weighted sum, sum over the rows of positive weight).
    """
    logits = F.linear(rms_norm(rows, norm, eps), head)
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return torch.stack(((losses * weights).sum(), (losses * (weights > 0)).sum()))


class StackedTransformer(nn.Module):
    """The model. `compiled=True` compiles the two layer functions and the loss; CPU training leaves them
    eager.
    """

    tables: Tensor

    def __init__(self, shape: Shape, *, compiled: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        d, f, n = shape.d_model, shape.ffn, shape.layers

        def normal(*size: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(*size, generator=generator) * scale)

        attention = shape.heads * shape.head_dim
        residual = (2 * n) ** -0.5
        self.embed = normal(shape.vocab, d, scale=0.02)
        self.head = normal(shape.vocab, d, scale=0.02)
        self.norm = nn.Parameter(torch.ones(d))
        self.attn_norm = nn.Parameter(torch.ones(n, d))
        self.ffn_norm = nn.Parameter(torch.ones(n, d))
        self.qkv = normal(n, sum(shape.qkv_rows), d, scale=d**-0.5)
        self.qkv_bias = nn.Parameter(torch.zeros(n, sum(shape.qkv_rows))) if shape.qkv_bias else None
        self.out = normal(n, d, attention, scale=attention**-0.5 * residual)
        self.gate_up = normal(n, 2 * f, d, scale=d**-0.5)
        self.down = normal(n, d, f, scale=f**-0.5 * residual)
        self.register_buffer("tables", rope_tables(shape), persistent=False)

        functions: tuple[Callable[..., Any], ...] = (before_attention, after_attention, head_loss)
        self._functions = tuple(torch.compile(f, dynamic=False) for f in functions) if compiled else functions

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Runs without the compiled functions, for passes of other sizes than the training step's."""
        before, self._functions = self._functions, (before_attention, after_attention, head_loss)
        yield
        self._functions = before

    def loss(self, rows: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """`head_loss` of rows [C, d] with the model's final norm and head."""
        result: Tensor = self._functions[2](rows, self.norm, self.head, targets, weights, self.shape.eps)
        return result

    def trunk(self, ids: Tensor) -> Tensor:
        """Hidden rows before the final norm. ids int64 [B, T]; returns [B * T, d]."""
        shape = self.shape
        before, after, _ = self._functions
        batch, length = ids.shape
        places = torch.arange(length, device=ids.device).repeat(batch)
        x = F.embedding(ids.reshape(-1), self.embed)
        biases = self.qkv_bias.unbind() if self.qkv_bias is not None else (None,) * shape.layers
        stacks = (self.attn_norm, self.qkv, self.out, self.ffn_norm, self.gate_up, self.down)
        layers = zip(*(stack.unbind() for stack in stacks), biases, strict=True)
        for norm, qkv, out, ffn_norm, gate_up, down, bias in layers:
            heads = before(x, norm, qkv, bias, places, self.tables, shape)
            q, k, v = (
                part.view(batch, length, shape.heads, shape.head_dim).transpose(1, 2) for part in heads
            )
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)
            mixed = mixed.transpose(1, 2).reshape(batch * length, -1)
            x = after(x, mixed, out, ffn_norm, gate_up, down, shape.eps)
        return x

    def logits(self, ids: Tensor) -> Tensor:
        """Predictions of every position itself (already shifted back). ids int64 [B, T]; returns [B, T,
        vocab].
        """
        rows = F.linear(rms_norm(self.trunk(ids), self.norm, self.shape.eps), self.head).view(*ids.shape, -1)
        return torch.cat((rows[:, :1], rows[:, :-1]), 1) if self.shape.shift else rows


def rope_tables(shape: Shape) -> Tensor:
    """Cosines and sines, float32 [2, max_length, head_dim / 2]."""
    inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angles = torch.arange(shape.max_length).float()[:, None] * inverse
    return torch.stack((angles.cos(), angles.sin()))
