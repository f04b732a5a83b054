"""The gated activation of a SwiGLU feed-forward."""

from __future__ import annotations

from torch import Tensor

from flash_dllm.kernels.choice import TRITON, choose

from . import ref

__all__ = ["silu_mul"]


def silu_mul(gate_up: Tensor, *, impl: str | None = None) -> Tensor:
    """Return ``silu(gate) * up`` for packed ``gate_up`` [..., 2F] (gate first); result [..., F], same dtype.

    ``impl`` is ``ref`` or ``triton``; None chooses by device and dtype. Both round ``silu(gate)`` to the dtype
    before the product, as the models' own code does.

    Raises:
        ValueError: ``impl`` is not known or cannot run on this device.
    """
    if choose(impl, gate_up) == TRITON:
        from . import triton

        return triton.silu_mul(gate_up)
    return ref.silu_mul(gate_up)
