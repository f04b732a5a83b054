"""The gated activation of a SwiGLU feed-forward."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` for packed ``gate_up`` [N, 2F] (gate first); result [N, F], same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
