"""``flash-dllm doctor``: what this machine has and what will run where."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from flash_dllm.cli.tables import gigabytes, print_table, write_json

app = typer.Typer(add_completion=False, rich_markup_mode=None)
PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "safetensors",
    "tokenizers",
    "transformers",
    "pydantic",
    "typer",
    "rich",
)


@app.command()
def doctor(json_: Annotated[bool, typer.Option("--json", help="as JSON")] = False) -> None:
    """What this machine has and what will run where."""
    facts = {**_machine(), **{name: _version(name) for name in PACKAGES}, **_gpu(), **_plan()}
    if json_:
        write_json(Path("-"), facts)
        return
    print_table("This machine", ("", ""), list(facts.items()))


def _machine() -> dict[str, str]:
    from flash_dllm import __version__
    from flash_dllm.cli.models import free_memory

    free = free_memory("cpu")
    return {
        "flash-dllm": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.machine()}",
        "cpu cores": str(
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        ),
        "memory": "unknown" if free is None else f"{gigabytes(free)} free",
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _gpu() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        built = (
            f"this torch is built for CUDA {torch.version.cuda}"
            if torch.version.cuda
            else "a CPU build of torch"
        )
        return {"gpu": f"none that torch can use ({built})"}
    out = {}
    for index in range(torch.cuda.device_count()):
        props = torch.cuda.get_device_properties(index)
        out[f"gpu {index}"] = (
            f"{props.name}, {gigabytes(props.total_memory)}, compute {props.major}.{props.minor}"
        )
    return out


def _plan() -> dict[str, str]:
    from flash_dllm.cli.models import _installed
    from flash_dllm.kernels.choice import has_triton
    from flash_dllm.llm import SLOTS
    from flash_dllm.loading import pick_device, pick_dtype
    from flash_dllm.memory import MOST_SLOTS
    from flash_dllm.models.load import BUNDLED

    device = pick_device("auto")
    on_gpu = device.startswith("cuda")
    dtype = pick_dtype("auto", device)
    return {
        "device=auto": device,
        "dtype=auto": dtype if dtype != "auto" else "the checkpoint's own",
        "max_num_seqs": f"what fits, at most {MOST_SLOTS}" if on_gpu else str(SLOTS),
        "kernels": "Triton, steady steps as CUDA graphs" if on_gpu and has_triton() else "plain PyTorch",
        "bundled models": ", ".join(name for name in BUNDLED if _installed(name)) or "none installed",
    }
