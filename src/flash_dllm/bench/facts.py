"""What a measurement depends on: written into every report."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import platform
import shlex
import sys
from pathlib import Path
from typing import Any


def versions() -> dict[str, str]:
    """Of this package, Python, torch and, where they are there, Triton and CUDA."""
    import torch

    import flash_dllm

    found = {
        "flash_dllm": flash_dllm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["triton"] = importlib.metadata.version("triton")
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def device_name(device: Any) -> str:
    """The GPU's name, or how many CPU threads there are."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} CPU threads"


def command() -> str:
    """The command line of this process, without the folder of the program."""
    program = Path(sys.argv[0]).name
    return shlex.join(["flash-dllm" if program in ("flash-dllm", "__main__.py") else program, *sys.argv[1:]])


def facts(device: Any, dtype: Any, *, synthetic: bool) -> dict[str, Any]:
    """Date, command, device, dtype, versions; ``synthetic`` says that weights or the commit rate are made up."""
    return {
        "date": datetime.date.today().isoformat(), "command": command(), "synthetic": synthetic,
        "device": str(device), "device_name": device_name(device),
        "dtype": str(dtype).removeprefix("torch."), "versions": versions(),
    }  # fmt: skip
