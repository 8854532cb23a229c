"""What is done when a process ends. A child that ``multiprocessing`` has forked ends without ``atexit``."""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_functions: list[Callable[[], object]] = []
_watched: set[int] = set()
"""The processes that are watched: this one, and those that it was forked from."""


def at_exit(function: Callable[[], object]) -> None:
    """Call ``function`` when the process ends, before those that were given earlier."""
    atexit.register(function)
    _functions.append(function)


def watch_end() -> None:
    """There is something to end in this process."""
    process = sys.modules.get("multiprocessing.process")
    if process is None or process.parent_process() is None or os.getpid() in _watched:
        return

    from multiprocessing.util import Finalize

    _watched.add(os.getpid())
    Finalize(None, _end_all, exitpriority=0)


def _end_all() -> None:
    for function in reversed(_functions):
        function()
