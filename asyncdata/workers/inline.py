"""The executor without worker processes: a thread of the trainer's process runs the tokenize function."""

from __future__ import annotations

import mmap
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from asyncdata.core.callbacks import no_op
from asyncdata.core.errors import WorkerError
from asyncdata.core.messages import Short
from asyncdata.tokenization.base import open_tokenize_fn
from asyncdata.workers.base import MAX_LOSSES, NUM_SLOTS, ExecutorStatistics, WorkerState, in_a_thread
from asyncdata.workers.pool.deadlines import given_up, patience_of_a_request, pause
from asyncdata.workers.request_handler import Handler
from asyncdata.workers.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.messages import Job, Reply, Request
    from asyncdata.tokenization.base import BatchTokenizer, TokenizeFn
    from asyncdata.workers.base import OnReply

__all__ = ("InlineExecutor",)


class InlineExecutor:
    """Runs requests one at a time in a thread of this process: for debugging and small data.

    Any callable works as tokenize function, and so do breakpoints in it. It holds the GIL, so the trainer waits.
    """

    num_workers = 1

    def __init__(self, tokenize_fn: TokenizeFn | Callable[..., Any]) -> None:
        self.slots = Slots(NUM_SLOTS, lambda: self._on_change())
        self._tokenize_fn = tokenize_fn
        self._queue: deque[tuple[Request, OnReply]] = deque()
        self._memory: list[memoryview] = []
        self._on_change: Callable[[], object] = no_op
        self._wake: anyio.Event | None = None  # created in run(), by the loop that runs there
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
        self._on_change = on_change

    async def _reply(self, handler: Handler, request: Request) -> Reply:
        """The handler's reply; after a shortage of a system resource the request is tried again for a while."""
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

    def submit(self, request: Request, on_reply: OnReply, max_losses: int = MAX_LOSSES) -> None:
        """As the protocol says; a thread cannot be killed, so no worker is lost."""
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
        """As the protocol says; there is always one thread."""

    @property
    def num_wanted(self) -> int:
        """As the protocol says."""
        return 2 - len(self._queue) - (self._began > 0)

    def statistics(self) -> ExecutorStatistics:
        """As the protocol says."""
        busy_s = time.monotonic() - self._began if self._began else 0.0
        num_rows_done = max(0, self._num_rows_done)  # -1: the rows are processed together
        state = WorkerState(state="busy" if self._began else "idle", busy_s=busy_s, num_rows_done=num_rows_done)
        return ExecutorStatistics(workers=[state], num_queued=len(self._queue))


def _memory(num_bytes: int) -> memoryview:
    """Anonymous memory, as large as the largest row may be. Only pages that are written to use physical memory."""
    if num_bytes == 0:
        return memoryview(bytearray())

    return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _open(fn: TokenizeFn | Callable[..., Any]) -> BatchTokenizer:
    try:
        return open_tokenize_fn(fn)
    except BaseException as error:  # also SystemExit, as in a worker process
        raise WorkerError(f"AD426 the tokenize function cannot be opened: {error!r}") from error
