"""The command line. Every command loads on use: ``--help`` needs neither torch nor pydantic."""

from __future__ import annotations

import os


def main() -> None:
    """Entry point of ``flash-dllm``."""
    from flash_dllm.cli.root import app

    # Spinning OpenMP threads slow small models down tenfold where other programs use the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    app()
