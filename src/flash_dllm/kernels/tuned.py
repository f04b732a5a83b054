"""Choices that ``flash-dllm tune`` measured on this device and stored; an op asks here before its own table."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from flash_dllm.errors import FlashDLLMError


class TunedError(FlashDLLMError):
    """A file of stored choices that cannot be read; the message names it."""


@dataclass(frozen=True)
class Entry:
    """What was fastest for one op at one size.

    Attributes:
        rows: of a pass; the nearest entry serves sizes between.
        same: what has to be equal for the entry to count, such as heads a KV head.
        impl: the implementation, ``tiles`` the fields of its tiles; ``ms`` what it took.
    """

    op: str
    rows: int
    same: dict[str, int]
    impl: str
    tiles: dict[str, Any]
    ms: float


class Table:
    """Stored choices of one device."""

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries

    def find(self, op: str, rows: int, **same: int) -> Entry | None:
        """The entry of the nearest number of rows, at most twice or half as many; None if there is none."""
        fitting = [e for e in self.entries if e.op == op and e.same == same]
        if not fitting or rows < 1:
            return None
        best = min(fitting, key=lambda e: (abs(math.log2(e.rows / rows)), e.rows))
        return best if abs(math.log2(best.rows / rows)) <= 1 else None


_current = Table([])


def current() -> Table:
    """The choices in use."""
    return _current


def use(table: Table) -> None:
    """Use these choices in this process from now on."""
    global _current
    _current = table


def stored_at(device: torch.device) -> Path:
    """Where the choices of a GPU are kept: one file for each kind of GPU and version of Triton."""
    import triton

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
    return cache / "flash-dllm" / "tiles" / f"{name}-triton-{triton.__version__}.json"


def save(table: Table, path: Path, facts: dict[str, Any]) -> None:
    """Write choices with the ``facts`` of the measurement."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**facts, "entries": [asdict(e) for e in table.entries]}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def read(path: Path) -> Table:
    """Choices from a file.

    Raises:
        TunedError: it is no such file.
    """
    try:
        return Table([Entry(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["entries"]])
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise TunedError(f"{path}: no file of flash-dllm tune ({exc}); delete it or tune again") from exc


def use_stored(device: torch.device) -> Path | None:
    """Use what is stored for a GPU; returns the file, or None if there is none."""
    if device.type != "cuda":
        return None
    path = stored_at(device)
    if not path.exists():
        return None
    use(read(path))
    return path
