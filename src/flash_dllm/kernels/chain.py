"""Kernels that start while the one before them still ends (programmatic dependent launch, compute capability 9 and up).

A kernel launched this way may run its first instructions before the kernel in front of it has written its results, so
each kernel that is launched so calls :func:`follow` before it reads or writes anything. One that does waits for all
before it: the one in front has itself waited.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def follow(CHAINED: tl.constexpr):
    """Wait until what was launched before is done and its writes are seen; then let the next kernel come."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def chained(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch on ``device``: the constant ``CHAINED`` of the kernel, and the launch's attribute."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device)[0] < 9:
        return {"CHAINED": False}
    if not hasattr(getattr(tl.extra, "cuda", None), "gdc_wait"):
        return {"CHAINED": False}
    return {"CHAINED": True, "launch_pdl": True}
