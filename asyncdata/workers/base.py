"""The Executor protocol, the slots that windows are read into, and the executor that needs no processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import anyio
import anyio.to_thread
import msgspec

from asyncdata.core import errors
from asyncdata.core.errors import AsyncDataError, WorkerError
from asyncdata.core.messages import Failed, Short
from asyncdata.core.shortage import is_shortage, short_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.messages import Job, Reply, Request
    from asyncdata.workers.request_handler import Handler
    from asyncdata.workers.slots import Slots

__all__ = ("Crashed", "Executor", "ExecutorStatistics", "OnReply", "WorkerState", "error_of", "in_a_thread")


class Crashed(NamedTuple):
    """In place of a reply: the request brought down its worker, again.

    Its slot stays in use until ``on_reply`` returns, so that the rows may be asked for once more.

    :ivar code: ``AD422`` (hung) or ``AD423`` (died).
    :ivar row: the row of the request that was being worked on both times; None if that is not known.
    """

    code: str
    reason: str
    row: int | None = None


if TYPE_CHECKING:
    OnReply = Callable[[Reply | Crashed], None]


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker is doing.

    :ivar state: ``starting``, ``idle`` or ``busy``.
    :ivar pid: its process; None for a thread, and for one that is still to be born.
    :ivar busy_s: seconds it has worked on its present request.
    :ivar num_rows_done: rows of it that are behind it, where the tokenize function runs row by row.
    """

    state: str
    pid: int | None = None
    busy_s: float = 0.0
    num_rows_done: int = 0


class ExecutorStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and gauges of an executor.

    :ivar num_queued: requests that no worker has yet.
    :ivar num_restarts: workers, and templates of workers, that were replaced.
    """

    workers: list[WorkerState]
    num_queued: int = 0
    num_restarts: int = 0


def error_of(reply: Reply | Crashed) -> AsyncDataError:
    """The user's error for a request that failed as a whole."""
    if isinstance(reply, Crashed):
        return WorkerError(f"{reply.code} a worker was lost twice while it read: {reply.reason}")

    if isinstance(reply, Failed):
        kind = getattr(errors, reply.kind, WorkerError)
        return kind(f"{reply.message}\n{reply.traceback}".rstrip())

    return WorkerError(f"a worker answered with {type(reply).__name__}; it is out of step")


class Executor(Protocol):
    """Runs requests in any order, on any number of workers. All methods belong to the service's thread.

    :ivar num_workers: how many requests may run at the same time.
    """

    num_workers: int
    slots: Slots

    def prepare(self, slot_bytes: int) -> None:
        """Start what can be started without a loop: while that is imported, workers load their tokenizers."""
        ...

    async def run(self, job: Job) -> None:
        """Serve until cancelled.

        :raises WorkerError: if workers cannot be started, or die faster than they work.
        """
        ...

    def memory(self, slot: int) -> memoryview:
        """The bytes of ``slot``, for who fills it in this process. Any thread may ask, between the call of
        :meth:`prepare` and the end of :meth:`run`.
        """
        ...

    def watch(self, on_change: Callable[[], object]) -> None:
        """Have ``on_change`` called after each change that may let more be sent.

        That is: a request is done with, and its ``on_reply`` has returned, or the reply was not wanted; a slot became
        free; there are other workers. One call too many does no harm, a missing one makes a loader hang.
        """
        ...

    def submit(self, request: Request, on_reply: OnReply, strikes: int = 0) -> None:
        """Queue a request; ``on_reply`` is called once, unless :meth:`forget` comes first.

        :param strikes: how often its rows have brought down a worker already.
        """
        ...

    def forget(self) -> None:
        """Nobody wants the replies to earlier requests any more."""
        ...

    def set_num_workers(self, num_workers: int) -> None:
        """Grow or shrink the pool, to one worker at least. A worker that goes first finishes what it was asked."""
        ...

    @property
    def num_wanted(self) -> int:
        """Requests that could be submitted now without waiting long for a worker."""
        ...

    def statistics(self) -> ExecutorStatistics:
        """What the workers are doing."""
        ...


NUM_SLOTS = 3
"""Two windows, one being delivered and one being read, and one for the canaries."""


async def in_a_thread(handler: Handler, request: Request) -> Reply:
    """The handler's reply. Abandoned on cancellation: a user's function may never return, and close() has a deadline.

    A :class:`Short` if there is no room for a thread.
    """
    try:
        return await anyio.to_thread.run_sync(handler, request, abandon_on_cancel=True)
    except RuntimeError as error:
        if not is_shortage(error):
            raise

        return Short(short_of(error))
