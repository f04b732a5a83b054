"""Options and fixtures of the whole test suite."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.checkpoints import write_checkpoint
from tests.commands import Run, run_command

# Without a GPU the kernels run in Triton's interpreter; it has to be chosen before they are imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples in every run, however slow the machine; --hypothesis-profile=search looks for new ones.
settings.register_profile("steady", deadline=None, derandomize=True, database=None)
settings.register_profile("search", deadline=None, max_examples=500)
settings.load_profile("steady")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden-dir", default=str(GOLDEN), help="folder of golden models and traces")
    parser.addoption(
        "--variants", action="store_true", help="also compile tiles that are only to be measured"
    )


def pytest_configure(config: pytest.Config) -> None:
    # The models are tiny: a second thread gains nothing, and on a busy machine it costs ten times more. The variable
    # is for the processes that tests start: ranks, servers, batches.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The groups of ``--dist loadgroup``. pytest-xdist's own mark has no effect under pytest 9.2."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from tests.balance import Groups

    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # What takes longest starts first, or one process has it left when the others are done.
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint with a tokenizer and a chat template."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture(scope="session")
def bare_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "bare", text=False, max_new_tokens=None)


@pytest.fixture
def run() -> Run:
    """``run("generate", "-m", folder, stdin="text")`` runs a command in this process."""
    return run_command


@pytest.fixture(scope="session")
def golden_dir(request: pytest.FixtureRequest) -> Path:
    return Path(request.config.getoption("--golden-dir"))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh uninitialised tensors hold NaN, so that reading one shows."""
    plain = torch.empty_like

    def empty_like(*args, **kwargs):  # type: ignore[no-untyped-def]
        out = plain(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty_like", empty_like)
