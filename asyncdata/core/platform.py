"""What only Linux has: asyncdata runs there alone, and its processes end together with their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from asyncdata.core.errors import ConfigError

_PR_SET_PDEATHSIG = 1


def check_platform() -> None:
    """Refuse a system other than Linux.

    :raises ConfigError: with what to do there.
    """
    if sys.platform != "linux":
        raise ConfigError(
            f"asyncdata needs Linux, and this is {sys.platform}: its workers share memory by memfd, and die with the "
            "trainer by a signal of Linux. On macOS or Windows, run it in a container or in WSL 2"
        )


def end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread of ``parent`` that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(0)
