"""The executor without worker processes: a thread of the trainer's process runs the tokenize function."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from asyncdata.core.callbacks import no_op
from asyncdata.core.errors import WorkerError
from asyncdata.core.log import get_logger
from asyncdata.core.messages import Short
from asyncdata.core.read_counts import ReadCounts
from asyncdata.tokenization.base import open_tokenize_fn
from asyncdata.workers.base import MAX_LOSSES, NUM_SLOTS, ExecutorStatistics, WorkerState, in_a_thread
from asyncdata.workers.part_handler import handler_of
from asyncdata.workers.pool.calls import Backlog
from asyncdata.workers.pool.deadlines import given_up, pause
from asyncdata.workers.reader_lane import has_stores, waits_for_a_store
from asyncdata.workers.slots import Slots, anonymous_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.messages import Job, Reply, Request
    from asyncdata.tokenization.base import BatchTokenizer, TokenizeFn
    from asyncdata.workers.base import OnReply
    from asyncdata.workers.part_handler import PartHandler
    from asyncdata.workers.pool.calls import Call
    from asyncdata.workers.request_handler import Handler

__all__ = ("InlineExecutor",)

_log = get_logger(__name__)


class InlineExecutor:
    """Runs requests one at a time in a thread of this process: for debugging and small data.

    :param num_parts: parts of the mixture that it serves; each has slots of its own.

    Any callable works as tokenize function, and so do breakpoints in it. It holds the GIL, so the trainer waits.
    """

    num_workers = 1
    answers_with_samples = False

    def __init__(self, tokenize_fn: TokenizeFn | Callable[..., Any], num_parts: int = 1) -> None:
        self.slots = Slots(NUM_SLOTS * num_parts, lambda: self._on_change())
        self._tokenize_fn = tokenize_fn
        self._backlog = Backlog(self.slots, no_op)
        self._under_way: set[Call] = set()
        self._memory: list[memoryview] = []
        self._on_change: Callable[[], object] = no_op
        self._wake: anyio.Event | None = None  # created in run(), by the loop that runs there
        self._began = 0.0
        self._is_outdated = False
        self._num_rows_done = 0
        self._counts = ReadCounts()

    def prepare(self, slot_bytes: int) -> None:
        """As the protocol says."""
        self._memory = [anonymous_memory(slot_bytes) for _ in range(self.slots.number)]

    async def run(self, job: Job) -> None:
        """As the protocol says."""
        tokenizer = await anyio.to_thread.run_sync(_open, self._tokenize_fn)
        self._backlog.is_for_reader = partial(waits_for_a_store, job)
        handler = handler_of(job, self._memory, tokenizer, self._progress, self._counts)
        if not has_stores(job):
            await self._tokenize(handler)
            return

        async with anyio.create_task_group() as group:
            group.start_soon(self._read, handler_of(job, self._memory, tokenizer, no_op, self._counts))
            await self._tokenize(handler)

    async def _tokenize(self, handler: Handler | PartHandler) -> None:
        try:
            while True:
                wake = self._next_wake
                while (call := self._take(is_reader=False)) is not None:
                    self._began, self._num_rows_done = time.monotonic(), 0
                    reply = await self._reply(handler, call)
                    self._began = 0.0
                    self._end(call, reply)
                    if self._is_outdated:
                        await self._open_again(handler)
                await wake.wait()
        finally:
            handler.close()

    async def _read(self, handler: Handler | PartHandler) -> None:
        """Read windows of objects in another thread, while rows are tokenized."""
        try:
            while True:
                wake = self._next_wake
                while (call := self._take(is_reader=True)) is not None:
                    self._end(call, await self._reply(handler, call))
                await wake.wait()
        finally:
            handler.close()

    @property
    def _next_wake(self) -> anyio.Event:
        """It is set at the next request."""
        if self._wake is None:
            self._wake = anyio.Event()
        return self._wake

    def _take(self, *, is_reader: bool) -> Call | None:
        call = self._backlog.take(is_reader=is_reader)
        if call is not None:
            self._under_way.add(call)
        return call

    def reopen(self) -> None:
        """As the protocol says; the next request but one waits for it, as there is only one thread."""
        self._is_outdated = True

    async def _open_again(self, handler: Handler | PartHandler) -> None:
        self._is_outdated = False
        try:
            handler.use(await anyio.to_thread.run_sync(_open, self._tokenize_fn))
        except WorkerError as error:
            _log.warning("workers.not_reopened", reason=str(error))
        else:
            _log.info("workers.reopened", num_workers=1)

    def _progress(self, row: int) -> None:
        self._num_rows_done = row

    def _end(self, call: Call, reply: Reply) -> None:
        self._under_way.remove(call)
        self._backlog.end(call, reply)
        self._on_change()

    def watch(self, on_change: Callable[[], object]) -> None:
        """As the protocol says."""
        self._on_change = on_change

    async def _reply(self, handler: Handler | PartHandler, call: Call) -> Reply:
        """The handler's reply; after a shortage of a system resource the request is tried again for a while."""
        while isinstance(reply := await in_a_thread(handler, call.request), Short):
            wait_s = call.shortages.failed(may_pass=True)
            if wait_s is None or call.on_reply is None:
                return given_up(reply, call.shortages.num_failures)

            await pause(wait_s)
        return reply

    def memory(self, slot: int) -> memoryview:
        """As the protocol says."""
        return self._memory[slot]

    def submit(self, request: Request, on_reply: OnReply, max_losses: int = MAX_LOSSES) -> None:
        """As the protocol says; a thread cannot be killed, so no worker is lost."""
        self._backlog.submit(request, on_reply, max_losses)
        if self._wake is not None:
            self._wake.set()
            self._wake = None

    def forget(self) -> None:
        """As the protocol says."""
        self._backlog.forget()
        for call in self._under_way:
            call.on_reply = None

    def set_num_workers(self, num_workers: int) -> None:
        """As the protocol says; there is always one thread."""

    @property
    def num_wanted(self) -> int:
        """As the protocol says."""
        return 2 - self._backlog.num_for_workers - (self._began > 0)

    @property
    def is_busy(self) -> bool:
        """As the protocol says."""
        return self._began > 0

    def statistics(self) -> ExecutorStatistics:
        """As the protocol says."""
        busy_s = time.monotonic() - self._began if self._began else 0.0
        num_rows_done = max(0, self._num_rows_done)  # -1: the rows are processed together
        state = WorkerState(state="busy" if self._began else "idle", busy_s=busy_s, num_rows_done=num_rows_done)
        counts = self._counts
        return ExecutorStatistics(
            workers=[state],
            num_queued=len(self._backlog),
            num_reads=counts.num_reads,
            num_retried=counts.num_retried,
            num_cached=counts.num_cached,
            num_cache_failures=counts.num_cache_failures,
        )


def _open(fn: TokenizeFn | Callable[..., Any]) -> BatchTokenizer:
    try:
        return open_tokenize_fn(fn)
    except BaseException as error:  # also SystemExit, as in a worker process
        raise WorkerError(f"AD426 the tokenize function cannot be opened: {error!r}") from error
