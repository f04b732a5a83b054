"""What a GPU offers to a kernel's tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@dataclass(frozen=True)
class Limits:
    """Bytes of shared memory that one block may use, and the number of multiprocessors."""

    shared: int
    processors: int


H200 = Limits(227 * 1024, 132)
A100 = Limits(163 * 1024, 108)
ADA = Limits(99 * 1024, 128)


@cache
def limits(device: torch.device) -> Limits:
    """Those of ``device``; without a GPU (Triton's interpreter) those of an H200."""
    if device.type != "cuda":
        return H200
    found = torch.cuda.get_device_properties(device)
    shared = getattr(found, "shared_memory_per_block_optin", ADA.shared)
    return Limits(int(shared), found.multi_processor_count)


@cache
def has_descriptors() -> bool:
    """Triton takes tensors as descriptors, which the TMA unit reads (Triton 3.4 and later). Asked once: looking for a
    module searches folders, which takes longer than a launch.
    """
    return find_spec("triton.tools.tensor_descriptor") is not None


def streams_tiles(*matrices: Tensor) -> bool:
    """Whether kernels for whole tiles through TMA and Hopper's matrix instructions can read these matrices."""
    hopper = matrices[0].is_cuda and capability(matrices[0].device) == 9
    return hopper and has_descriptors() and aligned(*matrices)


def aligned(*matrices: Tensor) -> bool:
    """Whether every row starts at a multiple of 16 bytes and has no gaps, as TMA wants it."""
    return all(
        m.stride(-1) == 1 and m.stride(0) * m.element_size() % 16 == 0 and m.data_ptr() % 16 == 0
        for m in matrices
    )


def full_waves(tiles: int, device: torch.device) -> bool:
    """Whether ``tiles`` equal tiles keep nearly all multiprocessors busy to the end, each with one tile at a time.

    Persistent kernels for whole tiles win a few per cent over the library where they do, and lose more where the last
    round leaves a tenth of the GPU idle (measured on an H200, 64 to 8,192 rows).
    """
    rounds = -(-tiles // limits(device).processors)
    return tiles >= 0.92 * rounds * limits(device).processors


@cache
def capability(device: torch.device) -> int:
    """The major number of a GPU's compute capability."""
    return torch.cuda.get_device_capability(device)[0]


def precision(dtype: torch.dtype) -> str:
    """How a matrix product of this dtype is computed: float32 without TF32."""
    return "ieee" if dtype == torch.float32 else "tf32"
