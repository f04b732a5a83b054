"""The pages: toys, player, playground and results, and the Python that feeds them.

The pages are plain files (:func:`static_folder`): HTML, one stylesheet, ES modules. They need no build step and ask
nobody but the server they came from.
"""

from __future__ import annotations

from pathlib import Path


def static_folder() -> Path:
    """The folder of the pages; a server mounts it at ``/``."""
    return Path(__file__).parent / "static"
