"""QKV projection, rotary embedding and cache write."""

from .ref import qkv_rope_write, rotate

__all__ = ["qkv_rope_write", "rotate"]
