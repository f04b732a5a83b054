"""The command line. Every command loads on use: ``--help`` needs neither torch nor pydantic."""

from __future__ import annotations


def main() -> None:
    """Entry point of ``flash-dllm``."""
    from flash_dllm.cli.root import app

    app()
