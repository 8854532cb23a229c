"""What all executors share: what they answer and tell, and the slots of windows. And what crosses between the trainer's
process and a pool's processes besides requests and replies.
"""

from __future__ import annotations

import copy
import mmap
import os
import struct
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from asyncdata.core import errors
from asyncdata.core.errors import AsyncDataError, WorkerError
from asyncdata.core.messages import NO_SLOT, Failed, Reply, Request, Scan, Short
from asyncdata.core.threads import no_op


class Crashed(NamedTuple):
    """Instead of a reply: too many workers were lost while they processed the request.

    Its slot stays in use until who asked was told, so that the same rows can be requested again.

    :ivar code: ``AD422`` (hung) or ``AD423`` (died).
    :ivar row: the row of the request that the last two workers processed; None if that is not known.
    """

    code: str
    reason: str
    row: int | None = None


MAX_LOSSES = 10
"""Lost workers after which a request fails. Workers may be killed from outside, so no row is blamed for so many."""


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


NUM_SLOTS = 3
"""One for the window that is delivered, one for the window that is read, and one for the canaries."""


class Slots:
    """Tracks which slots are free. A slot is reused after every request that refers to it is answered.

    :param on_free: called when a slot becomes free.
    :ivar numbers: their numbers.
    :ivar limit: how many of them may be held.
    """

    def __init__(self, num_slots: int, on_free: Callable[[], object] = no_op) -> None:
        self.numbers = range(num_slots)
        self.limit = num_slots
        self._num_requests = [0] * num_slots
        self._is_held = [False] * num_slots
        self._tells: dict[int, Callable[[], object]] = {}
        self.on_free = on_free

    def of_part(self, part: int, num_parts: int) -> Slots:
        """The slots of one part of a mixture; it may hold none until its limit is set."""
        own = copy.copy(self)  # the lists, and who is told, are the same
        own.numbers, own.limit, own.on_free = self.numbers[part::num_parts], 0, lambda: self.on_free()
        return own

    def tell(self, on_free: Callable[[], object]) -> None:
        """Call ``on_free`` when one of these became free, before the general call."""
        self._tells.update(dict.fromkeys(self.numbers, on_free))

    def hold(self) -> int | None:
        """Take a free slot; None if all are in use, or enough are held."""
        free = [slot for slot in self.numbers if not self._is_held[slot]]
        num_held = len(self.numbers) - len(free)
        slot = next((slot for slot in free if self._num_requests[slot] == 0), None) if num_held < self.limit else None
        if slot is not None:
            self._is_held[slot] = True
        return slot

    def release(self, slot: int) -> None:
        """Give ``slot`` back: no further request will refer to it."""
        if slot == NO_SLOT:
            return

        self._is_held[slot] = False
        self._freed(slot)

    def use(self, slot: int) -> None:
        """A request that refers to ``slot``, which is held, is under way."""
        if slot == NO_SLOT:
            return

        assert self._is_held[slot] or self._num_requests[slot], "a free slot may get another window's content"
        self._num_requests[slot] += 1

    def done(self, slot: int) -> None:
        """A request that refers to ``slot`` is answered, or its worker has certainly ended."""
        if slot == NO_SLOT:
            return

        self._num_requests[slot] -= 1
        self._freed(slot)

    def _freed(self, slot: int) -> None:
        if not self._is_held[slot] and self._num_requests[slot] == 0:
            self._tells.get(slot, no_op)()
            self.on_free()


def anonymous_slots(num_bytes: int, num_parts: int) -> list[memoryview]:
    """The memory of all slots, for workers that share none. Only pages that are written to use physical memory.

    :param num_bytes: the size of a slot.
    :param num_parts: parts of a mixture; there are ``NUM_SLOTS`` for each.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return [
        memoryview(mmap.mmap(-1, num_bytes, flags=flags) if num_bytes else b"") for _ in range(NUM_SLOTS * num_parts)
    ]


# Between the trainer's process and those of a pool

PROGRESS = struct.Struct("<Qi")  # the id of the request that is being worked on (0: none), and its row (-1: all)
PROGRESS_BYTES = 64  # one cache line each, so that workers do not disturb one another
_COUNTS_AT = 16
STATUS_SHORT = os.EX_TEMPFAIL
"""Exit status of a process of the pool that ran out of a system resource: no row is to blame."""


def read_counts_at(number: int) -> int:
    """Where the page has the counts of requests to stores, of all workers that had this number: by their progress."""
    return number * PROGRESS_BYTES + _COUNTS_AT


COMMAND = struct.Struct("<Bi")
SHARE, FORK, REAP = 1, 2, 3
"""The commands:

- SHARE, sent once: carries the descriptors of the shared memory; the frame of the job follows. It has no answer.
- FORK, with the number of a worker: carries the worker's end of its socket, and the descriptor of its output pipe.
- REAP, with the pid of a worker that has ended.
"""
MAX_FDS = 16


class Loaded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to a description: the tokenize function is open.

    ``reason`` says why forked workers cannot share it; empty if they can. With a reason, the fork server itself becomes
    the worker of the first FORK.
    """

    reason: str


class ForkedWorker(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A worker was forked."""

    pid: int


class NotForked(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The system has no room for one more process."""

    errno: int


class Reaped(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How a worker ended: its exit status, or a signal as a negative number; None if that is not known."""

    status: int | None


Answer = Loaded | ForkedWorker | NotForked | Reaped | Failed | Short

decode_answer = msgspec.msgpack.Decoder(Answer).decode
