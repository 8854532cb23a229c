"""Worker processes of our own: forked from a template, fed over socketpairs, replaced when they die or hang.

Nothing is forked from this process, pickled, or imported as ``__main__``. A request is sent again, whole, when its
worker is lost; when it has brought down two, it comes back as :class:`Crashed`, and the producer looks for the row that
is to blame.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import anyio

from asyncdata.core.errors import WorkerError
from asyncdata.core.framing import frame
from asyncdata.core.log import get_logger
from asyncdata.core.messages import Failed, Ready, Short, decode_reply
from asyncdata.workers.base import NUM_SLOTS, Crashed, ExecutorStatistics
from asyncdata.workers.pool.backlog import Backlog
from asyncdata.workers.pool.deadlines import given_up, pause
from asyncdata.workers.pool.first_window import FirstScans
from asyncdata.workers.pool.lost_workers import Health, Lost, first_worker_error, new_patience, ran_short
from asyncdata.workers.pool.shared_resources import Spawner
from asyncdata.workers.pool.spawning import Births
from asyncdata.workers.pool.worker_state import Call, Worker, state_of
from asyncdata.workers.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.messages import Job, Reply, Request
    from asyncdata.workers.base import OnReply
    from asyncdata.workers.pool.deadlines import Patience
    from asyncdata.workers.pool.early_start import EarlyTemplate

__all__ = ("ProcessExecutor",)

_log = get_logger(__name__)
_WINDOW = 2
"""Requests a worker has at a time: one to work on, and one so that it need not wait for the next."""
_MAX_WORKERS = 64


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
        self._backlog = Backlog(self.slots, self._dispatch)
        self._workers: dict[int, Worker] = {}
        self._kept: set[int] = set()
        self._keep_one_more: Callable[[int], object] | None = None
        self._on_change: Callable[[], object] = bool
        self._next_id = 1
        self._num_restarts = 0
        self._health = Health()

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
                    group.start_soon(self._backlog.run)
                    self._first_scans = FirstScans(self._backlog, self._settle)
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
        calls += [*([self._here] if self._here is not None else ()), *self._backlog.take_all()]
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
        if not worker.calls and (worker.is_spent or not self._is_wanted(worker)):
            worker.is_dismissed = True  # should it be wanted again this moment, it is too late
            worker.conversation.cancel()

    async def _keep(self, births: Births, number: int) -> None:
        """Worker ``number``, again and again, for as long as it is wanted."""
        starts, rooms = new_patience(), new_patience()
        while number < self.num_workers:
            try:
                process = await births.bear(number)
            except WorkerError as error:
                is_anyone_ready = any(worker.is_ready for worker in self._workers.values())
                await pause(self._health.wait_for_room(error, rooms, is_anyone_ready=is_anyone_ready))
                continue

            rooms.succeeded()
            await pause(await self._employ(Worker(process, self._max_bytes, self._row_timeout_s), starts))
        self._kept.discard(number)

    async def _employ(self, worker: Worker, starts: Patience) -> float:
        """From its birth to its end; how long to wait before there is another."""
        number, wait_s = worker.process.number, 0.0
        self._workers[number] = worker
        try:
            lost = await self._converse(worker)
            if worker.is_ready or lost is None:
                starts.succeeded()
            is_start = not worker.is_ready
            worker.is_ready = False  # or what is submitted from here on could go to the dead
            self._num_restarts += worker.is_spent
            await self._reap(worker)
            if lost is not None:
                self._num_restarts += self._is_wanted(worker)
                failed = starts if is_start else None
                wait_s = self._health.wait_for_another(worker.process, lost, failed, self.num_workers)
                self._recover(worker, lost)
        finally:
            worker.process.kill()
            worker.process.wait()
        del self._workers[number]
        return wait_s

    async def _converse(self, worker: Worker) -> Lost | None:
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

    async def _talk(self, worker: Worker) -> Lost:
        try:
            await worker.process.connection.send_first(worker.process.greeting)
            await self._await_ready(worker)
            while await self._answer_until_late(worker):
                pass
        except (EOFError, OSError):
            return Lost("AD423", "its worker died")

        return Lost("AD422", f"no result in {self._row_timeout_s:g} s; its worker was killed")

    async def _await_ready(self, worker: Worker) -> None:
        _, body = await worker.process.connection.receive()
        reply = decode_reply(body)
        if isinstance(reply, Short) and self._health.has_started:
            raise EOFError  # it ends, and another is tried

        if isinstance(reply, Failed | Short):
            message = reply.message if isinstance(reply, Failed) else reply.reason
            raise WorkerError(f"{message}\n{reply.traceback}".rstrip())

        if not isinstance(reply, Ready):
            raise WorkerError(f"a worker began with {type(reply).__name__}; it is out of step")

        worker.look_at_memory()
        if worker.has_outgrown:
            raise WorkerError(
                f"AD426 a worker takes {worker.num_bytes} bytes before it has tokenized a row, and "
                f"max_bytes_per_worker is {self._max_bytes}: give it more"
            )

        worker.is_ready = self._health.has_started = True
        if self._first_scans is not None:
            self._first_scans.end()
        self._dispatch()

    async def _answer_until_late(self, worker: Worker) -> bool:
        """Receive replies until none comes for a while; whether the worker has done a row in the last
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
            self.slots.done(call.request.slot)
        self._dispatch()
        worker.be_patient()
        self._dismiss_if_done(worker)
        self._hand_over(call, reply)

    def _settle(self, call: Call, reply: Reply) -> None:
        """A scan that was done in this process."""
        if not isinstance(reply, Short):
            self.slots.done(call.request.slot)
        self._hand_over(call, reply)

    def _hand_over(self, call: Call, reply: Reply) -> None:
        """To who has asked; or ask again, where the system was short of something: another worker may do better."""
        if isinstance(reply, Short):
            self._try_again(call, reply)
        elif call.on_reply is not None:
            call.on_reply(reply)
        self._on_change()

    def _try_again(self, call: Call, short: Short) -> None:
        wait_s = call.shortages.failed(may_pass=True) if call.on_reply is not None else None
        if wait_s is not None:
            self._backlog.add_later(call, wait_s)
            return

        self.slots.done(call.request.slot)
        if call.on_reply is not None:
            call.on_reply(given_up(short, call.shortages.num_failures))

    async def _reap(self, worker: Worker) -> None:
        """Make sure that it is gone: until then it could write into a slot that others use again."""
        worker.process.kill()
        with anyio.CancelScope(shield=True):
            await worker.process.life.ended()
        await worker.process.life.ask_status()

    def _recover(self, worker: Worker, lost: Lost) -> None:
        """Queue the lost worker's requests again, in front, less those that have brought down a second one.

        A worker that went with its template, so that nobody saw how it ended, blames no request.
        """
        culprit, row = worker.process.progress()
        want = ran_short(worker.process)
        if lost.code == "AD423" and worker.process.life.status is None:
            culprit = 0
        worker.process.clear_progress()
        reason = f"{lost.reason} ({worker.process.how_it_ended()})"
        crashed: list[tuple[Call, Crashed]] = []
        for call in reversed(worker.calls):
            is_culprit = call.request_id == culprit
            call.strikes += is_culprit and not want
            if call.on_reply is None:
                self.slots.done(call.request.slot)
            elif is_culprit and want:
                self._try_again(call, Short(want, row=row))
            elif is_culprit and call.strikes >= 2:
                crashed.append((call, Crashed(lost.code, reason, row if row >= 0 and row == call.suspect else None)))
            else:
                call.suspect = row if is_culprit else call.suspect
                self._backlog.add_first(call)
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
        self._backlog.add(Call(self._next_id, request, on_reply, strikes))
        self._next_id += 1
        if self._first_scans is not None:
            self._first_scans.wake()
        self._dispatch()

    @property
    def _here(self) -> Call | None:
        """A scan that is done in this process."""
        return self._first_scans.here if self._first_scans is not None else None

    def _dispatch(self) -> None:
        while self._backlog.has_next:
            ready = [worker for worker in self._workers.values() if self._has_room(worker)]
            if not ready:
                return

            worker = min(ready, key=lambda worker: len(worker.calls))
            self._send(worker, self._backlog.take())

    def _has_room(self, worker: Worker) -> bool:
        is_here = worker.is_ready and not worker.is_dismissed and not worker.is_spent
        return is_here and self._is_wanted(worker) and len(worker.calls) < _WINDOW

    def _send(self, worker: Worker, call: Call) -> None:
        worker.calls.append(call)
        if len(worker.calls) == 1:
            worker.be_patient()
        with contextlib.suppress(OSError):  # it is gone: its own task will notice, and recover the call
            worker.process.connection.send(frame(call.request_id, call.request))

    def forget(self) -> None:
        """As the protocol says. What is being worked on is finished, and thrown away."""
        self._backlog.forget()
        for worker in self._workers.values():
            for call in worker.calls:
                call.on_reply = None
        if self._here is not None:
            self._here.on_reply = None

    @property
    def num_wanted(self) -> int:
        """As the protocol says."""
        num_calls = sum(len(worker.calls) for worker in self._workers.values() if self._is_wanted(worker))
        return _WINDOW * self.num_workers - num_calls - len(self._backlog) - (self._here is not None)

    def statistics(self) -> ExecutorStatistics:
        """As the protocol says."""
        states = [state_of(self._workers.get(number)) for number in sorted(self._kept.copy())]
        num_restarts = self._num_restarts + (self._births.num_lost if self._births is not None else 0)
        return ExecutorStatistics(workers=states, num_queued=len(self._backlog), num_restarts=num_restarts)
