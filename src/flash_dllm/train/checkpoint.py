"""A run's state in one small file: bfloat16 masters and Adam moments, int8 momentum, all packed losslessly
with zlib.

Precision is given up on purpose: a stage boundary must fit a transfer limit, and rounding every master once
by 2^-9 is less than one step changes it. A resumed run continues from the same rounded state whatever machine
it is on.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flash_dllm.models.load import load_model

_FILE = "state.safetensors"


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [..., out, in] and float32 scales [..., out] with weight = int8 * scale; rounding to nearest."""
    scale = weight.float().abs().amax(-1).clamp(min=1e-12) / 127
    return (weight.float() / scale[..., None]).round().clamp(-127, 127).to(torch.int8), scale


def _pack(data: bytes, width: int) -> Tensor:
    """Compresses byte plane by byte plane: exponents of like-sized numbers repeat, mantissas do not."""
    planes = np.frombuffer(data, np.uint8).reshape(-1, width).T
    return torch.frombuffer(bytearray(zlib.compress(planes.tobytes(), 1)), dtype=torch.uint8)


def _unpack(packed: Tensor, width: int) -> bytearray:
    planes = np.frombuffer(zlib.decompress(packed.numpy().tobytes()), np.uint8).reshape(width, -1)
    return bytearray(planes.T.tobytes())


def save_state(folder: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Path:
    """Writes `state.safetensors`. Tensors named `momentum.*` are kept as int8 rows, all others as
    bfloat16.
    """
    packed: dict[str, Tensor] = {}
    shapes: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        cpu = tensor.detach().float().cpu().contiguous()
        shapes[name] = list(cpu.shape)
        if name.startswith("momentum."):
            values, scale = quantize_rows(cpu)
            packed[f"{name}.scale"] = scale.contiguous()
            packed[name] = _pack(values.numpy().tobytes(), 1)
        else:
            packed[name] = _pack(cpu.bfloat16().view(torch.uint8).numpy().tobytes(), 2)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(packed, folder / _FILE, metadata={"meta": json.dumps(meta), "shapes": json.dumps(shapes)})
    return folder / _FILE


def load_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads what `save_state` wrote, or the weights of an exported model, as float32 tensors.

    Raises FileNotFoundError when the folder holds neither.
    """
    path = folder / _FILE
    if not path.is_file():
        if (folder / "config.json").is_file():
            return _exported(folder), {"steps": 0}
        raise FileNotFoundError(f"no training state at {path}, and no exported model beside it")
    with safe_open(path, "pt") as file:
        header = file.metadata()
        shapes: dict[str, list[int]] = json.loads(header["shapes"])
        tensors = {}
        for name, shape in shapes.items():
            if name.startswith("momentum."):
                values = torch.frombuffer(_unpack(file.get_tensor(name), 1), dtype=torch.int8).view(shape)
                tensors[name] = values.float() * file.get_tensor(f"{name}.scale")[..., None]
            else:
                values = torch.frombuffer(_unpack(file.get_tensor(name), 2), dtype=torch.bfloat16)
                tensors[name] = values.view(shape).float()
        return tensors, json.loads(header["meta"])


def _exported(folder: Path) -> dict[str, Tensor]:
    """Masters from an exported model: its int8 rows are where training goes on from."""
    model = load_model(folder, dtype=torch.float32)
    layers = model.layers
    stacks: dict[str, list[Any]] = {
        "attn_norm": [layer.attn_norm for layer in layers],
        "ffn_norm": [layer.ffn_norm for layer in layers],
        "qkv": [layer.wqkv for layer in layers],
        "out": [layer.wo for layer in layers],
        "gate_up": [layer.w_gate_up for layer in layers],
        "down": [layer.w_down for layer in layers],
        "qkv_bias": [layer.bqkv for layer in layers if layer.bqkv is not None],
    }
    named = {name: torch.stack(parts) for name, parts in stacks.items() if parts}
    named |= {"embed": model.embed, "head": model.head, "norm": model.norm}
    return {f"master.{name}": tensor for name, tensor in named.items()}
