"""An executor that counts requests, the time for which its workers are busy, and the time without room."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from asyncdata.core.callbacks import no_op
from asyncdata.core.messages import Tokenize, Tokenized
from asyncdata.workers.base import MAX_LOSSES

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.messages import Job, Reply, Request
    from asyncdata.workers.base import Crashed, Executor, ExecutorStatistics, OnReply

__all__ = ("MeteredExecutor",)


class MeteredExecutor:
    """Passes all calls to an executor, and counts. All counters belong to the service's thread.

    :param clock: returns seconds.
    :ivar lacks_room: returns whether a worker got no chunk because the channel had no room.
    :ivar on_reply: called after each reply, after the next requests were sent.
    :ivar num_replies: requests that were answered.
    :ivar num_rows: rows that were tokenized.
    :ivar num_samples: samples of those rows.
    :ivar num_bytes: memory of those samples.
    :ivar work_s: seconds of tokenizing, as the workers report.
    :ivar busy_s: seconds for which workers had a request, summed over the workers.
    :ivar full_s: seconds for which the channel had no room.
    """

    def __init__(self, executor: Executor, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_workers = executor.num_workers
        self.slots = executor.slots
        self.lacks_room: Callable[[], bool] = bool  # False
        self.on_reply: Callable[[], object] = no_op
        self.num_replies = self.num_rows = self.num_samples = self.num_bytes = 0
        self.work_s = self.busy_s = self.full_s = 0.0
        self._executor = executor
        self._clock = clock
        self._counted_until = clock()
        self._was_full = False
        self._num_under_way = 0
        self._is_answered = False
        self._on_change: Callable[[], object] = no_op
        executor.watch(self._change)

    def watch(self, on_change: Callable[[], object]) -> None:
        """As the protocol says."""
        self._on_change = on_change

    def _change(self) -> None:
        self._on_change()
        if self._is_answered:
            self._is_answered = False
            self._was_full = self.lacks_room()
            self.on_reply()

    def submit(self, request: Request, on_reply: OnReply, max_losses: int = MAX_LOSSES) -> None:
        """As the protocol says."""
        self._count(is_full=self._was_full)
        self._was_full = False
        self._num_under_way += 1
        num_rows = len(request.lengths) // 4 if isinstance(request, Tokenize) else 0
        self._executor.submit(request, partial(self._answer, num_rows, on_reply), max_losses)

    def _answer(self, num_rows: int, on_reply: OnReply, reply: Reply | Crashed) -> None:
        self._count(is_full=self._was_full or self.lacks_room())
        self._num_under_way -= 1
        self.num_replies += 1
        if isinstance(reply, Tokenized):
            self.num_rows += num_rows
            self.num_samples += len(reply.token_ends) // 4
            self.num_bytes += len(reply.tokens) + sum(len(column.data) for column in reply.columns.values())
            self.work_s += reply.busy_s
        on_reply(reply)
        self._is_answered = True

    def _count(self, *, is_full: bool) -> None:
        """Add the time since the last call to the counters; also to ``full_s`` if ``is_full``."""
        now = self._clock()
        passed_s, self._counted_until = now - self._counted_until, now
        self.busy_s += passed_s * min(self.num_workers, self._num_under_way)
        if is_full:
            self.full_s += passed_s

    def forget(self) -> None:
        """As the protocol says."""
        self._count(is_full=self._was_full)
        self._was_full = False
        self._num_under_way = 0
        self._executor.forget()

    def set_num_workers(self, num_workers: int) -> None:
        """As the protocol says."""
        self._count(is_full=False)
        self._executor.set_num_workers(num_workers)
        self.num_workers = self._executor.num_workers

    def prepare(self, slot_bytes: int) -> None:
        """As the protocol says."""
        self._executor.prepare(slot_bytes)

    async def run(self, job: Job) -> None:
        """As the protocol says."""
        await self._executor.run(job)

    def memory(self, slot: int) -> memoryview:
        """As the protocol says."""
        return self._executor.memory(slot)

    @property
    def num_wanted(self) -> int:
        """As the protocol says."""
        return self._executor.num_wanted

    def statistics(self) -> ExecutorStatistics:
        """As the protocol says."""
        return self._executor.statistics()
