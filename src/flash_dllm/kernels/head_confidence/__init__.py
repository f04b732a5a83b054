"""LM head with token choice and confidence."""

from __future__ import annotations

from torch import Tensor

from flash_dllm.kernels.choice import INVARIANT, REF, TRITON, choose

from . import ref
from .ref import HeadOut, HeadSpec, Sampling, confidence, head_logits

__all__ = ["HeadOut", "HeadSpec", "Sampling", "confidence", "fused", "head_confidence", "head_logits"]


def head_confidence(h: Tensor, weight: Tensor, spec: HeadSpec, *, impl: str | None = None) -> HeadOut:
    """LM head of final-normed rows ``h`` [M, d] under ``weight`` [V, d], then what ``spec`` asks of the logits.

    The kernel writes no logits but those of rows with ``top_p`` or ``top_k``, into room for 512 rows. It multiplies in
    the dtype of ``h``, accumulates and reduces in float32 and does not round the logits, so among logits that are
    equal in bfloat16 it takes the larger one, not the lower id. A request that it does not know (see :func:`fused`)
    runs on the definition instead, which holds all logits: that hangs on what is asked, never on a failure, and the
    weights are still read once.

    Args:
        h: [M, d] bfloat16, float16 or float32.
        weight: [V, d], same dtype.
        spec: see :class:`HeadSpec`.
        impl: ``ref``, ``triton``, or ``invariant`` (the kernel with one tile for any number of rows, so that a row
            gives the same bits in any batch); None chooses by device and dtype.

    Returns:
        :class:`HeadOut`. A row whose logits hold a NaN or +inf has a ``prob`` that is not finite.

    Raises:
        ValueError: ``impl`` is not known or cannot run on this device; the measure is not known.
    """
    ref.check(spec)
    chosen = choose(impl, h, (REF, TRITON, INVARIANT))
    if chosen == REF or not fused(spec):
        return ref.head_confidence(h, weight, spec)
    from . import triton

    return triton.head_confidence(h, weight, spec, invariant=chosen == INVARIANT)


def fused(spec: HeadSpec) -> bool:
    """Whether the kernel does all that ``spec`` asks for.

    It knows the whole vocabulary, not one rank's part of it, and samples with counter-based noise only.
    """
    sampling = spec.sampling
    if spec.shard is not None or sampling is None:
        return spec.shard is None
    return sampling.choose is None and sampling.counter is not None
