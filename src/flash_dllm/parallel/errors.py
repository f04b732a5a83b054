"""What goes wrong between ranks."""

from __future__ import annotations

from flash_dllm.errors import FlashDLLMError


class ParallelError(FlashDLLMError):
    """A number of ranks, a device or a method that tensor parallel cannot run."""


class RankError(RuntimeError):
    """A rank died, failed, disagreed or did not answer; the model cannot go on without it."""
