"""``flash-dllm train``: the commands of ``flash_dllm.train``."""

from __future__ import annotations

from flash_dllm.train.__main__ import app

__all__ = ["app"]
