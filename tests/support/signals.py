"""What a program has that a test starts, whatever the tests themselves were started with."""

from __future__ import annotations

import signal

__all__ = ("hear_ctrl_c",)


def hear_ctrl_c() -> None:
    """In the child, before it runs: a shell starts its background jobs with SIGINT ignored, and that is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
