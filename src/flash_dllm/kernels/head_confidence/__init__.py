"""LM head with token choice and confidence."""

from .ref import HeadOut, HeadSpec, Sampling, confidence, head_confidence, head_logits

__all__ = ["HeadOut", "HeadSpec", "Sampling", "confidence", "head_confidence", "head_logits"]
