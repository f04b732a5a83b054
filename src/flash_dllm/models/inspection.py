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


def memory_estimate(
    config: ModelConfig, dtype: torch.dtype, max_num_seqs: int, max_model_len: int
) -> dict[str, int]:
    """Bytes needed to run ``max_num_seqs`` canvases of ``max_model_len`` positions.

    Keys: weights, kv_cache, activations, total. Activations are those of a sweep over all canvases at once,
    an upper bound: residual, normed input, packed q, k, v, attention output and the feed-forward's gate, up
    and product. Logits are never held for all rows and not counted.
    """
    positions = max_num_seqs * max_model_len
    width = 3 * config.d_model + config.qkv_rows + config.n_heads * config.head_dim + 3 * config.d_ffn
    parts = {
        "weights": config.n_parameters * dtype.itemsize,
        "kv_cache": config.kv_bytes_per_position(dtype.itemsize) * positions,
        "activations": width * positions * dtype.itemsize,
    }
    return {**parts, "total": sum(parts.values())}
