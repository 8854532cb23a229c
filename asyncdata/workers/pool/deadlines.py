"""How long to wait before something that failed is tried again, and when to give it up. The loop's timers wait."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import anyio

from asyncdata.core.messages import Failed

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.messages import Short

__all__ = ("MAX_WAIT_S", "Patience", "given_up", "patience_of_a_request", "pause")

MAX_WAIT_S = 1.0
_MAX_TRIES, _SHORTAGE_S = 3, 5.0
"""A request for which the system has no more of something is given up after so many tries, and not before that time."""
_FIRST_WAIT_S = 0.05


class Patience:
    """Counts failures in a row.

    One that would come again is given up after ``max_failures``. One that may pass, such as a kill from outside or a
    system that is short of memory, is given up only if the first in the row is ``limit_s`` ago as well.

    :ivar num_failures: in a row.
    :ivar max_failures: may be changed at any time.
    """

    def __init__(self, max_failures: int, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_failures = 0
        self._num_own = 0
        self.max_failures = max_failures
        self._limit_s = limit_s
        self._clock = clock
        self._since = 0.0

    def succeeded(self) -> None:
        """The row of failures ends."""
        self.num_failures = self._num_own = 0

    def failed(self, *, may_pass: bool) -> float | None:
        """One more: seconds to wait before the next try; None to give up."""
        now = self._clock()
        if self.num_failures == 0:
            self._since = now
        self.num_failures += 1
        self._num_own += not may_pass
        is_over = self.num_failures >= self.max_failures and now - self._since >= self._limit_s
        if is_over or self._num_own >= self.max_failures:
            return None

        return self._wait_s()

    def _wait_s(self) -> float:
        """Nothing after the first failure: most are the only one."""
        if self.num_failures == 1:
            return 0.0

        return min(MAX_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(self.num_failures - 2, 10))


async def pause(seconds: float) -> None:
    """Let other tasks run for so long."""
    with anyio.move_on_after(seconds):
        await anyio.Event().wait()


def patience_of_a_request() -> Patience:
    """With a system that is short of something."""
    return Patience(_MAX_TRIES, _SHORTAGE_S)


def given_up(short: Short, num_tries: int) -> Failed:
    """What is said of a request that could not be answered for want of something."""
    message = (
        f"AD426 the system has no more of what the work needs, in {num_tries} tries: {short.reason}. This is the "
        "machine's doing and no row's: none is lost. Raise the limit (ulimit -a; pids.max and memory.max of a "
        "container) or free what is used up, and go on from the last state"
    )
    return Failed("WorkerError", message, short.traceback, short.row, short.excerpt, short.place)
