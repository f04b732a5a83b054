"""A small Ray cluster on this machine, and its processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flash_dllm.scale.ray_batch import RayArgs, connect
from flash_dllm.serve.args import ServeArgs

CPUS = 4
"""Places that Ray hands out; the machine may have fewer cores."""
WAIT = 120.0
"""Seconds after which a test gives up: far more than anything takes."""
LONG = 200
"""Tokens of an answer that takes a while: one a step."""


def serve_args(folder: Path, **changes: Any) -> ServeArgs:
    """A server of the random checkpoint, one token a step, two slots."""
    values = {"model": str(folder), "served_model_name": "tiny", "max_num_seqs": 2, "method": "none+greedy"}
    return ServeArgs.model_validate({**values, "device": "cpu", "drain_timeout": 10, **changes})


@contextmanager
def small_cluster() -> Iterator[None]:
    """Ray with a small object store and no dashboard, in a folder whose name is short enough for its sockets."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with tempfile.TemporaryDirectory(prefix="fd", dir="/tmp", ignore_cleanup_errors=True) as folder:
        init = {"num_cpus": CPUS, "object_store_memory": 100 * 2**20, "_temp_dir": folder}
        connect(ray, RayArgs(address="local", init=init))
        try:
            yield
        finally:
            ray.shutdown()


def workers(name: str) -> list[int]:
    """Process ids of this cluster's workers whose title has ``name``."""
    return [pid for pid, title in _titles() if name in title and _descends(pid, os.getpid())]


def _titles() -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            yield int(folder.name), title


def _descends(pid: int, ancestor: int) -> bool:
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        pid = int(stat.rpartition(")")[2].split()[1])
        if pid == ancestor:
            return True
    return False
