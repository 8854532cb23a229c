"""Ending a process together with its parent. Imports little."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ("end_with_parent",)

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread of ``parent`` that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(0)
