"""The gated activation of a SwiGLU feed-forward."""

from .ref import silu_mul

__all__ = ["silu_mul"]
