"""When to retry after a failure, and when to give up. All waits are timers of the event loop."""

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
"""A request that runs into a shortage fails after this many tries, but not before this time."""
_FIRST_WAIT_S = 0.05


class Patience:
    """Counts consecutive failures, and decides when to give up.

    After ``max_failures`` permanent failures it gives up. Transient failures, such as a kill from outside or a shortage
    of memory, also need ``limit_s`` to have passed since the first one.

    :ivar num_failures: consecutive failures so far.
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
        """Start counting from zero again."""
        self.num_failures = self._num_own = 0

    def failed(self, *, may_pass: bool) -> float | None:
        """Count one more failure: seconds to wait before the next try, or None to give up."""
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
        """No wait after the first failure: most failures happen once."""
        if self.num_failures == 1:
            return 0.0

        return min(MAX_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(self.num_failures - 2, 10))


async def pause(seconds: float) -> None:
    """Wait, while other tasks run."""
    with anyio.move_on_after(seconds):
        await anyio.Event().wait()


def patience_of_a_request() -> Patience:
    """For a request that runs into a shortage of a system resource."""
    return Patience(_MAX_TRIES, _SHORTAGE_S)


def given_up(short: Short, num_tries: int) -> Failed:
    """The error of a request that failed because the system has run out of a resource."""
    message = (
        f"AD426 the system ran out of a resource in {num_tries} tries: {short.reason}. The machine is the cause, not a "
        "row: no row is lost. Raise the limit (ulimit -a; pids.max and memory.max of a container) or free what "
        "is used up, and resume from the last state"
    )
    return Failed("WorkerError", message, short.traceback, short.row, short.excerpt, short.place)
