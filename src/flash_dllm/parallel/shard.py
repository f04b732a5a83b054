"""Which part of a model a rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flash_dllm.kernels.linear import Matrix, linear, storages
from flash_dllm.kernels.ranks import Ranks, VocabShard
from flash_dllm.models.config import ModelConfig
from flash_dllm.models.layers import Model, random_model

from .errors import ParallelError


def check_split(config: ModelConfig, size: int) -> None:
    """Refuse a number of ranks that does not divide the model.

    Raises:
        ParallelError: names the number and what it does not divide.
    """

    def refuse(what: str) -> ParallelError:
        return ParallelError(f"tensor_parallel_size={size}: does not divide {what}")

    if config.n_heads % size:
        raise refuse(f"the model's {config.n_heads} heads")
    if config.n_kv_heads % size and size % config.n_kv_heads:
        raise refuse(f"the model's {config.n_kv_heads} heads of keys and values, nor is a multiple of them")
    if config.d_ffn % size:
        raise refuse(f"the feed-forward width of {config.d_ffn}")
    if config.vocab_size < size:
        raise ParallelError(
            f"tensor_parallel_size={size}: more than the {config.vocab_size} tokens there are"
        )


def split(config: ModelConfig, ranks: Ranks) -> tuple[ModelConfig, VocabShard]:
    """A rank's config (its heads, its feed-forward width) and its rows of the vocabulary.

    With fewer heads of keys and values than ranks, neighbouring ranks hold the same one. The last rank's part of
    the vocabulary may be smaller than the others'.

    Raises:
        ParallelError: the model cannot be split so.
    """
    check_split(config, ranks.size)
    part = replace(
        config,
        n_heads=config.n_heads // ranks.size,
        n_kv_heads=max(1, config.n_kv_heads // ranks.size),
        d_ffn=config.d_ffn // ranks.size,
    )
    bounds = [config.vocab_size * r // ranks.size for r in (ranks.rank, ranks.rank + 1)]
    return part, VocabShard(bounds[0], bounds[1], ranks)


@dataclass(eq=False)
class RowParallel:
    """Some columns of a matrix: the product is the sum of what all ranks get from theirs."""

    local: Matrix
    ranks: Ranks

    @property
    def shape(self) -> torch.Size:
        """Of this rank's part."""
        shape: torch.Size = self.local.shape  # type: ignore[union-attr]
        return shape

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x`` [N, this rank's columns] -> [N, out], the same on every rank."""
        out = self.ranks.sum(linear(x, self.local))
        return out if bias is None else out + bias

    def write(self, start: int, rows: Tensor, name: str = "a matrix") -> None:
        if isinstance(self.local, Tensor):
            self.local[start : start + rows.shape[0]].copy_(rows)
        else:
            self.local.write(start, rows, name)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> RowParallel:
        return RowParallel(self.local.to(device, dtype), self.ranks)

    def numel(self) -> int:
        return self.local.numel()

    def storages(self) -> Iterator[Tensor]:
        yield from storages(self.local)

    def __getitem__(self, rows: slice) -> RowParallel:
        return RowParallel(self.local[rows], self.ranks)


def with_sums(model: Model) -> Model:
    """A rank's part of a model whose products over split inputs (output and down projection) are summed."""
    ranks = model.ranks
    assert ranks is not None
    layers = [
        replace(layer, wo=RowParallel(layer.wo, ranks), w_down=RowParallel(layer.w_down, ranks))
        for layer in model.layers
    ]
    return replace(model, layers=layers)


def random_part(
    config: ModelConfig, ranks: Ranks, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> Model:
    """A rank's part of a model with random weights, for measuring time: the parts do not belong together."""
    part, shard = split(config, ranks)
    made = random_model(part, dtype, device, seed)
    head = made.head[shard.start : shard.stop].clone()
    return with_sums(replace(made, head=head, shard=shard))
