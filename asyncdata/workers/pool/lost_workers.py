"""Why a process of the pool is lost, whether that may pass, and what is said when a pool gives up."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, NamedTuple

from asyncdata.core.errors import WorkerError
from asyncdata.core.log import get_logger
from asyncdata.core.shortage import is_shortage
from asyncdata.workers.pool.deadlines import MAX_WAIT_S, Patience
from asyncdata.workers.pool.worker_main import STATUS_SHORT

if TYPE_CHECKING:
    from asyncdata.workers.pool.processes import Offspring, WorkerProcess

__all__ = ("Health", "Lost", "died_starting", "first_worker_error", "may_pass", "new_patience", "ran_short")

_log = get_logger(__name__)
_MAX_STARTS = 3
"""A process that ends by itself so often while it starts is given up at once."""
_PATIENCE_S = 30.0
"""What kills from outside may take to end, or the system to have room again."""

_CRASHES = frozenset(
    -number
    for number in (
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGSEGV,
        signal.SIGSYS,
        signal.SIGTRAP,
    )
)
_NO_MEMORY = ("memory allocation of ", "std::bad_alloc")
"""What Rust and C++ write before they abort for want of memory."""


_MAX_LOST, _MAX_LOST_OF_EACH = 11, 3
"""Workers that die without finishing one request: so many, and so many more for each worker there is."""


class Lost(NamedTuple):
    """Why a worker is no more: ``code`` is AD422 where it hung, and AD423 where it died."""

    code: str
    reason: str


def ran_short(process: Offspring) -> str:
    """What there was no more of when a process ended for want of it; empty where it ended otherwise."""
    if process.life.status == STATUS_SHORT:
        return (process.output.rstrip().splitlines() or ["out of memory"])[-1]

    if process.life.status == -signal.SIGABRT and any(sign in process.output for sign in _NO_MEMORY):
        return next(line for line in process.output.splitlines() if any(sign in line for sign in _NO_MEMORY))

    return ""


def may_pass(process: Offspring, lost: Lost | None = None) -> bool:
    """Whether it was ended from outside, or for want of something: the next one need not end so.

    :param lost: how it was lost; a worker that hung was killed by us.
    """
    if lost is not None and lost.code != "AD423":
        return False

    status = process.life.status
    is_own = status is not None and (status >= 0 or status in _CRASHES)
    return not is_own or bool(ran_short(process))


def died_starting(process: Offspring, num_times: int) -> WorkerError:
    """The pool gives up, as no worker comes up."""
    how = process.how_it_ended()
    return WorkerError(f"AD426 a worker died {num_times} times while starting ({how})\n{process.output}")


def first_worker_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one that the user is to see; the rest are its consequences."""
    matching = errors.subgroup(WorkerError) or errors
    error: BaseException = matching
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def new_patience() -> Patience:
    """For what has to start."""
    return Patience(_MAX_STARTS, _PATIENCE_S)


class Health:
    """Whether a pool can still be expected to do what it is asked.

    :ivar has_started: whether any worker was ever ready. Where none was, what is wrong is told at once.
    """

    def __init__(self) -> None:
        self.has_started = False
        self._losses = Patience(_MAX_LOST, _PATIENCE_S)

    def succeeded(self) -> None:
        """A request was answered."""
        self._losses.succeeded()

    def wait_for_another(self, process: WorkerProcess, lost: Lost, starts: Patience | None, num_workers: int) -> float:
        """A worker was lost, of so many: how long to wait before there is another.

        :param starts: those of its number in a row that came to nothing, if this was one.
        :raises WorkerError: if there is to be no other.
        """
        self._losses.max_failures = _MAX_LOST + _MAX_LOST_OF_EACH * num_workers
        how, passes = process.how_it_ended(), may_pass(process, lost)
        _log.warning("worker.lost", worker=process.number, pid=process.pid, reason=lost.reason, how=how)
        wait_s = starts.failed(may_pass=passes) if starts is not None else 0.0
        if starts is not None and wait_s is None:
            raise died_starting(process, starts.num_failures)

        if self._losses.failed(may_pass=passes) is None:
            number = self._losses.num_failures
            raise WorkerError(
                f"AD426 {number} workers died without finishing one request; the last {how}\n{process.output}"
            )

        return wait_s or 0.0

    def wait_for_room(self, error: WorkerError, rooms: Patience, *, is_anyone_ready: bool) -> float:
        """There is no room for one more process: how long to wait before it is tried again. While others work, that is
        done for ever.

        :param rooms: counts the tries.
        :raises WorkerError: ``error``, if it is not tried again, or is another.
        """
        if not is_shortage(error):
            raise error

        wait_s = rooms.failed(may_pass=True)
        if rooms.num_failures.bit_count() == 1:  # 1, 2, 4, 8 ...: it may last
            _log.warning("worker.not_started", reason=str(error), num_tries=rooms.num_failures)
        if not self.has_started or (wait_s is None and not is_anyone_ready):
            raise error

        return MAX_WAIT_S if wait_s is None else wait_s
