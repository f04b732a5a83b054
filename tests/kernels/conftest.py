"""What the tests of kernels share."""

from __future__ import annotations

from typing import Any

import pytest

from tests.interpreter import repair


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    """Triton's interpreter multiplies and rounds bfloat16 as a GPU does."""
    repair()


@pytest.fixture
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh uninitialised tensors hold NaN, so that what a kernel leaves unwritten shows."""
    import torch

    plain = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = plain(*args, **kwargs)
        return out.fill_(float("nan") if out.is_floating_point() else 2**30)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "empty_like", lambda t: empty(t.shape, dtype=t.dtype, device=t.device))
