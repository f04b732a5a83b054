"""Attention of rows over their slot's cache, and the attention score of Flash-Cache."""

from .ref import key_score, row_attention

__all__ = ["key_score", "row_attention"]
