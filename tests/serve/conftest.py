"""One random checkpoint with text, loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash_dllm import LLM


@pytest.fixture(scope="session")
def offline(chat_folder: Path) -> LLM:
    """The Python interface that a server's answers are compared with."""
    return LLM(chat_folder, max_num_seqs=2)
