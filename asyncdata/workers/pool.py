"""A pool of workers: gives them requests, replaces those that die or hang, and grows and shrinks.

Its workers are of one kind or two: processes, actors of a Ray cluster, or a thread; what differs is behind
:class:`~asyncdata.workers.worker.Worker`. When a worker is lost, its request is sent again as a whole. After two
losses at the same row, or too many in all, it is answered with :class:`~asyncdata.workers.base.Crashed`; the read-ahead
then searches for the row that is to blame.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import anyio
import msgspec

from asyncdata.core.errors import AsyncDataError, WorkerError
from asyncdata.core.messages import Failed, Job, Ready, Reply, Request, Scan, Short
from asyncdata.core.threads import no_op
from asyncdata.workers.base import MAX_LOSSES, NUM_SLOTS, Crashed, ExecutorStatistics, Slots, WorkerState, takes_samples
from asyncdata.workers.changes import Changes
from asyncdata.workers.worker import Backlog, Call, Health, Lost, Patience, Worker, new_patience, pause

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from anyio.abc import TaskGroup


_MAX_REQUESTS = 2
"""Requests that a worker has at a time: one to work on, and one queued, so that it never waits for the next one."""


class Lane(msgspec.Struct, eq=False):
    """Workers that take the same requests.

    :ivar start: starts the worker with a number.
    :ivar first: the first of their numbers.
    :ivar num_workers: how many there should be.
    :ivar max_workers: how many the pool may grow to; 0 if it does not change their number.
    :ivar max_requests: requests that each has at a time.
    :ivar max_starts: a worker that ends by itself this often while it starts is not started again; None: the default.
    :ivar takes: whether they take a request.
    """

    start: Callable[[int], Awaitable[Worker]]
    first: int = 0
    num_workers: int = 0
    max_workers: int = 0
    max_requests: int = _MAX_REQUESTS
    max_starts: float | None = None
    takes: Callable[[Request], bool] = lambda _: True

    def numbers(self) -> range:
        """The numbers of their workers."""
        return range(self.first, self.first + self.num_workers)


def with_reader(workers: Lane, reader: Lane, job: Job) -> None:
    """If a source of ``job`` is in a store, let the reader wait for it while the others tokenize. It gets only scans
    for text; the others tokenize what they read.
    """

    def waits(request: Request) -> bool:
        if not isinstance(request, Scan) or request.with_samples:
            return False

        return bool((job.parts[request.part] if job.parts else job).stores)

    reader.num_workers = int(any(one.stores for one in (job, *job.parts)))
    reader.takes, workers.takes = waits, lambda request: not waits(request)


class Transport(ABC):
    """How workers of one kind are started and reached.

    :ivar lanes: its workers; the pool changes their number.
    """

    lanes: Sequence[Lane]

    @abstractmethod
    def prepare(self, slot_bytes: int, num_parts: int) -> Sequence[memoryview]:
        """Make the slots and return their memory; see :meth:`Pool.prepare`. The first transport's is used."""

    @abstractmethod
    async def begin(self, group: TaskGroup, job: Job) -> None:
        """Allow workers to start, with ``job`` to do."""

    @abstractmethod
    async def reopen(self, workers: list[Worker], dismiss: Callable[[Worker], object]) -> None:
        """Open the tokenize function again; see :meth:`Pool.reopen`.

        :param workers: the pool's, of every kind.
        :param dismiss: replaces a worker that is outdated, after its requests.
        """

    @property
    def num_restarts(self) -> int:
        """Processes that were replaced, besides its workers."""
        return 0

    def num_reads(self) -> dict[str, int]:
        """Requests of its workers to stores, as fields of the statistics."""
        return {}

    def close(self) -> None:  # noqa: B027 - not every kind leaves something
        """End what is left. The workers have ended."""


class Pool:
    """An executor: runs requests in any order, on any number of workers, in the service's thread.

    :param transports: its kinds of workers; workers of the first get work first.
    :param num_parts: parts of the mixture that it serves; each has slots of its own.
    :ivar slots: which are free.
    :ivar changes: called after each change that may allow another request to be sent: one is finished, and its caller
        was told, or it was dropped; a slot became free; the workers changed. An extra call does no harm; a missing one
        makes a loader hang.
    :ivar answers_with_samples: whether it is to be asked for the samples with each scan of blocks: workers that share
        no memory need the text only once then.
    :ivar num_answered: requests that workers have answered.
    :ivar on_submit: called after each :meth:`submit`.
    """

    answers_with_samples = False

    def __init__(self, transports: Sequence[Transport], num_parts: int) -> None:
        self.changes = Changes()
        self.slots = Slots(NUM_SLOTS * num_parts, self.changes)
        self.num_parts = num_parts
        self._transports = transports
        self._lanes = [lane for transport in transports for lane in transport.lanes]
        self._memory: Sequence[memoryview] = ()
        self._backlog = Backlog(self.slots, self._dispatch)
        self._workers: dict[int, Worker] = {}
        self._kept: set[int] = set()
        self._group: TaskGroup | None = None
        self._is_outdated = False
        self.on_submit: Callable[[], object] = no_op
        self.num_answered = self._num_restarts = 0
        self._health = Health()

    def prepare(self, slot_bytes: int) -> None:
        """Start what needs no event loop: workers load their tokenizers while the loop's modules are imported.

        Processes die with the calling thread.
        """
        self._memory, *_ = [transport.prepare(slot_bytes, self.num_parts) for transport in self._transports]

    async def run(self, job: Job) -> None:
        """Serve until cancelled; must run in the thread that called :meth:`prepare`.

        :raises WorkerError: if workers cannot be started, or die again and again without finishing a request.
        """
        assert self._memory, "prepare() has been called"
        self._reopening = anyio.Lock()  # here: a lock belongs to the loop that it is made in
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._backlog.run)
                for transport in self._transports:
                    await transport.begin(group, job)
                self._backlog.count(self._counts)
                self._group = group
                self._grow()
                if self._is_outdated:
                    group.start_soon(self._reopen)
        except BaseExceptionGroup as errors:
            error = _first_worker_error(errors)
            if isinstance(error, AsyncDataError):
                calls = [call for worker in self._workers.values() for call in worker.calls]
                self._backlog.end_all(calls, Failed(type(error).__name__, str(error)))
            raise error from None
        finally:
            self._workers, self._kept, self._group = {}, set(), None
            for transport in self._transports:
                transport.close()

    # The number of workers

    @property
    def num_workers(self) -> int:
        """How many requests may run at the same time."""
        return sum(lane.num_workers for lane in self._lanes if lane.max_workers)

    def set_num_workers(self, num_workers: int) -> None:
        """Grow the pool. It never shrinks."""
        left = max(self.num_workers, num_workers)
        for lane in self._lanes:
            if lane.max_workers:
                lane.num_workers = min(left, lane.max_workers)
                left -= lane.num_workers
        self._grow()
        self.changes()

    def _grow(self) -> None:
        """Start missing workers."""
        if self._group is None:
            return

        for lane in self._lanes:
            for number in sorted({*lane.numbers()} - self._kept):
                self._kept.add(number)
                self._group.start_soon(self._maintain, lane, number)

    def _dismiss_if_done(self, worker: Worker) -> None:
        if not worker.calls and worker.is_spent:
            worker.is_dismissed = True
            worker.conversation.cancel()

    def reopen(self) -> None:
        """Open the tokenize function again, and use that for later requests: its results are the same, and come sooner.

        No request waits for that or is repeated. If it cannot be opened again, the first one stays in use. Before the
        call of :meth:`run`, any thread may call this.
        """
        self._is_outdated = True
        if self._group is not None:
            self._group.start_soon(self._reopen)

    async def _reopen(self) -> None:
        async with self._reopening:
            for transport in self._transports:
                await transport.reopen(list(self._workers.values()), self._dismiss_if_done)

    # The life of a worker

    async def _maintain(self, lane: Lane, number: int) -> None:
        """Start worker ``number``, and start it again when it ends."""
        starts, rooms = new_patience(lane.max_starts), new_patience()
        while True:
            try:
                worker = await lane.start(number)
            except WorkerError as error:
                is_any_ready = any(worker.is_ready for worker in self._workers.values())
                await pause(self._health.wait_for_room(error, rooms, is_any_ready=is_any_ready))
                continue

            rooms.succeeded()
            await pause(await self._use(worker, starts))

    async def _use(self, worker: Worker, starts: Patience) -> float:
        """Use the worker until its end: seconds to wait before the next one starts."""
        number, wait_s = worker.number, 0.0
        self._workers[number] = worker
        try:
            lost = await self._communicate(worker)
            if worker.is_ready or lost is None:
                starts.succeeded()
            is_start = not worker.is_ready
            worker.is_ready = False  # a dead worker must not get new requests
            self._num_restarts += worker.is_spent and not worker.is_outdated
            lost = await worker.end(lost)
            if lost is not None:
                self._num_restarts += 1
                wait_s = self._health.wait_for_another(lost, starts if is_start else None, self.num_workers)
                self._recover(worker, lost)
        finally:
            worker.kill()
            worker.ended.set()
        del self._workers[number]
        return wait_s

    async def _communicate(self, worker: Worker) -> Lost | None:
        """Exchange messages with the worker until it is lost; None if it was dismissed."""
        lost = None
        async with anyio.create_task_group() as group:
            worker.conversation = group.cancel_scope
            for task in worker.tasks():
                group.start_soon(task)
            self._dismiss_if_done(worker)
            lost = await self._exchange(worker)
            group.cancel_scope.cancel()
        return lost

    async def _exchange(self, worker: Worker) -> Lost:
        try:
            await worker.begin(lambda: self._health.has_started)
            worker.is_ready = self._health.has_started = True
            self._dispatch()
            while await self._answer_until_late(worker):
                pass
        except (EOFError, OSError) as error:
            return Lost("AD423", str(error) if isinstance(error, EOFError) and error.args else "its worker died")

        return Lost("AD422", f"no result in {worker.row_timeout_s:g} s; its worker was killed")

    async def _answer_until_late(self, worker: Worker) -> bool:
        """Receive replies until the next check of the progress. Return whether the worker has made progress within
        the row timeout.
        """
        with anyio.CancelScope() as worker.patience:
            worker.look_later()
            while True:
                self._answer(worker, *await worker.receive())
        await worker.ask_progress()
        return worker.is_at_work()

    def _answer(self, worker: Worker, request_id: int, reply: Reply) -> None:
        call = worker.calls.popleft() if worker.calls else None
        if call is None or call.request_id != request_id:
            raise WorkerError(f"a worker answered request {request_id} out of turn")

        if isinstance(reply, Ready):
            raise WorkerError("a worker announced itself twice; it is out of step")

        if not isinstance(reply, Short):
            self._health.succeeded()
        self._dispatch()
        worker.be_patient()
        self._dismiss_if_done(worker)
        self._backlog.hand_over(call, reply)
        self.num_answered += 1
        self.changes()

    def _recover(self, worker: Worker, lost: Lost) -> None:
        """Put the lost worker's requests at the front of the queue, except one that has lost too many workers."""
        reason = f"{lost.reason} ({lost.how})" if lost.how else lost.reason
        crashed: list[tuple[Call, Crashed]] = []
        for call in reversed(worker.calls):
            is_culprit = call.request_id == lost.request_id
            call.num_losses += is_culprit and not lost.shortage
            is_row_known = is_culprit and lost.row >= 0 and lost.row == call.suspect
            if not call.is_wanted:
                self._backlog.drop(call)
            elif is_culprit and lost.shortage:
                self._backlog.hand_over(call, Short(lost.shortage, row=lost.row))
            elif is_row_known or (is_culprit and call.num_losses >= call.max_losses):
                crashed.append((call, Crashed(lost.code, reason, lost.row if is_row_known else None)))
            else:
                call.suspect = lost.row if is_culprit else call.suspect
                self._backlog.add_first(call)
        worker.calls.clear()
        for call, outcome in crashed:
            self._backlog.end(call, outcome)
        self._dispatch()
        self.changes()

    # Requests

    def memory(self, slot: int) -> memoryview:
        """The bytes of ``slot``. They are there between the call of :meth:`prepare` and the end of :meth:`run`."""
        if not self._memory:
            raise WorkerError("prepare() has not been called, or the workers have ended: there are no slots")

        return self._memory[slot]

    def submit(self, request: Request, max_losses: int = MAX_LOSSES) -> Call:
        """Queue a request; its reply comes once, unless :meth:`forget` comes first.

        If a worker is lost while it processes the request, another one gets it. The request is answered with
        :class:`Crashed` as soon as two workers in succession were lost at the same row, or ``max_losses`` in all.
        """
        call = self._backlog.submit(request, max_losses)
        self._dispatch()
        self.on_submit()
        return call

    def row_of(self, request_id: int) -> int:
        """The row of a request that a worker works on; 0 if none does, or on all at once. Any thread may ask."""
        return max(0, dict(worker.progress() for worker in self._workers.copy().values()).get(request_id, 0))

    def _dispatch(self) -> None:
        for lane in self._lanes:
            while ready := [worker for worker in self._workers.values() if self._has_room(worker, lane)]:
                call = self._backlog.take(lane.takes)
                if call is None:
                    break

                worker = min(ready, key=lambda worker: len(worker.calls))
                worker.calls.append(call)
                if len(worker.calls) == 1:
                    worker.be_patient()
                worker.send(call)

    def _has_room(self, worker: Worker, lane: Lane) -> bool:
        is_here = worker.is_ready and not worker.is_dismissed and not worker.is_spent
        return is_here and worker.number in lane.numbers() and len(worker.calls) < lane.max_requests

    def forget(self) -> None:
        """Drop the replies to all earlier requests. Those that a worker has started are finished first."""
        self._backlog.forget()
        for worker in self._workers.values():
            for call in worker.calls:
                call.is_wanted = False

    @property
    def num_wanted(self) -> int:
        """How many requests the workers that get work first could take now. Scans with samples do not count: they are
        one window's, and its rows need no more.
        """
        return _MAX_REQUESTS * self._lanes[0].num_workers - self._backlog.num_open

    def _counts(self, request: Request) -> bool:
        return self._lanes[0].takes(request) and not takes_samples(request)

    @property
    def is_busy(self) -> bool:
        """Whether a worker has a request. Any thread may ask."""
        return any(worker.calls for worker in self._workers.copy().values())

    def statistics(self) -> ExecutorStatistics:
        """What the workers are doing."""
        workers = [self._workers.get(number) for number in sorted(self._kept.copy())]
        states = [WorkerState(state="starting") if worker is None else worker.state() for worker in workers]
        return ExecutorStatistics(
            workers=states,
            num_queued=len(self._backlog),
            num_restarts=self._num_restarts + sum(transport.num_restarts for transport in self._transports),
            **self._transports[0].num_reads(),
        )


def _first_worker_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show to the user; the others are its consequences."""
    matching = errors.subgroup(WorkerError) or errors
    error: BaseException = matching
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
