"""RMSNorm with an optional residual add."""

from .ref import rms_norm

__all__ = ["rms_norm"]
