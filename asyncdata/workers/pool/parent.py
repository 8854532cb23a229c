"""The end of a process with the one that has started it. Imports little."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ("end_with_parent",)

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread ends that has started it, in the process ``parent``."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we listened
        os._exit(0)
