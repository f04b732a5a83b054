"""Packed weights of a dense transformer, and where a checkpoint's tensors go in them.

Shape letters: V vocabulary rows, d model width, H query heads, G key/value heads, D head size, F feed-forward
width. Matrices are [out, in], as torch.nn.functional.linear takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch

from flash_dllm.kernels.linear import Matrix, storages
from flash_dllm.kernels.ranks import Ranks, VocabShard
from flash_dllm.models.config import ModelConfig

MATRICES = ("wqkv", "wo", "w_gate_up", "w_down")
"""The fields of :class:`LayerWeights` that may be kept in another form than a tensor."""


@dataclass(eq=False)
class LayerWeights:
    """Weights of one layer, on one device and, but for quantised matrices, of one dtype."""

    attn_norm: torch.Tensor  # [d]
    wqkv: Matrix  # [(H + 2G) * D, d], rows in the order q, k, v
    bqkv: torch.Tensor | None  # [(H + 2G) * D]
    wo: Matrix  # [d, H * D]
    ffn_norm: torch.Tensor  # [d]
    w_gate_up: Matrix  # [2F, d], gate rows first
    w_down: Matrix  # [d, F]

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> LayerWeights:
        """A copy on another device or in another dtype."""
        moved: dict[str, Any] = {}
        for field in fields(self):
            tensor = getattr(self, field.name)
            moved[field.name] = None if tensor is None else tensor.to(device, dtype)
        return LayerWeights(**moved)


@dataclass(eq=False)
class Model:
    """A whole model, or one tensor-parallel rank's part of it. With ``config.tied_head``, ``head`` shares ``embed``.

    Of a part, ``config`` counts the heads and the feed-forward width of this rank, and ``shard`` says which rows of
    the vocabulary ``head`` holds and how ranks agree; ``embed`` is whole.
    """

    config: ModelConfig
    embed: torch.Tensor  # [V, d]
    layers: list[LayerWeights]
    norm: torch.Tensor  # [d]
    head: torch.Tensor  # [V, d]
    shard: VocabShard | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations, and of every weight that is not quantised."""
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        """The device of every weight."""
        return self.embed.device

    @property
    def ranks(self) -> Ranks | None:
        """Those that share the model; None for a whole one."""
        return None if self.shard is None else self.shard.ranks

    @property
    def n_parameters(self) -> int:
        """Parameters held; a tied head counts once, and scales of quantised matrices do not."""
        return sum(matrix.numel() for matrix in self._weights())

    @property
    def nbytes(self) -> int:
        """Bytes of every weight, scales included."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor that holds weights, once."""
        for weight in self._weights():
            yield from storages(weight)

    def _weights(self) -> Iterator[Matrix]:
        yield self.embed
        for layer in self.layers:
            yield from (t for f in fields(layer) if (t := getattr(layer, f.name)) is not None)
        yield self.norm
        if not self.config.tied_head:
            yield self.head

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Model:
        """A copy on another device or in another dtype; a tied head stays tied."""
        embed = self.embed.to(device, dtype)
        head = tied_rows(embed, self.shard) if self.config.tied_head else self.head.to(device, dtype)
        layers = [layer.to(device, dtype) for layer in self.layers]
        return Model(self.config, embed, layers, self.norm.to(device, dtype), head, self.shard)


def tied_rows(embed: torch.Tensor, shard: VocabShard | None) -> torch.Tensor:
    """The head of a model with a tied one: the rows of ``embed`` [V, d] that this rank multiplies."""
    return embed if shard is None else embed[shard.start : shard.stop]


def empty_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    matrix: Callable[[int, int], Matrix] | None = None,
    shard: VocabShard | None = None,
) -> Model:
    """A model whose weights are allocated and not initialised.

    Args:
        matrix: allocates a layer's matrix [rows, columns]; None for a tensor of ``dtype``.
        shard: which rows of the vocabulary the head holds; None for all. ``config`` is the rank's own.
    """

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    matrix = matrix or new
    d, rows = config.d_model, config.qkv_rows
    layers = [
        LayerWeights(
            attn_norm=new(d),
            wqkv=matrix(rows, d),
            bqkv=new(rows) if config.qkv_bias else None,
            wo=matrix(d, config.n_heads * config.head_dim),
            ffn_norm=new(d),
            w_gate_up=matrix(2 * config.d_ffn, d),
            w_down=matrix(d, config.d_ffn),
        )
        for _ in range(config.n_layers)
    ]
    embed = new(config.vocab_size, d)
    head_rows = config.vocab_size if shard is None else shard.stop - shard.start
    head = tied_rows(embed, shard) if config.tied_head else new(head_rows, d)
    return Model(config, embed, layers, new(d), head, shard)


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

    def fill(tensor: Matrix, std: float, mean: float = 0.0) -> None:
        assert isinstance(tensor, torch.Tensor)
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

    def write(self, model: Model, tensor: torch.Tensor, name: str) -> None:
        """Copy ``tensor`` [*shape], the checkpoint's ``name``, to its rows of the packed weight."""
        owner = model if self.layer is None else model.layers[self.layer]
        packed: Matrix = getattr(owner, self.part)
        if isinstance(packed, torch.Tensor):
            packed[self.start : self.start + self.shape[0]].copy_(tensor)
        else:
            packed.write(self.start, tensor, name)


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
