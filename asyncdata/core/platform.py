"""Where asyncdata runs."""

from __future__ import annotations

import sys

from asyncdata.core.errors import ConfigError

__all__ = ("check_platform",)


def check_platform() -> None:
    """Refuse a system other than Linux.

    :raises ConfigError: with what to do there.
    """
    if sys.platform != "linux":
        raise ConfigError(
            f"asyncdata needs Linux, and this is {sys.platform}: its workers share memory by memfd, and die with the "
            "trainer by a signal of Linux. On macOS or Windows, run it in a container or in WSL 2"
        )
