"""The folder for everything that can be made again: row indexes, token caches, proofs."""

from __future__ import annotations

import os

__all__ = ("cache_folder",)


def cache_folder() -> str:
    """``$XDG_CACHE_HOME/asyncdata``, or ``~/.cache/asyncdata``."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "asyncdata")
