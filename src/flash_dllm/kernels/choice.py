"""Which implementation of an op runs: the definition (``ref``) or a kernel (``triton``)."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

REF, TRITON, INVARIANT, LIBRARY = "ref", "triton", "invariant", "library"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Kernels:
    """The implementation of each op; None lets the op choose by device and dtype.

    An op may know more names than ``ref`` and ``triton`` (its module says which).
    """

    rms_norm: str | None = None
    silu_mul: str | None = None
    qkv_rope_write: str | None = None
    row_attention: str | None = None
    head_confidence: str | None = None
    linear: str | None = None

    @classmethod
    def all(cls, impl: str | None) -> Kernels:
        """The same implementation for every op (a product of ``ref`` is the library's)."""
        return cls(**{field.name: impl for field in fields(cls)})


def kernels_of(name: str) -> Kernels:
    """The ops' implementations under one name.

    ``auto``; ``ref``; ``triton`` (matrix products by the library, or with what follows them in one kernel);
    ``fused`` (Triton, with the paper's fused projection); ``invariant`` (Triton throughout, each op with one tile: a
    request's numbers do not depend on what else is in the batch).
    """
    triton = replace(Kernels.all(TRITON), linear=None)
    if name == "fused":
        return replace(triton, qkv_rope_write=name)
    if name == INVARIANT:
        # Norms and the gated activation work row by row as they are.
        return replace(Kernels.all(INVARIANT), rms_norm=TRITON, silu_mul=TRITON)
    return {"auto": Kernels(), REF: replace(Kernels.all(REF), linear=None), TRITON: triton}[name]


@cache
def has_triton() -> bool:
    """Triton can be imported (it exists for Linux only)."""
    return find_spec("triton") is not None


def choose(impl: str | None, x: Tensor, known: tuple[str, ...] = (REF, TRITON)) -> str:
    """The implementation to run for activations like ``x``.

    Without a wish: Triton on a GPU in bf16, fp16 or fp32, else the definition.

    Raises:
        ValueError: ``impl`` is not one of ``known``, or is a kernel that cannot run where ``x`` is; the message
            names it.
    """
    if impl is None:
        return TRITON if x.is_cuda and x.dtype in DTYPES and has_triton() else REF
    if impl not in known:
        raise ValueError(f"kernel implementation {impl!r} is not known; one of {', '.join(known)}")
    if impl not in (REF, LIBRARY) and not x.is_cuda and not _interprets():
        raise ValueError(
            f"kernel implementation {impl!r} needs a GPU; these tensors are on {x.device}: use {REF!r}"
        )
    return impl


def _interprets() -> bool:
    """Triton runs kernels on the CPU, in its interpreter (for tests)."""
    if not has_triton():
        return False
    try:
        from triton import knobs
    except ImportError:  # Triton 3.3
        return os.environ.get("TRITON_INTERPRET") == "1"
    return bool(knobs.runtime.interpret)
