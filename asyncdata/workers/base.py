"""The Executor protocol, the slots that windows are read into, and the executor that needs no processes."""

from __future__ import annotations

import mmap
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import anyio
import anyio.to_thread
import msgspec

from asyncdata.core import errors
from asyncdata.core.errors import AsyncDataError, WorkerError
from asyncdata.core.messages import NO_SLOT, Failed, Short
from asyncdata.core.shortage import is_shortage, short_of
from asyncdata.tokenization.base import open_tokenize_fn
from asyncdata.workers.pool.deadlines import given_up, patience_of_a_request, pause
from asyncdata.workers.request_handler import Handler
from asyncdata.workers.slot_views import Borrowers

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.messages import Job, Reply, Request
    from asyncdata.tokenization.base import BatchTokenizer, TokenizeFn

__all__ = (
    "Crashed",
    "Executor",
    "ExecutorStatistics",
    "InlineExecutor",
    "OnReply",
    "Slots",
    "WorkerState",
    "error_of",
    "in_a_thread",
)


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


class Slots:
    """Which window buffers are free. A slot is reused once every request that refers to it is answered.

    :ivar on_free: called when a slot becomes free; set by the executor whose slots they are.
    :ivar borrowers: those who look into slots, also into free ones.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_requests = [0] * num_slots
        self._is_held = [False] * num_slots
        self.on_free: Callable[[], object] = bool
        self.borrowers = Borrowers(num_slots)

    def hold(self) -> int | None:
        """A free slot, now taken, into which nobody looks any more; None where all are in use."""
        places = zip(self._is_held, self._num_requests, strict=True)
        free = [slot for slot, (held, num_requests) in enumerate(places) if not held and num_requests == 0]
        if not free:
            return None

        slot = min(free, key=self.borrowers.number)  # the more there are, the more has to be copied
        self.borrowers.evict(slot)
        self._is_held[slot] = True
        return slot

    def release(self, slot: int) -> None:
        """No further request will refer to ``slot``."""
        if slot == NO_SLOT:
            return

        self._is_held[slot] = False
        self._freed(slot)

    def use(self, slot: int) -> None:
        """A request that refers to ``slot`` is under way."""
        if slot == NO_SLOT:
            return

        self._num_requests[slot] += 1

    def done(self, slot: int) -> None:
        """... and is answered, or its worker is gone for certain."""
        if slot == NO_SLOT:
            return

        self._num_requests[slot] -= 1
        self._freed(slot)

    def _freed(self, slot: int) -> None:
        if not self._is_held[slot] and self._num_requests[slot] == 0:
            self.on_free()


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


class InlineExecutor:
    """Runs requests one at a time in a thread of this process: for debugging and small data.

    Any callable will do as tokenize function, and a breakpoint in it works. It holds the GIL, so the trainer waits.
    """

    num_workers = 1

    def __init__(self, tokenize_fn: TokenizeFn | Callable[..., Any]) -> None:
        self.slots = Slots(NUM_SLOTS)
        self._tokenize_fn = tokenize_fn
        self._queue: deque[tuple[Request, OnReply]] = deque()
        self._memory: list[memoryview] = []
        self._on_change: Callable[[], object] = bool
        self._wake: anyio.Event | None = None  # of the loop that runs it, which need not be the one that makes it
        self._began = 0.0
        self._generation = 0
        self._num_rows_done = 0

    def prepare(self, slot_bytes: int) -> None:
        """As the protocol says."""
        self._memory = [_memory(slot_bytes) for _ in range(NUM_SLOTS)]

    async def run(self, job: Job) -> None:
        """As the protocol says."""
        tokenizer = await anyio.to_thread.run_sync(_open, self._tokenize_fn)
        handler = Handler(job, self._memory, tokenizer, self._progress)
        try:
            while True:
                self._wake = anyio.Event()
                while self._queue:
                    await self._answer(handler, *self._queue.popleft())
                await self._wake.wait()
        finally:
            handler.close()

    def _progress(self, row: int) -> None:
        self._num_rows_done = row

    async def _answer(self, handler: Handler, request: Request, on_reply: OnReply) -> None:
        generation, self._began, self._num_rows_done = self._generation, time.monotonic(), 0
        reply = await self._reply(handler, request)
        self._began = 0.0
        self.slots.done(request.slot)
        if generation == self._generation:
            on_reply(reply)
        self._on_change()

    def watch(self, on_change: Callable[[], object]) -> None:
        """As the protocol says."""
        self._on_change = self.slots.on_free = on_change

    async def _reply(self, handler: Handler, request: Request) -> Reply:
        """The handler's; tried again for a while where the system is short of something."""
        patience, generation = patience_of_a_request(), self._generation
        while isinstance(reply := await in_a_thread(handler, request), Short):
            wait_s = patience.failed(may_pass=True)
            if wait_s is None or generation != self._generation:
                return given_up(reply, patience.num_failures)

            await pause(wait_s)
        return reply

    def memory(self, slot: int) -> memoryview:
        """As the protocol says."""
        return self._memory[slot]

    def submit(self, request: Request, on_reply: OnReply, strikes: int = 0) -> None:
        """As the protocol says; a thread cannot be killed, so there are no strikes."""
        self.slots.use(request.slot)
        self._queue.append((request, on_reply))
        if self._wake is not None:
            self._wake.set()

    def forget(self) -> None:
        """As the protocol says."""
        self._generation += 1
        while self._queue:
            self.slots.done(self._queue.popleft()[0].slot)

    def set_num_workers(self, num_workers: int) -> None:
        """As the protocol says; there is one thread, whatever is asked."""

    @property
    def num_wanted(self) -> int:
        """As the protocol says."""
        return 2 - len(self._queue) - (self._began > 0)

    def statistics(self) -> ExecutorStatistics:
        """As the protocol says."""
        busy_s = time.monotonic() - self._began if self._began else 0.0
        num_rows_done = max(0, self._num_rows_done)  # -1: rows are worked on together
        state = WorkerState(state="busy" if self._began else "idle", busy_s=busy_s, num_rows_done=num_rows_done)
        return ExecutorStatistics(workers=[state], num_queued=len(self._queue))


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


def _memory(num_bytes: int) -> memoryview:
    """Memory of which only what is written to takes room: a slot is as large as the largest row may be."""
    if num_bytes == 0:
        return memoryview(bytearray())

    return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _open(fn: TokenizeFn | Callable[..., Any]) -> BatchTokenizer:
    try:
        return open_tokenize_fn(fn)
    except BaseException as error:  # also SystemExit, as in a worker process
        raise WorkerError(f"AD426 the tokenize function cannot be opened: {error!r}") from error
