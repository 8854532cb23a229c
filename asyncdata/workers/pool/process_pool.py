"""A pool of worker processes: forked from a fork server, fed over socketpairs, replaced when they die or hang.

The trainer's process is never forked, nothing is pickled, and no ``__main__`` is imported again. When a worker is lost,
its request is sent again as a whole. After two losses at the same row, or too many in all, it is answered
with :class:`Crashed`; the producer then searches for the row that is to blame.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

import anyio

from asyncdata.core.callbacks import no_op
from asyncdata.core.errors import WorkerError
from asyncdata.core.framing import frame
from asyncdata.core.log import get_logger
from asyncdata.core.messages import Ready, Short, decode_reply
from asyncdata.workers.base import MAX_LOSSES, NUM_SLOTS, Crashed, ExecutorStatistics
from asyncdata.workers.pool.calls import Backlog
from asyncdata.workers.pool.deadlines import pause
from asyncdata.workers.pool.lost_workers import Health, Lost, first_worker_error, new_patience, ran_short
from asyncdata.workers.pool.processes import SharedResources
from asyncdata.workers.pool.spawning import WorkerFactory
from asyncdata.workers.pool.worker import Worker, state_of
from asyncdata.workers.reader_lane import has_stores, waits_for_a_store
from asyncdata.workers.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.messages import Job, Request
    from asyncdata.workers.base import OnReply
    from asyncdata.workers.pool.calls import Call
    from asyncdata.workers.pool.deadlines import Patience
    from asyncdata.workers.pool.early_start import EarlyForkServer

__all__ = ("ProcessExecutor",)

_log = get_logger(__name__)
_MAX_REQUESTS = 2
"""Requests that a worker has at a time: one to work on, and one queued, so that it never waits for the next one."""
_MAX_WORKERS = 64


class ProcessExecutor:
    """A pool of worker processes.

    :param num_workers: processes at the start; each runs one request at a time.
    :param row_timeout_s: a worker that makes no progress for so many seconds counts as hung, and is killed. Progress is
        a reply, or, if the tokenize function runs row by row, a row.
    :param max_workers: the largest number of workers; None means 64, or ``num_workers`` if that is more.
    :param early: a fork server that was started before; :meth:`prepare` must run in its thread.
    :param max_bytes_per_worker: a worker that uses more memory is replaced after it has answered its requests.
    :param num_parts: parts of the mixture that it serves; each has slots of its own.
    """

    def __init__(
        self,
        num_workers: int,
        row_timeout_s: float = 60.0,
        max_workers: int | None = None,
        early: EarlyForkServer | None = None,
        max_bytes_per_worker: int | None = None,
        num_parts: int = 1,
    ) -> None:
        self._max_workers = max(num_workers, max_workers or _MAX_WORKERS)
        self.num_workers, self._num_parts, self.answers_with_samples = num_workers, num_parts, False
        self.slots = Slots(NUM_SLOTS * num_parts, lambda: self._on_change())
        self._row_timeout_s, self._max_bytes, self._early = row_timeout_s, max_bytes_per_worker, early
        self._shared: SharedResources | None = None
        self._factory: WorkerFactory | None = None
        self._backlog = Backlog(self.slots, self._dispatch)
        self._workers: dict[int, Worker] = {}
        self._kept: set[int] = set()
        self._readers: frozenset[int] = frozenset()
        self._start_one_more: Callable[[int], object] | None = None
        self._start_reopening: Callable[[], object] = no_op
        self._is_outdated, self._reopening = False, anyio.Lock()
        self._on_change: Callable[[], object] = no_op
        self._num_restarts, self._health = 0, Health()

    def prepare(self, slot_bytes: int) -> None:
        """As the protocol says. The workers die with the calling thread."""
        started = self._early.take() if self._early is not None else None
        with contextlib.ExitStack() as failing:
            if started is not None:
                failing.callback(started.end)
            alive = None if started is None else started.alive
            made = SharedResources(self._max_workers + 1, slot_bytes, NUM_SLOTS, alive, self._num_parts)
            shared = failing.enter_context(made)
            self._factory = WorkerFactory(shared, started)
            failing.pop_all()
        self._shared = shared

    async def run(self, job: Job) -> None:
        """As the protocol says; must run in the thread that called :meth:`prepare`."""
        if self._shared is None or self._factory is None:
            raise WorkerError("prepare() has not been called")

        factory = self._factory
        self._readers = frozenset({self._max_workers} if has_stores(job) else ())
        self._backlog.is_for_reader = partial(waits_for_a_store, job)
        with self._shared:
            try:
                async with anyio.create_task_group() as group:
                    factory.begin(group, job)
                    group.start_soon(self._backlog.run)
                    self._start_one_more = lambda number: group.start_soon(self._maintain, factory, number)
                    self._start_reopening = lambda: group.start_soon(self._reopen, factory)
                    self._grow_and_shrink()
                    if self._is_outdated:
                        self._start_reopening()
            except BaseExceptionGroup as errors:
                error = first_worker_error(errors)
                calls = [call for worker in self._workers.values() for call in worker.calls]
                self._backlog.end_all(calls, str(error))
                raise error from None
            finally:
                self._workers, self._kept, self._start_one_more, self._start_reopening = {}, set(), None, no_op
                factory.close()

    def set_num_workers(self, num_workers: int) -> None:
        """As the protocol says."""
        self.num_workers = max(1, min(num_workers, self._max_workers))
        self._grow_and_shrink()
        self._on_change()

    def _grow_and_shrink(self) -> None:
        """Start missing workers; dismiss those with the highest numbers."""
        if self._start_one_more is None:
            return

        for number in sorted({*range(self.num_workers), *self._readers} - self._kept):
            self._kept.add(number)
            self._start_one_more(number)
        for worker in self._workers.values():
            self._dismiss_if_done(worker)
        self._dispatch()

    def reopen(self) -> None:
        """As the protocol says."""
        self._is_outdated = True
        self._start_reopening()

    async def _reopen(self, factory: WorkerFactory) -> None:
        """Replace all workers by forks of a new fork server, each after its requests."""
        async with self._reopening:
            if not await factory.reload():
                return

            outdated = list(self._workers.values())
            for worker in outdated:
                worker.is_outdated = True
                self._dismiss_if_done(worker)
            for worker in outdated:
                await worker.ended.wait()
            await factory.end_outdated()
            _log.info("workers.reopened", num_workers=self.num_workers)

    def _is_wanted(self, number: int) -> bool:
        return number < self.num_workers or number in self._readers

    def _dismiss_if_done(self, worker: Worker) -> None:
        if not worker.calls and (worker.is_spent or not self._is_wanted(worker.process.number)):
            worker.is_dismissed = True  # final: it gets no request, even if the pool grows again now
            worker.conversation.cancel()

    async def _maintain(self, factory: WorkerFactory, number: int) -> None:
        """Start worker ``number``, and start it again when it ends, as long as it is wanted."""
        starts, rooms = new_patience(), new_patience()
        while self._is_wanted(number):
            try:
                process = await factory.start_worker(number)
            except WorkerError as error:
                is_any_ready = any(worker.is_ready for worker in self._workers.values())
                await pause(self._health.wait_for_room(error, rooms, is_any_ready=is_any_ready))
                continue

            rooms.succeeded()
            await pause(await self._use(Worker(process, self._max_bytes, self._row_timeout_s), starts))
        self._kept.discard(number)

    async def _use(self, worker: Worker, starts: Patience) -> float:
        """Use the worker until its end: seconds to wait before the next one starts."""
        number, wait_s = worker.process.number, 0.0
        self._workers[number] = worker
        try:
            lost = await self._communicate(worker)
            if worker.is_ready or lost is None:
                starts.succeeded()
            is_start = not worker.is_ready
            worker.is_ready = False  # a dead worker must not get new requests
            self._num_restarts += worker.is_spent and not worker.is_outdated
            await self._reap(worker)
            if lost is not None:
                self._num_restarts += self._is_wanted(number)
                failed = starts if is_start else None
                wait_s = self._health.wait_for_another(worker.process, lost, failed, self.num_workers)
                self._recover(worker, lost)
        finally:
            worker.process.kill()
            worker.process.wait()
            worker.ended.set()
        del self._workers[number]
        return wait_s

    async def _communicate(self, worker: Worker) -> Lost | None:
        """Exchange messages with the worker until it is lost; None if it was dismissed."""
        lost = None
        async with anyio.create_task_group() as group:
            worker.conversation = group.cancel_scope
            group.start_soon(worker.process.pump_output)
            group.start_soon(worker.process.connection.send_rest)
            self._dismiss_if_done(worker)
            lost = await self._exchange(worker)
            group.cancel_scope.cancel()
        return lost

    async def _exchange(self, worker: Worker) -> Lost:
        try:
            await self._await_ready(worker)
            while await self._answer_until_late(worker):
                pass
        except (EOFError, OSError):
            return Lost("AD423", "its worker died")

        return Lost("AD422", f"no result in {self._row_timeout_s:g} s; its worker was killed")

    async def _await_ready(self, worker: Worker) -> None:
        _, body = await worker.process.connection.receive()
        self._health.check_start(decode_reply(body))
        worker.look_at_memory()
        if worker.has_outgrown:
            raise WorkerError(
                f"AD426 a worker uses {worker.num_bytes} bytes before it has tokenized a row, but "
                f"Limits(max_bytes_per_worker={self._max_bytes}): raise it"
            )

        worker.is_ready = self._health.has_started = True
        self._dispatch()

    async def _answer_until_late(self, worker: Worker) -> bool:
        """Receive replies until the next check of the progress. Return whether the worker has made progress within
        ``row_timeout_s``.
        """
        with anyio.CancelScope() as worker.patience:
            worker.look_later()
            while True:
                request_id, body = await worker.process.connection.receive()
                self._answer(worker, request_id, body)
        return worker.is_at_work()

    def _answer(self, worker: Worker, request_id: int, body: memoryview) -> None:
        call = worker.calls.popleft() if worker.calls else None
        if call is None or call.request_id != request_id:
            raise WorkerError(f"a worker answered request {request_id} out of turn")

        reply = decode_reply(body)
        if isinstance(reply, Ready):
            raise WorkerError("a worker announced itself twice; it is out of step")

        worker.look_at_memory()
        if isinstance(reply, Short):
            worker.run_short(reply.reason)
        else:
            self._health.succeeded()
        self._dispatch()
        worker.be_patient()
        self._dismiss_if_done(worker)
        self._backlog.hand_over(call, reply)
        self._on_change()

    async def _reap(self, worker: Worker) -> None:
        """Kill the worker and wait for its end. Before that, it could still write into a slot that is reused."""
        worker.process.kill()
        with anyio.CancelScope(shield=True):
            await worker.process.handle.ended()
        await worker.process.handle.ask_status()

    def _recover(self, worker: Worker, lost: Lost) -> None:
        """Put the lost worker's requests at the front of the queue, except one that has lost too many workers.

        If the worker died with its fork server, its exit status is unknown, and no request is blamed.
        """
        culprit, row = worker.process.progress()
        want = ran_short(worker.process)
        if lost.code == "AD423" and worker.process.handle.status is None:
            culprit = 0
        worker.process.clear_progress()
        reason = f"{lost.reason} ({worker.process.how_it_ended()})"
        crashed: list[tuple[Call, Crashed]] = []
        for call in reversed(worker.calls):
            is_culprit = call.request_id == culprit
            call.num_losses += is_culprit and not want
            is_row_known = is_culprit and row >= 0 and row == call.suspect
            if call.on_reply is None:
                self.slots.done(call.request.slot)
            elif is_culprit and want:
                self._backlog.hand_over(call, Short(want, row=row))
            elif is_row_known or (is_culprit and call.num_losses >= call.max_losses):
                crashed.append((call, Crashed(lost.code, reason, row if is_row_known else None)))
            else:
                call.suspect = row if is_culprit else call.suspect
                self._backlog.add_first(call)
        worker.calls.clear()
        for call, outcome in crashed:
            self._backlog.end(call, outcome)
        self._dispatch()
        self._on_change()

    def memory(self, slot: int) -> memoryview:
        """As the protocol says."""
        if self._shared is None:
            raise WorkerError("prepare() has not been called")

        return self._shared.memory(slot)

    def watch(self, on_change: Callable[[], object]) -> None:
        """As the protocol says."""
        self._on_change = on_change

    def submit(self, request: Request, on_reply: OnReply, max_losses: int = MAX_LOSSES) -> None:
        """As the protocol says."""
        self._backlog.submit(request, on_reply, max_losses)
        self._dispatch()

    def _dispatch(self) -> None:
        for is_reader in (False, True):
            workers = [
                worker for worker in self._workers.values() if (worker.process.number in self._readers) == is_reader
            ]
            while ready := [worker for worker in workers if self._has_room(worker)]:
                call = self._backlog.take(is_reader=is_reader)
                if call is None:
                    break

                self._send(min(ready, key=lambda worker: len(worker.calls)), call)

    def _has_room(self, worker: Worker) -> bool:
        is_here = worker.is_ready and not worker.is_dismissed and not worker.is_spent
        return is_here and self._is_wanted(worker.process.number) and len(worker.calls) < _MAX_REQUESTS

    def _send(self, worker: Worker, call: Call) -> None:
        worker.calls.append(call)
        if len(worker.calls) == 1:
            worker.be_patient()
        with contextlib.suppress(OSError):  # the worker is gone: its own task detects that, and recovers the call
            worker.process.connection.send(frame(call.request_id, call.request))

    def forget(self) -> None:
        """As the protocol says. Requests that a worker has started are finished, and their replies dropped."""
        self._backlog.forget()
        for worker in self._workers.values():
            for call in worker.calls:
                call.on_reply = None

    @property
    def num_wanted(self) -> int:
        """As the protocol says."""
        workers = [worker for worker in self._workers.values() if worker.process.number < self.num_workers]
        num_calls = sum(len(worker.calls) for worker in workers) + self._backlog.num_for_workers
        return _MAX_REQUESTS * self.num_workers - num_calls

    @property
    def is_busy(self) -> bool:
        """As the protocol says."""
        return any(worker.calls for worker in self._workers.copy().values())

    def statistics(self) -> ExecutorStatistics:
        """As the protocol says."""
        states = [state_of(self._workers.get(number)) for number in sorted(self._kept.copy())]
        num_restarts = self._num_restarts + (self._factory.num_lost if self._factory is not None else 0)
        reads = {} if self._shared is None else self._shared.num_reads()
        return ExecutorStatistics(workers=states, num_queued=len(self._backlog), num_restarts=num_restarts, **reads)
