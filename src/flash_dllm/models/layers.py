"""Packed weights of a dense transformer, and where a checkpoint's tensors go in them.

Shape letters: V vocabulary rows, d model width, H query heads, G key/value heads, D head size, F feed-forward
width. Matrices are [out, in], as torch.nn.functional.linear takes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch

from flash_dllm.models.config import ModelConfig


@dataclass(eq=False)
class LayerWeights:
    """Weights of one layer, all of one dtype on one device."""

    attn_norm: torch.Tensor  # [d]
    wqkv: torch.Tensor  # [(H + 2G) * D, d], rows in the order q, k, v
    bqkv: torch.Tensor | None  # [(H + 2G) * D]
    wo: torch.Tensor  # [d, H * D]
    ffn_norm: torch.Tensor  # [d]
    w_gate_up: torch.Tensor  # [2F, d], gate rows first
    w_down: torch.Tensor  # [d, F]

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> LayerWeights:
        """A copy on another device or in another dtype."""
        moved: dict[str, Any] = {}
        for field in fields(self):
            tensor = getattr(self, field.name)
            moved[field.name] = None if tensor is None else tensor.to(device, dtype)
        return LayerWeights(**moved)


@dataclass(eq=False)
class Model:
    """A whole model. With ``config.tied_head``, ``head`` is the same tensor as ``embed``."""

    config: ModelConfig
    embed: torch.Tensor  # [V, d]
    layers: list[LayerWeights]
    norm: torch.Tensor  # [d]
    head: torch.Tensor  # [V, d]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every weight."""
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        """The device of every weight."""
        return self.embed.device

    @property
    def n_parameters(self) -> int:
        """Parameters held; a tied head counts once."""
        return sum(t.numel() for t in self.tensors())

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every weight once."""
        yield self.embed
        for layer in self.layers:
            yield from (t for f in fields(layer) if (t := getattr(layer, f.name)) is not None)
        yield self.norm
        if self.head is not self.embed:
            yield self.head

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Model:
        """A copy on another device or in another dtype; a tied head stays tied."""
        embed = self.embed.to(device, dtype)
        head = embed if self.head is self.embed else self.head.to(device, dtype)
        layers = [layer.to(device, dtype) for layer in self.layers]
        return Model(self.config, embed, layers, self.norm.to(device, dtype), head)


def empty_model(config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> Model:
    """A model whose weights are allocated and not initialised."""

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    d, rows = config.d_model, config.qkv_rows
    layers = [
        LayerWeights(
            attn_norm=new(d),
            wqkv=new(rows, d),
            bqkv=new(rows) if config.qkv_bias else None,
            wo=new(d, config.n_heads * config.head_dim),
            ffn_norm=new(d),
            w_gate_up=new(2 * config.d_ffn, d),
            w_down=new(d, config.d_ffn),
        )
        for _ in range(config.n_layers)
    ]
    embed = new(config.vocab_size, d)
    return Model(config, embed, layers, new(d), embed if config.tied_head else new(config.vocab_size, d))


def random_model(
    config: ModelConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> Model:
    """A model with random weights, equal for equal (config, dtype, device type, seed).

    The scales keep activations near one at any width and depth, and give logits of standard deviation about
    4, so that predictions are peaked and depend on the context. For the same weights in another dtype use
    ``.to``.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    model = empty_model(config, dtype, device)

    def fill(tensor: torch.Tensor, std: float, mean: float = 0.0) -> None:
        tensor.normal_(mean, std, generator=generator)

    fill(model.embed, 1.0)
    for layer in model.layers:
        fill(layer.attn_norm, 0.1, 1.0)
        fill(layer.wqkv, 2.0 * config.d_model**-0.5)
        if layer.bqkv is not None:
            fill(layer.bqkv, 0.5)
        fill(layer.wo, (config.n_heads * config.head_dim) ** -0.5)
        fill(layer.ffn_norm, 0.1, 1.0)
        fill(layer.w_gate_up, config.d_model**-0.5)
        fill(layer.w_down, config.d_ffn**-0.5)
    fill(model.norm, 0.1, 1.0)
    if not config.tied_head:
        fill(model.head, 4.0 * config.d_model**-0.5)
    return model


def rope_tables(
    config: ModelConfig, n_positions: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary cos and sin, each float32 [n_positions, D // 2]; dimension j is paired with j + D // 2.

    Computed on the CPU and then moved, so that every device rotates by the same numbers.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(n_positions, dtype=torch.float32), 1.0 / config.rope_theta**exponent)
    return angles.cos().to(device), angles.sin().to(device)


@dataclass(frozen=True)
class TensorNames:
    """A family's tensor names; those of a layer follow ``layer``, in which {} is the layer's number."""

    embed: str
    norm: str
    head: str
    layer: str
    attn_norm: str
    q: str
    k: str
    v: str
    o: str
    ffn_norm: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Slot:
    """Where one tensor of a checkpoint goes: rows [start, start + shape[0]) of a packed weight."""

    shape: tuple[int, ...]
    part: str
    layer: int | None = None
    start: int = 0

    def of(self, model: Model) -> torch.Tensor:
        """The view of the packed weight that the tensor fills, of shape ``shape``."""
        owner = model if self.layer is None else model.layers[self.layer]
        packed: torch.Tensor = getattr(owner, self.part)
        return packed[self.start : self.start + self.shape[0]]


def tensor_map(config: ModelConfig, names: TensorNames) -> dict[str, Slot]:
    """Every tensor that a checkpoint of this config must hold, by name."""
    d, table = config.d_model, (config.vocab_size, config.d_model)
    slots = {f"{names.embed}.weight": Slot(table, "embed"), f"{names.norm}.weight": Slot((d,), "norm")}
    if not config.tied_head:
        slots[f"{names.head}.weight"] = Slot(table, "head")
    for i in range(config.n_layers):
        slots.update((names.layer.format(i) + leaf, slot) for leaf, slot in _layer_slots(config, names, i))
    return slots


def _layer_slots(config: ModelConfig, names: TensorNames, i: int) -> Iterator[tuple[str, Slot]]:
    d, f = config.d_model, config.d_ffn
    q_rows, kv_rows = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    start = 0
    for name, rows in ((names.q, q_rows), (names.k, kv_rows), (names.v, kv_rows)):
        yield f"{name}.weight", Slot((rows, d), "wqkv", i, start)
        if config.qkv_bias:
            yield f"{name}.bias", Slot((rows,), "bqkv", i, start)
        start += rows
    yield f"{names.attn_norm}.weight", Slot((d,), "attn_norm", i)
    yield f"{names.o}.weight", Slot((d, q_rows), "wo", i)
    yield f"{names.ffn_norm}.weight", Slot((d,), "ffn_norm", i)
    yield f"{names.gate}.weight", Slot((f, d), "w_gate_up", i)
    yield f"{names.up}.weight", Slot((f, d), "w_gate_up", i, f)
    yield f"{names.down}.weight", Slot((d, f), "w_down", i)
