"""Safetensors files of a checkpoint folder: which there are and what their headers say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from flash_dllm.models.config import ModelError, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorHeader:
    """One stored tensor: its file, its dtype as safetensors spells it ("BF16"), its shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def open_shard(file: Path) -> Any:
    """Open a safetensors file (a context manager). Raises ModelError if missing, truncated or corrupt."""
    try:
        return safe_open(file, "pt")
    except (SafetensorError, OSError) as exc:
        raise ModelError(f"{file}: not a readable safetensors file ({exc})") from exc


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Headers of all tensors of a checkpoint, by name, from one file or from the shards that the index names.

    Raises ModelError for a folder without weights, a missing shard, a corrupt file, a tensor that is in two
    shards, and an index that disagrees with its shards.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() and index.exists():
        raise ModelError(f"{folder}: holds both {SINGLE} and {INDEX}; remove one")
    if index.exists():
        return _sharded(folder, index)
    if not single.exists():
        raise ModelError(f"{folder}: no {SINGLE} and no {INDEX} (other weight formats are not read)")
    return _headers_of(single)


def _headers_of(file: Path) -> dict[str, TensorHeader]:
    headers = {}
    with open_shard(file) as shard:
        for name in shard.keys():  # noqa: SIM118 (not a mapping)
            part = shard.get_slice(name)
            headers[name] = TensorHeader(file, part.get_dtype(), tuple(part.get_shape()))
    return headers


def _sharded(folder: Path, index: Path) -> dict[str, TensorHeader]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: key 'weight_map' is missing or empty")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelError(f"{index}: tensor {name} is in {shard!r}, which is not a file name")
        if not (folder / shard).exists():
            raise ModelError(f"{index}: names shard {shard}, which is missing")
    headers: dict[str, TensorHeader] = {}
    for shard in sorted(set(weight_map.values())):
        for name, header in _headers_of(folder / shard).items():
            if name in headers:
                raise ModelError(f"{folder / shard}: tensor {name} is also in {headers[name].file.name}")
            if name not in weight_map:
                raise ModelError(
                    f"{folder / shard}: unexpected tensor {name}, which {index.name} does not name"
                )
            headers[name] = header
    for name, shard in weight_map.items():
        if name not in headers or headers[name].file.name != shard:
            raise ModelError(f"{folder / shard}: missing tensor {name}, which {index.name} places there")
    return headers
