"""Which process of pytest-xdist runs which tests: those that start a Ray cluster one process, the others any."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

RAY = (
    "tests/scale/test_ray_batch.py",
    "tests/scale/test_replicas.py",
    "tests/scale/test_replicas_process.py",
)
"""Two clusters at a time share no core of a small machine, and the tests of a folder share one."""


class Groups(LoadScopeScheduling):
    """Tests one by one, in the order in which they are collected; a group first."""

    def _split_scope(self, nodeid: str) -> str:
        return "ray" if nodeid.startswith(RAY) else nodeid
