"""What is done when a process ends, and what of that only Linux has.

A child that ``multiprocessing`` has forked ends without ``atexit``.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
from typing import TYPE_CHECKING

from asyncdata.core.errors import ConfigError

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


_PR_SET_PDEATHSIG = 1


def check_platform(*, has_workers: bool) -> None:
    """Refuse worker processes on a system other than Linux.

    :raises ConfigError: with what to do there.
    """
    if sys.platform != "linux" and has_workers:
        raise ConfigError(
            f"asyncdata's workers need Linux, and this is {sys.platform}: they share memory by memfd, and die with the "
            "trainer by a signal of Linux. Set num_workers=0, which uses a thread of this process; or run it in a "
            "container, or in WSL 2"
        )


def end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread of ``parent`` that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(0)
