"""Why a process of the pool was lost, whether the cause is transient, and the errors when a pool gives up."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, NamedTuple

from asyncdata.core.errors import WorkerError
from asyncdata.core.log import get_logger
from asyncdata.core.messages import Failed, Ready, Short
from asyncdata.core.shortage import is_shortage
from asyncdata.workers.pool.deadlines import MAX_WAIT_S, Patience
from asyncdata.workers.pool.worker_main import STATUS_SHORT

if TYPE_CHECKING:
    from asyncdata.core.messages import Reply
    from asyncdata.workers.pool.processes import ChildProcess, WorkerProcess

__all__ = ("Health", "Lost", "died_starting", "first_worker_error", "may_pass", "new_patience", "ran_short")

_log = get_logger(__name__)
_MAX_STARTS = 3
"""A process that ends by itself this often while it starts is not started again."""
_PATIENCE_S = 30.0
"""How long kills from outside, or a shortage of a system resource, may last."""

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
"""What Rust and C++ print before they abort because no memory is left."""


_MAX_LOST, _MAX_LOST_OF_EACH = 11, 3
"""The limit of consecutive worker deaths without a finished request: a base, and an addend for each worker."""


class Lost(NamedTuple):
    """Why a worker was lost: ``code`` is AD422 if it hung, and AD423 if it died."""

    code: str
    reason: str


def ran_short(process: ChildProcess) -> str:
    """The resource that a process ran out of, if that was the cause of its end; empty otherwise."""
    if process.handle.status == STATUS_SHORT:
        return (process.output.rstrip().splitlines() or ["out of memory"])[-1]

    if process.handle.status == -signal.SIGABRT and any(sign in process.output for sign in _NO_MEMORY):
        return next(line for line in process.output.splitlines() if any(sign in line for sign in _NO_MEMORY))

    return ""


def may_pass(process: ChildProcess, lost: Lost | None = None) -> bool:
    """Whether the cause is transient: it was killed from outside, or the system had run out of a resource.

    :param lost: how it was lost; a worker that hung was killed by the pool itself.
    """
    if lost is not None and lost.code != "AD423":
        return False

    status = process.handle.status
    is_own = status is not None and (status >= 0 or status in _CRASHES)
    return not is_own or bool(ran_short(process))


def died_starting(process: ChildProcess, num_times: int) -> WorkerError:
    """The error when no worker starts successfully."""
    how = process.how_it_ended()
    return WorkerError(f"AD426 a worker died {num_times} times while starting ({how})\n{process.output}")


def first_worker_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show to the user; the others are its consequences."""
    matching = errors.subgroup(WorkerError) or errors
    error: BaseException = matching
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def new_patience() -> Patience:
    """For the start of a process."""
    return Patience(_MAX_STARTS, _PATIENCE_S)


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

    def check_start(self, reply: Reply) -> None:
        """Check the first message of a worker.

        :raises EOFError: if it ends for lack of a resource, and another one is started.
        :raises WorkerError: if it cannot serve, or is out of step.
        """
        if isinstance(reply, Short) and self.has_started:
            raise EOFError

        if isinstance(reply, Failed | Short):
            message = reply.message if isinstance(reply, Failed) else reply.reason
            raise WorkerError(f"{message}\n{reply.traceback}".rstrip())

        if not isinstance(reply, Ready):
            raise WorkerError(f"a worker began with {type(reply).__name__}; it is out of step")

    def wait_for_another(self, process: WorkerProcess, lost: Lost, starts: Patience | None, num_workers: int) -> float:
        """A worker was lost: seconds to wait before the next one starts.

        :param starts: counts the failed starts of workers with this number; None if this worker had been ready.
        :param num_workers: how many workers the pool has.
        :raises WorkerError: if the pool gives up.
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
