"""What a GPU offers to a kernel's tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch


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


def precision(dtype: torch.dtype) -> str:
    """How a matrix product of this dtype is computed: float32 without TF32."""
    return "ieee" if dtype == torch.float32 else "tf32"
