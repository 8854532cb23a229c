"""Worker processes of our own: forked from a template, fed over socketpairs, replaced when they die or hang.

Nothing is forked from this process, pickled, or imported as ``__main__``. A request is sent again, whole, when its
worker is lost; when it has brought down two, it comes back as :class:`Crashed`, and the producer looks for the row that
is to blame.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import anyio

from asyncdata.errors import WorkerError
from asyncdata.executors.base import NUM_SLOTS, Crashed, ExecutorStatistics, Slots, first_worker_error
from asyncdata.executors.births import Births
from asyncdata.executors.first_scans import FirstScans
from asyncdata.executors.roster import Call, Worker, state_of
from asyncdata.executors.spawn import Spawner
from asyncdata.frames import frame
from asyncdata.log import get_logger
from asyncdata.wire import Failed, Ready, Scan, decode_reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.executors.base import OnReply
    from asyncdata.executors.early import EarlyTemplate
    from asyncdata.wire import Job, Reply, Request

__all__ = ("ProcessExecutor",)

_log = get_logger(__name__)
_WINDOW = 2
"""Requests a worker has at a time: one to work on, and one so that it need not wait for the next."""
_LOOKS = 4
"""In the time that a row may take: looked at once, a worker that hangs behind its first row would have it twice."""
_MAX_STARTS = 3
_MAX_WORKERS = 64


class _Lost(NamedTuple):
    """Why a worker is no more."""

    code: str
    reason: str


class ProcessExecutor:
    """A pool of worker processes.

    :param num_workers: processes to start with; each runs one request at a time.
    :param row_timeout_s: a worker that makes no progress for so long is hung, and is killed. Progress is a reply, or,
        where the tokenize function runs row by row, a row.
    :param max_workers: how many there can ever be; None for 64, or for ``num_workers`` where that is more.
    :param early: a template that was born before; its thread must be that of :meth:`prepare`.
    :param max_bytes_per_worker: one that takes more is replaced by another when it has answered what it was asked.
    """

    def __init__(
        self,
        num_workers: int,
        row_timeout_s: float = 60.0,
        max_workers: int | None = None,
        early: EarlyTemplate | None = None,
        max_bytes_per_worker: int | None = None,
    ) -> None:
        self._max_workers = max(num_workers, max_workers or _MAX_WORKERS)
        self.num_workers = num_workers
        self.slots = Slots(NUM_SLOTS)
        self._row_timeout_s = row_timeout_s
        self._max_bytes = max_bytes_per_worker
        self._spawner: Spawner | None = None
        self._early = early
        self._births: Births | None = None
        self._first_scans: FirstScans | None = None
        self._here: Call | None = None
        self._queue: deque[Call] = deque()
        self._workers: dict[int, Worker] = {}
        self._kept: set[int] = set()
        self._keep_one_more: Callable[[int], object] | None = None
        self._on_change: Callable[[], object] = bool
        self._next_id = 1
        self._num_restarts = 0
        self._num_lost_in_a_row = 0

    def prepare(self, slot_bytes: int) -> None:
        """As the protocol says. The calling thread must live as long as the workers shall: they die with it."""
        newborn = self._early.take() if self._early is not None else None
        with contextlib.ExitStack() as failing:
            if newborn is not None:
                failing.callback(newborn.end)
            alive = None if newborn is None else newborn.alive
            spawner = failing.enter_context(Spawner(self._max_workers, slot_bytes, NUM_SLOTS, alive))
            self._births = Births(spawner, newborn)
            failing.pop_all()
        self._spawner = spawner

    async def run(self, job: Job) -> None:
        """As the protocol says; in the thread that has called :meth:`prepare`."""
        if self._spawner is None or self._births is None:
            raise WorkerError("prepare() has not been called")

        births = self._births
        with self._spawner:
            try:
                async with anyio.create_task_group() as group:
                    births.begin(group, job)
                    self._first_scans = FirstScans(self._next_scan, self._scanned)
                    group.start_soon(self._first_scans.run, job, self.memory)
                    self._keep_one_more = lambda number: group.start_soon(self._keep, births, number)
                    self._grow_and_shrink()
            except BaseExceptionGroup as errors:
                error = first_worker_error(errors)
                self._give_up(str(error))
                raise error from None
            finally:
                self._workers, self._kept, self._keep_one_more = {}, set(), None
                births.close()

    def _give_up(self, reason: str) -> None:
        """Nothing is answered any more: whoever waits for what is under way must hear of it, and in its order."""
        calls = [call for worker in self._workers.values() for call in worker.calls]
        calls += [*([self._here] if self._here is not None else ()), *self._queue]
        self._queue.clear()
        for call in calls:
            self.slots.done(call.request.slot)
            if call.on_reply is not None:
                call.on_reply(Failed("WorkerError", reason))

    def set_num_workers(self, num_workers: int) -> None:
        """As the protocol says."""
        self.num_workers = max(1, min(num_workers, self._max_workers))
        self._grow_and_shrink()
        self._on_change()

    def _grow_and_shrink(self) -> None:
        """The workers with the highest numbers go."""
        if self._keep_one_more is None:
            return

        for number in sorted({*range(self.num_workers)} - self._kept):
            self._kept.add(number)
            self._keep_one_more(number)
        for worker in self._workers.values():
            self._dismiss_if_done(worker)
        self._dispatch()

    def _is_wanted(self, worker: Worker) -> bool:
        return worker.process.number < self.num_workers

    def _dismiss_if_done(self, worker: Worker) -> None:
        if not worker.calls and (worker.has_outgrown or not self._is_wanted(worker)):
            worker.is_dismissed = True  # should it be wanted again this moment, it is too late
            worker.conversation.cancel()

    async def _keep(self, births: Births, number: int) -> None:
        """Worker ``number``, again and again, for as long as it is wanted."""
        num_starts = 0
        while number < self.num_workers:
            worker = self._workers[number] = Worker(await births.bear(number), self._max_bytes)
            try:
                lost = await self._converse(worker)
                num_starts = 0 if worker.is_ready or lost is None else num_starts + 1
                worker.is_ready = False  # or what is submitted from here on could go to the dead
                self._num_restarts += worker.has_outgrown
                await self._reap(worker)
                if lost is not None:
                    self._check_health(worker, lost, num_starts)
                    self._recover(worker, lost)
            finally:
                worker.process.kill()
                worker.process.wait()
            del self._workers[number]
        self._kept.discard(number)

    async def _converse(self, worker: Worker) -> _Lost | None:
        """Talk to the worker until it is lost; None if it was no longer wanted, and had nothing to do."""
        lost = None
        async with anyio.create_task_group() as group:
            worker.conversation = group.cancel_scope
            group.start_soon(worker.process.pump_output)
            group.start_soon(worker.process.connection.send_rest)
            self._dismiss_if_done(worker)
            lost = await self._talk(worker)
            group.cancel_scope.cancel()
        return lost

    async def _talk(self, worker: Worker) -> _Lost:
        try:
            await worker.process.connection.send_first(worker.process.greeting)
            await self._await_ready(worker)
            while await self._answer_until_late(worker):
                pass
        except (EOFError, OSError):
            return _Lost("AD423", "its worker died")

        return _Lost("AD422", f"no result in {self._row_timeout_s:g} s; its worker was killed")

    async def _await_ready(self, worker: Worker) -> None:
        _, body = await worker.process.connection.receive()
        reply = decode_reply(body)
        if isinstance(reply, Failed):
            raise WorkerError(f"{reply.message}\n{reply.traceback}".rstrip())

        if not isinstance(reply, Ready):
            raise WorkerError(f"a worker began with {type(reply).__name__}; it is out of step")

        worker.look_at_memory()
        if worker.has_outgrown:
            raise WorkerError(
                f"AD426 a worker takes {worker.num_bytes} bytes before it has tokenized a row, and "
                f"max_bytes_per_worker is {self._max_bytes}: give it more"
            )

        worker.is_ready = True
        if self._first_scans is not None:
            self._first_scans.end()
        self._dispatch()

    async def _answer_until_late(self, worker: Worker) -> bool:
        """Receive replies until none comes for a while; whether the worker has done a row in the last
        ``row_timeout_s``.
        """
        with anyio.CancelScope() as worker.patience:
            self._look_later(worker)
            while True:
                request_id, body = await worker.process.connection.receive()
                self._answer(worker, request_id, body)
        progress = worker.process.progress()
        if progress != worker.seen_progress:
            self._be_patient(worker)
        else:
            worker.num_looks += 1
        return worker.num_looks < _LOOKS

    def _be_patient(self, worker: Worker) -> None:
        """Wait for the first of the worker's calls from now on, or for ever if it has none."""
        worker.busy_since = time.monotonic()
        worker.seen_progress = worker.process.progress() if worker.calls else (0, 0)
        worker.num_looks = 0
        self._look_later(worker)

    def _look_later(self, worker: Worker) -> None:
        look_s = self._row_timeout_s / _LOOKS
        worker.patience.deadline = anyio.current_time() + look_s if worker.calls else math.inf

    def _answer(self, worker: Worker, request_id: int, body: memoryview) -> None:
        call = worker.calls.popleft() if worker.calls else None
        if call is None or call.request_id != request_id:
            raise WorkerError(f"a worker answered request {request_id} out of turn")

        self._num_lost_in_a_row = 0
        self.slots.done(call.request.slot)
        worker.look_at_memory()
        self._dispatch()
        self._be_patient(worker)
        self._dismiss_if_done(worker)
        if call.on_reply is not None:
            reply = decode_reply(body)
            if isinstance(reply, Ready):
                raise WorkerError("a worker announced itself twice; it is out of step")

            call.on_reply(reply)
        self._on_change()

    async def _reap(self, worker: Worker) -> None:
        """Make sure that it is gone: until then it could write into a slot that others use again."""
        worker.process.kill()
        with anyio.CancelScope(shield=True):
            await worker.process.life.ended()
        await worker.process.life.ask_status()

    def _check_health(self, worker: Worker, lost: _Lost, num_starts: int) -> None:
        self._num_restarts += self._is_wanted(worker)
        self._num_lost_in_a_row += 1
        how = worker.process.how_it_ended()
        _log.warning("worker.lost", worker=worker.process.number, pid=worker.process.pid, reason=lost.reason, how=how)
        if num_starts >= _MAX_STARTS:
            raise WorkerError(f"AD426 a worker died {num_starts} times while starting ({how})\n{worker.process.output}")

        if self._num_lost_in_a_row > 10 + 3 * self.num_workers:
            raise WorkerError(
                f"AD426 {self._num_lost_in_a_row} workers died without finishing one request; the last {how}\n"
                f"{worker.process.output}"
            )

    def _recover(self, worker: Worker, lost: _Lost) -> None:
        """Queue the lost worker's requests again, in front, less those that have brought down a second one.

        A worker that went with its template, so that nobody saw how it ended, blames no request.
        """
        culprit, row = worker.process.progress()
        if lost.code == "AD423" and worker.process.life.status is None:
            culprit = 0
        worker.process.clear_progress()
        reason = f"{lost.reason} ({worker.process.how_it_ended()})"
        crashed: list[tuple[Call, Crashed]] = []
        for call in reversed(worker.calls):
            is_culprit = call.request_id == culprit
            call.strikes += is_culprit
            if call.on_reply is None:
                self.slots.done(call.request.slot)
            elif is_culprit and call.strikes >= 2:
                crashed.append((call, Crashed(lost.code, reason, row if row >= 0 and row == call.suspect else None)))
            else:
                call.suspect = row if is_culprit else call.suspect
                self._queue.appendleft(call)
        worker.calls.clear()
        for call, outcome in crashed:
            if call.on_reply is not None:
                call.on_reply(outcome)
            self.slots.done(call.request.slot)  # not before: its rows may just have been asked for again
        self._dispatch()
        self._on_change()

    def memory(self, slot: int) -> memoryview:
        """As the protocol says."""
        if self._spawner is None:
            raise WorkerError("prepare() has not been called")

        return self._spawner.memory(slot)

    def watch(self, on_change: Callable[[], object]) -> None:
        """As the protocol says."""
        self._on_change = self.slots.on_free = on_change

    def submit(self, request: Request, on_reply: OnReply, strikes: int = 0) -> None:
        """As the protocol says."""
        self.slots.use(request.slot)
        self._queue.append(Call(self._next_id, request, on_reply, strikes))
        self._next_id += 1
        if self._first_scans is not None:
            self._first_scans.wake()
        self._dispatch()

    def _next_scan(self) -> Scan | None:
        """One that is done here, as there is no worker yet."""
        scan = self._queue[0].request if self._queue else None
        if not isinstance(scan, Scan):
            return None

        self._here = self._queue.popleft()
        return scan

    def _scanned(self, reply: Reply) -> None:
        call, self._here = self._here, None
        if call is None:
            return

        self.slots.done(call.request.slot)
        if call.on_reply is not None:
            call.on_reply(reply)
        self._on_change()

    def _dispatch(self) -> None:
        while self._queue:
            ready = [worker for worker in self._workers.values() if self._has_room(worker)]
            if not ready:
                return

            worker = min(ready, key=lambda worker: len(worker.calls))
            self._send(worker, self._queue.popleft())

    def _has_room(self, worker: Worker) -> bool:
        is_here = worker.is_ready and not worker.is_dismissed and not worker.has_outgrown
        return is_here and self._is_wanted(worker) and len(worker.calls) < _WINDOW

    def _send(self, worker: Worker, call: Call) -> None:
        worker.calls.append(call)
        if len(worker.calls) == 1:
            self._be_patient(worker)
        with contextlib.suppress(OSError):  # it is gone: its own task will notice, and recover the call
            worker.process.connection.send(frame(call.request_id, call.request))

    def forget(self) -> None:
        """As the protocol says. What is being worked on is finished, and thrown away."""
        while self._queue:
            self.slots.done(self._queue.popleft().request.slot)
        for worker in self._workers.values():
            for call in worker.calls:
                call.on_reply = None
        if self._here is not None:
            self._here.on_reply = None

    @property
    def num_wanted(self) -> int:
        """As the protocol says."""
        num_calls = sum(len(worker.calls) for worker in self._workers.values() if self._is_wanted(worker))
        return _WINDOW * self.num_workers - num_calls - len(self._queue) - (self._here is not None)

    def statistics(self) -> ExecutorStatistics:
        """As the protocol says."""
        states = [state_of(self._workers.get(number)) for number in sorted(self._kept.copy())]
        num_restarts = self._num_restarts + (self._births.num_lost if self._births is not None else 0)
        return ExecutorStatistics(workers=states, num_queued=len(self._queue), num_restarts=num_restarts)
