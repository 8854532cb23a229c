"""The Executor protocol, and what all executors share."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from asyncdata.core import errors
from asyncdata.core.errors import AsyncDataError, WorkerError
from asyncdata.core.messages import Failed, Reply, Request, Scan, Short

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.workers.slots import Slots


class Crashed(NamedTuple):
    """Instead of a reply: too many workers were lost while they processed the request.

    Its slot stays in use until ``on_reply`` returns, so that the same rows can be requested again.

    :ivar code: ``AD422`` (hung) or ``AD423`` (died).
    :ivar row: the row of the request that the last two workers processed; None if that is not known.
    """

    code: str
    reason: str
    row: int | None = None


MAX_LOSSES = 10
"""Lost workers after which a request fails. Workers may be killed from outside, so no row is blamed for so many."""

if TYPE_CHECKING:
    OnReply = Callable[[Reply | Crashed], None]


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker is doing.

    :ivar state: ``starting``, ``idle`` or ``busy``.
    :ivar pid: its process; None for a thread, and for a worker that has not started yet.
    :ivar busy_s: seconds since it began its current request.
    :ivar num_rows_done: rows of that request that are done, if the tokenize function runs row by row.
    :ivar lacks: what an actor needs to start and does not get, such as CPUs of the Ray cluster.
    """

    state: str
    pid: int | None = None
    busy_s: float = 0.0
    num_rows_done: int = 0
    lacks: str = ""


class ExecutorStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and gauges of an executor.

    :ivar num_queued: requests that no worker has yet.
    :ivar num_restarts: workers and fork servers that were replaced.
    :ivar num_reads: requests to stores that were answered.
    :ivar num_retried: requests to stores that failed and were tried again.
    :ivar num_cached: blocks of objects that were read from the local disk.
    :ivar num_cache_failures: those that could not be read from it or kept there.
    """

    workers: list[WorkerState]
    num_queued: int = 0
    num_restarts: int = 0
    num_reads: int = 0
    num_retried: int = 0
    num_cached: int = 0
    num_cache_failures: int = 0


def error_of(reply: Reply | Crashed) -> AsyncDataError:
    """The user's error for a request that failed as a whole, or for a worker that cannot start."""
    if isinstance(reply, Crashed):
        return WorkerError(f"{reply.code} a request was sent to several workers, and each was lost: {reply.reason}")

    if isinstance(reply, Failed):
        kind = getattr(errors, reply.kind, WorkerError)
        return kind(f"{reply.message}\n{reply.traceback}".rstrip())

    if isinstance(reply, Short):
        return WorkerError(f"{reply.reason}\n{reply.traceback}".rstrip())

    return WorkerError(f"a worker answered with {type(reply).__name__}; it is out of step")


def takes_samples(request: Request) -> bool:
    """Whether it is a scan that asks for samples."""
    return isinstance(request, Scan) and request.with_samples


class Executor(Protocol):
    """Runs requests in any order, on any number of workers. All methods are called in the service's thread.

    This is what those who send requests see; for the service it is a :class:`~asyncdata.workers.pool.pool.Pool`.

    :ivar num_workers: how many requests may run at the same time.
    :ivar answers_with_samples: whether it is to be asked for the samples with each scan of blocks: workers that share
        no memory need the text only once then.
    """

    slots: Slots

    @property
    def num_workers(self) -> int: ...

    @property
    def answers_with_samples(self) -> bool: ...

    def memory(self, slot: int) -> memoryview:
        """The bytes of ``slot``, to fill it in this process. Any thread may call this."""
        ...

    def watch(self, on_change: Callable[[], object]) -> None:
        """Call ``on_change`` after each change that may allow another request to be sent.

        Such changes are: a request is finished, and its ``on_reply`` has returned or its reply was dropped; a slot
        became free; the workers changed. An extra call does no harm; a missing call makes a loader hang.
        """
        ...

    def submit(self, request: Request, on_reply: OnReply, max_losses: int = MAX_LOSSES) -> int:
        """Queue a request, and return its id; ``on_reply`` is called once, unless :meth:`forget` comes first.

        If a worker is lost while it processes the request, another one gets it. The request is answered with
        :class:`Crashed` as soon as two workers in succession were lost at the same row, or ``max_losses`` in all.
        """
        ...

    def forget(self) -> None:
        """Drop the replies to all earlier requests."""
        ...

    @property
    def num_wanted(self) -> int:
        """How many requests could be submitted now without a long wait for a worker."""
        ...
