"""What a checkpoint is and what memory it takes, without loading a weight."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from flash_dllm.models.config import ModelConfig
from flash_dllm.models.load import DTYPES, Checkpoint, is_local, read_config, resolve


def inspect_checkpoint(
    source: str | Path, revision: str | None = None, mask_id: int | None = None
) -> dict[str, Any]:
    """Facts about a checkpoint, ready for JSON; sizes in bytes.

    ``parameters``, ``config``, and by dtype name ``weight_bytes`` and ``kv_bytes_per_position``. From a local
    folder also, after the same checks as ``load_model`` makes, ``stored_bytes`` by stored dtype and
    ``dtype``, what "auto" gives. Of a model on the hub only its config is fetched, and these two are None.
    """
    folder = resolve(source, revision, weights=False)
    config = read_config(folder, mask_id)
    checkpoint = Checkpoint(folder, mask_id) if is_local(source) else None
    return {
        "source": str(source),
        "folder": str(folder),
        "family": config.family,
        "parameters": config.n_parameters,
        "config": asdict(config),
        "weight_bytes": {name: config.n_parameters * t.itemsize for name, t in DTYPES.items()},
        "kv_bytes_per_position": {
            name: config.kv_bytes_per_position(t.itemsize) for name, t in DTYPES.items()
        },
        "stored_bytes": checkpoint and checkpoint.stored_bytes(),
        "dtype": checkpoint and str(checkpoint.pick_dtype("auto")).removeprefix("torch."),
    }


SLAB = 8192
"""Most rows that go through the layers together, unless one canvas has more. At the shape of LLaDA-8B they take
about 1 GB of activations; reading the weights again for every slab costs about 2 % of the slab's arithmetic."""


def memory_estimate(
    config: ModelConfig, dtype: torch.dtype, max_num_seqs: int, max_model_len: int
) -> dict[str, int]:
    """Bytes needed to run ``max_num_seqs`` canvases of ``max_model_len`` positions.

    Keys: weights, kv_cache, activations, total. Logits are never held for all rows and not counted.
    """
    positions = max_num_seqs * max_model_len
    parts = {
        "weights": config.n_parameters * dtype.itemsize,
        "kv_cache": config.kv_bytes_per_position(dtype.itemsize) * positions,
        "activations": activation_bytes(config, dtype, max_model_len, positions),
    }
    return {**parts, "total": sum(parts.values())}


def activation_bytes(config: ModelConfig, dtype: torch.dtype, longest: int, rows: int = SLAB) -> int:
    """Bytes of activations while ``rows`` rows pass, an upper bound.

    They pass at most :data:`SLAB` at a time, or the ``longest`` canvas. Counted: residual, normed input, packed q, k,
    v, attention output and the feed-forward's gate, up and product.
    """
    return row_bytes(config, dtype.itemsize) * min(rows, max(SLAB, longest))


def row_bytes(config: ModelConfig, size: int) -> int:
    """Bytes of activations a row, as :func:`activation_bytes` counts them; ``size``: of a number."""
    width = 3 * config.d_model + config.qkv_rows + config.n_heads * config.head_dim + 3 * config.d_ffn
    return width * size
