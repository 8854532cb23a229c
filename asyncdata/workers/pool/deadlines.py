"""When to retry after a failure, and when to give up. All waits are timers of the event loop."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import anyio

from asyncdata.core.errors import WorkerError
from asyncdata.core.log import get_logger
from asyncdata.core.messages import Failed
from asyncdata.core.shortage import is_shortage

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.messages import Short

_log = get_logger(__name__)
MAX_WAIT_S = 1.0
_FIRST_WAIT_S = 0.05
_MAX_TRIES, _SHORTAGE_S = 3, 5.0
"""A request that runs into a shortage fails after this many tries, but not before this time."""
_MAX_STARTS = 3
"""A process that ends by itself this often while it starts is not started again."""
_PATIENCE_S = 30.0
"""How long kills from outside, or a shortage of a system resource, may last."""
_MAX_LOST, _MAX_LOST_OF_EACH = 11, 3
"""The limit of consecutive worker deaths without a finished request: a base, and an addend for each worker."""


class Patience:
    """Counts consecutive failures, and decides when to give up.

    After ``max_failures`` permanent failures it gives up. Transient failures, such as a kill from outside or a shortage
    of memory, also need ``limit_s`` to have passed since the first one.

    :ivar num_failures: consecutive failures so far.
    :ivar max_failures: may be changed at any time.
    """

    def __init__(self, max_failures: float, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
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

        if self.num_failures == 1:  # most failures happen once
            return 0.0

        return min(MAX_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(self.num_failures - 2, 10))


async def pause(seconds: float) -> None:
    """Wait, while other tasks run."""
    with anyio.move_on_after(seconds):
        await anyio.Event().wait()


def patience_of_a_request() -> Patience:
    """For a request that runs into a shortage of a system resource."""
    return Patience(_MAX_TRIES, _SHORTAGE_S)


def new_patience(max_failures: float | None = None) -> Patience:
    """For the start of a process."""
    return Patience(_MAX_STARTS if max_failures is None else max_failures, _PATIENCE_S)


def given_up(short: Short, num_tries: int) -> Failed:
    """The error of a request that failed because the system has run out of a resource."""
    message = (
        f"AD426 the system ran out of a resource in {num_tries} tries: {short.reason}. The machine is the cause, not a "
        "row: no row is lost. Raise the limit (ulimit -a; pids.max and memory.max of a container) or free what "
        "is used up, and resume from the last state"
    )
    return Failed("WorkerError", message, short.traceback, short.row, short.excerpt, short.place)


class Lost(NamedTuple):
    """How a worker was lost.

    :ivar code: ``AD422`` if it hung, and ``AD423`` if it died.
    :ivar how: the signal or the exit status with which it ended; empty if it has none.
    :ivar output: the end of what it wrote.
    :ivar may_pass: whether the cause is transient: it was killed from outside, or the system had run out of a resource.
    :ivar shortage: the resource, if that was the cause.
    :ivar request_id: the request that it processed; 0 if it had none, or is not to be blamed.
    :ivar row: the row of that request; -1 if that is not known.
    """

    code: str
    reason: str
    how: str = ""
    output: str = ""
    may_pass: bool = True
    shortage: str = ""
    request_id: int = 0
    row: int = -1


def died_starting(num_times: int, how: str, output: str) -> WorkerError:
    """The error when no worker starts successfully."""
    return WorkerError(f"AD426 a worker died {num_times} times while starting ({how})\n{output}")


class Health:
    """Decides after each lost worker whether the pool starts another one, or gives up.

    :ivar has_started: whether any worker was ever ready. Before that, errors are raised at once.
    """

    def __init__(self) -> None:
        self.has_started = False
        self._losses = Patience(_MAX_LOST, _PATIENCE_S)

    def succeeded(self) -> None:
        """A request was answered."""
        self._losses.succeeded()

    def wait_for_another(self, lost: Lost, starts: Patience | None, num_workers: int) -> float:
        """A worker was lost: seconds to wait before the next one starts.

        :param starts: counts the failed starts of workers with this number; None if this worker had been ready.
        :param num_workers: how many workers the pool has.
        :raises WorkerError: if the pool gives up.
        """
        self._losses.max_failures = _MAX_LOST + _MAX_LOST_OF_EACH * num_workers
        wait_s = starts.failed(may_pass=lost.may_pass) if starts is not None else 0.0
        if starts is not None and wait_s is None:
            raise died_starting(starts.num_failures, lost.how, lost.output)

        if self._losses.failed(may_pass=lost.may_pass) is None:
            number, last = self._losses.num_failures, lost.how or lost.reason
            raise WorkerError(
                f"AD426 {number} workers died without finishing one request; the last {last}\n{lost.output}"
            )

        return wait_s or 0.0

    def wait_for_room(self, error: WorkerError, rooms: Patience, *, is_any_ready: bool) -> float:
        """The system has no room for one more process: seconds to wait before the next try. There is no limit on tries
        while another worker is ready.

        :param rooms: counts the tries.
        :raises WorkerError: ``error``, if there is no further try, or if its cause is no shortage.
        """
        if not is_shortage(error):
            raise error

        wait_s = rooms.failed(may_pass=True)
        if rooms.num_failures.bit_count() == 1:  # tries 1, 2, 4, 8 ...: the shortage may last long
            _log.warning("worker.not_started", reason=str(error), num_tries=rooms.num_failures)
        if not self.has_started or (wait_s is None and not is_any_ready):
            raise error

        return MAX_WAIT_S if wait_s is None else wait_s
