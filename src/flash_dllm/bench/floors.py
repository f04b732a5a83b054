"""The ceilings of a device, measured, and the floors that they put under a time.

A pass cannot be faster than its weights can be read once, nor than its multiplications at the rate of the library's
largest matrix product; attention adds its own two bounds. Nothing is added for launches, norms or the choice of tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from flash_dllm.bench.timing import Timer
from flash_dllm.models.config import ModelConfig


@dataclass(frozen=True)
class Ceilings:
    """Measured in this run: ``copy`` in bytes/s (read and write both counted), ``matmul`` in operations/s."""

    copy: float
    matmul: float
    dtype: str

    def row(self) -> dict[str, Any]:
        return {
            "copy_tb_s": round(self.copy / 1e12, 4), "matmul_tflop_s": round(self.matmul / 1e12, 4),
            "dtype": self.dtype,
        }  # fmt: skip

    def ms(self, operations: float, moved: float) -> float:
        """The least time of so many operations and bytes, in ms."""
        return 1e3 * max(operations / self.matmul, moved / self.copy)


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """A large copy and a large square matrix product on random data."""
    big = device.type == "cuda"
    timer = Timer(device, repeats=20 if big else 5)
    count = (2**30 if big else 2**25) // torch.empty((), dtype=dtype).element_size()
    pair = torch.randn(2, count, device=device).to(dtype)
    moved = pair.numel() * pair.element_size()
    copied = timer(partial(pair[0].copy_, pair[1]), cold=False)
    del pair
    n = 8192 if big else 384
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    product = timer(partial(torch.mm, a, b), cold=False)
    return Ceilings(1e3 * moved / copied.ms, 1e3 * 2 * n**3 / product.ms, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Work:
    """What one pass has to do: ``rows`` queries in ``slots`` canvases of ``keys`` positions, ``reads`` of them read."""

    slots: int
    rows: int
    keys: int
    reads: int

    def row(self) -> dict[str, int]:
        return asdict(self)


def layer_matmul_weights(config: ModelConfig) -> int:
    """Weights of one layer that a row is multiplied with."""
    heads = config.n_heads * config.head_dim
    return config.d_model * (config.qkv_rows + heads + 3 * config.d_ffn)


def pass_floor(config: ModelConfig, work: Work, ceilings: Ceilings, itemsize: int) -> float:
    """The least time of one pass in ms (see the module)."""
    weights = config.n_layers * layer_matmul_weights(config)
    head = config.vocab_size * config.d_model
    operations = 2 * (weights * work.rows + head * work.reads)
    linear = ceilings.ms(operations, itemsize * (weights + head))
    return linear + config.n_layers * attention_floor(config, work, ceilings, itemsize)


def attention_floor(config: ModelConfig, work: Work, ceilings: Ceilings, itemsize: int) -> float:
    """The least time of one layer's attention in ms: K and V of every slot read once, two products a row and key."""
    operations = 4 * work.rows * work.keys * config.n_heads * config.head_dim
    moved = 2 * work.slots * work.keys * config.n_kv_heads * config.head_dim * itemsize
    return ceilings.ms(operations, moved)
