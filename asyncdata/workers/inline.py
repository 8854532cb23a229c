"""The executor without worker processes: a thread of the trainer's process runs the tokenize function."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import msgspec

from asyncdata.core.errors import WorkerError, get_logger, is_shortage, short_of
from asyncdata.core.messages import Job, ReadCounts, Reply, Short
from asyncdata.core.threads import finished_before_exit, stand_still_at_exit
from asyncdata.tokenization.base import BatchTokenizer, TokenizeFn, open_tokenize_fn
from asyncdata.workers.base import ExecutorStatistics, WorkerState, anonymous_slots
from asyncdata.workers.pool import Lane, Pool, Transport, with_reader
from asyncdata.workers.request_handler import Handler
from asyncdata.workers.worker import Call, Lost, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anyio.abc import TaskGroup


_log = get_logger(__name__)
_NEVER_S = float("inf")


class _ThreadWorker(Worker):
    """Runs the handler in a thread, which cannot be killed: no worker is lost.

    :ivar turn: held during a request.
    """

    def __init__(self, number: int, new_handler: Callable[[Callable[[int], None]], Handler]) -> None:
        super().__init__(number, _NEVER_S)
        self.turn = anyio.Lock()
        self.handler = new_handler(self._note)
        self._row = -1
        self._has_call = anyio.Event()

    def _note(self, row: int) -> None:
        stand_still_at_exit()
        self._row = row

    async def begin(self, has_started: Callable[[], bool]) -> None:
        """Nothing to wait for: it is ready at once."""

    def send(self, call: Call) -> None:
        self._row = -1
        self._has_call.set()

    async def receive(self) -> tuple[int, Reply]:
        await self._has_call.wait()
        self._has_call = anyio.Event()
        call = self.calls[0]
        async with self.turn:
            return call.request_id, await self._reply(call)

    async def _reply(self, call: Call) -> Reply:
        """The handler's reply. On cancellation the thread is abandoned: a user's function may never return, and close()
        has a deadline.
        """
        try:
            return await anyio.to_thread.run_sync(
                finished_before_exit, self.handler, call.request, abandon_on_cancel=True
            )
        except RuntimeError as error:
            if not is_shortage(error):
                raise

            return Short(short_of(error))  # the system has no room for a thread

    def progress(self) -> tuple[int, int]:
        return (self.calls[0].request_id, self._row) if self.calls else (0, -1)

    async def end(self, lost: Lost | None) -> Lost | None:
        return lost

    def kill(self) -> None:
        self.handler.close()


class _Threads(Transport):
    """One thread, and one more that reads windows from a store; see :class:`~asyncdata.workers.pool.Transport`."""

    def __init__(self, tokenize_fn: TokenizeFn | Callable[..., Any]) -> None:
        self._tokenize_fn = tokenize_fn
        self._tokenizes = Lane(self._start, 0, 1, 1, max_requests=1)
        self._reads = Lane(self._start, 1, max_requests=1)
        self.lanes = [self._tokenizes, self._reads]
        self._slots: list[memoryview] = []
        self._counts = ReadCounts()
        self._new_handler: Callable[[Callable[[int], None]], Handler] | None = None

    def prepare(self, slot_bytes: int, num_parts: int) -> Sequence[memoryview]:
        self._slots = anonymous_slots(slot_bytes, num_parts)
        return self._slots

    async def begin(self, group: TaskGroup, job: Job) -> None:
        tokenizer = await anyio.to_thread.run_sync(_open, self._tokenize_fn)
        self._new_handler = partial(Handler, job, self._slots, tokenizer, counts=self._counts)
        with_reader(self._tokenizes, self._reads, job)

    async def _start(self, number: int) -> Worker:
        assert self._new_handler is not None, "begin() comes first"
        return _ThreadWorker(number, self._new_handler)

    async def reopen(self, workers: list[Worker], dismiss: Callable[[Worker], object]) -> None:
        """Open the functions again. The next request waits for it, as they are not made for two threads."""
        for worker in workers:
            if not isinstance(worker, _ThreadWorker) or worker.number not in self._tokenizes.numbers():
                continue

            async with worker.turn:
                try:
                    worker.handler.use(await anyio.to_thread.run_sync(_open, self._tokenize_fn))
                except WorkerError as error:
                    _log.warning("workers.not_reopened", reason=str(error))
                else:
                    _log.info("workers.reopened", num_workers=1)

    def num_reads(self) -> dict[str, int]:
        names = "num_reads", "num_retried", "num_cached", "num_cache_failures"
        return {name: getattr(self._counts, name) for name in names}


class InlineExecutor(Pool):
    """Runs requests one at a time in a thread of this process: for debugging and small data.

    :param num_parts: parts of the mixture that it serves; each has slots of its own.

    Any callable works as tokenize function, and so do breakpoints in it. It holds the GIL, so the trainer waits.
    """

    def __init__(self, tokenize_fn: TokenizeFn | Callable[..., Any], num_parts: int = 1) -> None:
        super().__init__([_Threads(tokenize_fn)], num_parts)

    def statistics(self) -> ExecutorStatistics:
        """What the thread is doing: it is there before it is used, and afterwards."""
        found = super().statistics()
        return found if found.workers else msgspec.structs.replace(found, workers=[WorkerState(state="idle")])


def _open(fn: TokenizeFn | Callable[..., Any]) -> BatchTokenizer:
    try:
        return open_tokenize_fn(fn)
    except BaseException as error:  # also SystemExit, as in a worker process
        raise WorkerError(f"AD426 the tokenize function cannot be opened: {error!r}") from error
