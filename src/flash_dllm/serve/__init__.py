"""The HTTP server: one engine thread, an async front, the OpenAI protocol (docs/serving.md).

``create_app`` and ``Service`` load on first use; they need ``pip install 'flash-dllm[serve]'``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flash_dllm.serve.app import create_app
    from flash_dllm.serve.service import Service

__all__ = ["Service", "create_app"]


def __getattr__(name: str) -> Any:
    if name == "create_app":
        from flash_dllm.serve.app import create_app

        return create_app
    if name == "Service":
        from flash_dllm.serve.service import Service

        return Service
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
