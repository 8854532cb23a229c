"""The executor of a Ray cluster: worker processes of this machine, if any, and actors for what they do not get done.

One request is one call of an actor, and its answer is copied out of the object store as soon as it is there. Two
requests are under way to each actor, so that it never waits for the next one. An actor that is lost, with its node or
alone, is replaced, and its requests are sent again, as those of a worker process are: ``workers.pool.process_pool``.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from asyncdata.core.callbacks import no_op
from asyncdata.core.errors import WorkerError
from asyncdata.core.event_loop import call_soon_in_this_loop
from asyncdata.core.log import get_logger
from asyncdata.core.messages import decode_reply, encode
from asyncdata.workers.base import MAX_LOSSES, NUM_SLOTS, Crashed, ExecutorStatistics
from asyncdata.workers.pool.calls import Backlog, Call
from asyncdata.workers.pool.deadlines import Patience, pause
from asyncdata.workers.pool.lost_workers import Lost, first_worker_error
from asyncdata.workers.pool.worker import state_of
from asyncdata.workers.ray.by_bytes import in_slot, takes_samples, to_send
from asyncdata.workers.ray.cluster import connect, is_lost, new_actors
from asyncdata.workers.ray.health import run_until_lost
from asyncdata.workers.ray.node_proof import terms_of
from asyncdata.workers.ray.remote_worker import Actor, RemoteWorkerState, answer_of
from asyncdata.workers.ray.starting import begin, first_line
from asyncdata.workers.slots import Slots, anonymous_memory

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from asyncdata.core.messages import Job, Reply, Request
    from asyncdata.workers.base import OnReply
    from asyncdata.workers.pool.process_pool import ProcessExecutor
    from asyncdata.workers.ray.settings import RayExecutor

__all__ = ("ClusterExecutor",)

_log = get_logger(__name__)
_MAX_REQUESTS = 2
_MAX_LOST, _MAX_LOST_OF_EACH, _PATIENCE_S = 11, 3, 30.0
"""Actors that may be lost in succession without an answer: a base, an addend for each, and for how long at least."""
_LOOKS = 4


class ClusterExecutor:
    """See :class:`~asyncdata.workers.base.Executor`.

    :param local: worker processes of this machine, which get work first; None: there are none.
    :param row_timeout_s: an actor that makes no progress for so many seconds counts as hung, and is killed.
    :ivar num_bytes_in: bytes of answers that came into this process; ``num_bytes_out`` of requests.
    :raises ConfigError: if there is no cluster.
    """

    answers_with_samples = True

    def __init__(
        self,
        settings: RayExecutor,
        *,
        row_timeout_s: float = 60.0,
        local: ProcessExecutor | None = None,
        num_parts: int = 1,
    ) -> None:
        connect(settings)
        self._make = new_actors(settings)
        self._settings, self._row_timeout_s, self._local = settings, row_timeout_s, local
        self._num_local = local.num_workers if local is not None else 0
        self._num_remote = 0 if local is not None else settings.num_workers
        self.slots = Slots(NUM_SLOTS * num_parts, lambda: self._on_change()) if local is None else local.slots
        self._memory: list[memoryview] = []
        self._backlog = Backlog(self.slots, self._dispatch)
        self._workers: dict[int, RemoteWorkerState] = {}
        self._kept: set[int] = set()
        self._num_restarts = self._num_local_scans = 0
        self._losses = Patience(_MAX_LOST, _PATIENCE_S)
        self._on_change: Callable[[], object] = no_op
        self._call_soon: Any = no_op
        self._start_one_more: Callable[[int], object] | None = None
        self._start_reopening: Callable[[], object] = no_op
        self._is_outdated = self._has_started = False
        self._answers: deque[tuple[RemoteWorkerState, Call, Future[Any]]] = deque()
        self._wake: anyio.Event | None = None
        self.num_bytes_in = self.num_bytes_out = 0
        if local is not None:
            local.watch(self._local_changed)

    @property
    def num_workers(self) -> int:
        """As the protocol says: worker processes and actors."""
        return self._num_local + self._num_remote

    def prepare(self, slot_bytes: int) -> None:
        """As the protocol says."""
        if self._local is not None:
            self._local.prepare(slot_bytes)
        else:
            self._memory = [anonymous_memory(slot_bytes) for _ in range(self.slots.number)]

    async def run(self, job: Job) -> None:
        """As the protocol says."""
        self._call_soon = call_soon_in_this_loop()
        terms = encode(await anyio.to_thread.run_sync(terms_of, job))
        try:
            async with anyio.create_task_group() as group:
                if self._local is not None:
                    group.start_soon(self._local.run, job)
                group.start_soon(self._backlog.run)
                group.start_soon(self._take_answers)
                group.start_soon(run_until_lost)
                self._start_one_more = lambda number: group.start_soon(self._maintain, terms, job, number)
                self._start_reopening = lambda: group.start_soon(self._reopen)
                self._grow_and_shrink()
                if self._is_outdated:
                    self._start_reopening()
        except BaseExceptionGroup as found:
            error = first_worker_error(found)
            self._give_up(str(error))
            raise error from None
        finally:
            self._start_one_more, self._start_reopening = None, no_op
            for worker in self._workers.values():
                worker.process.kill()
            self._workers, self._kept = {}, set()

    def _give_up(self, reason: str) -> None:
        calls = [call for worker in self._workers.values() for call in worker.calls]
        for worker in self._workers.values():
            worker.calls.clear()
        self._backlog.end_all(calls, reason)

    # Actors

    def set_num_workers(self, num_workers: int) -> None:
        """As the protocol says: processes of this machine first, actors for the rest."""
        most = self._settings.num_workers
        if self._local is None:
            self._num_remote = max(1, min(num_workers, most))
        else:
            self._num_local = max(1, min(num_workers, self._settings.local_workers))
            self._local.set_num_workers(self._num_local)
            self._num_remote = max(0, min(num_workers - self._num_local, most))
        self._grow_and_shrink()
        self._on_change()

    def _grow_and_shrink(self) -> None:
        if self._start_one_more is None:
            return

        for number in sorted({*range(self._num_remote)} - self._kept):
            self._kept.add(number)
            self._start_one_more(number)
        for worker in self._workers.values():
            self._dismiss_if_done(worker)
        self._dispatch()

    def _dismiss_if_done(self, worker: RemoteWorkerState) -> None:
        if not worker.calls and worker.process.number >= self._num_remote:
            worker.end()

    async def _maintain(self, terms: bytes, job: Job, number: int) -> None:
        """Start actor ``number``, and another one when it is lost, as long as it is wanted."""
        while number < self._num_remote:
            worker = RemoteWorkerState(Actor(number, self._make(terms)), self._row_timeout_s)
            self._workers[number] = worker
            try:
                await self._use(worker, job)
            finally:
                worker.process.kill()
            del self._workers[number]
            if worker.lost is not None:
                self._num_restarts += 1
                self._recover(worker, worker.lost)
                await pause(self._wait_for_another(worker.lost))
        self._kept.discard(number)

    async def _use(self, worker: RemoteWorkerState, job: Job) -> None:
        """Use the actor until it is lost, or dismissed."""
        if not await begin(worker, job, self._settings, self._call_soon, has_started=self._has_started):
            return

        worker.is_ready = self._has_started = True
        self._dismiss_if_done(worker)
        self._dispatch()
        self._on_change()
        while not worker.over.is_set():
            with anyio.CancelScope() as worker.patience:
                worker.look_later()
                await worker.over.wait()
            if worker.over.is_set() or not worker.calls:
                continue

            await worker.process.ask_progress(self._call_soon, self._row_timeout_s / _LOOKS)
            if not worker.is_at_work():
                worker.end(Lost("AD422", f"no result in {self._row_timeout_s:g} s; its worker was killed"))

    def _wait_for_another(self, lost: Lost) -> float:
        self._losses.max_failures = _MAX_LOST + _MAX_LOST_OF_EACH * self.num_workers
        wait_s = self._losses.failed(may_pass=True)
        if wait_s is None:
            number = self._losses.num_failures
            raise WorkerError(f"AD426 {number} actors were lost without finishing one request; the last: {lost.reason}")

        return wait_s

    def _recover(self, worker: RemoteWorkerState, lost: Lost) -> None:
        """Send the lost actor's requests again, except one that has lost too many. It worked on the first of them."""
        _log.warning("ray.worker_lost", worker=worker.process.number, reason=lost.reason)
        calls, crashed = list(worker.calls), list[Call]()
        worker.calls.clear()
        for call in reversed(calls):
            is_culprit = worker.is_ready and call is calls[0]
            call.num_losses += is_culprit
            if call.on_reply is None:
                self.slots.done(call.request.slot)
            elif is_culprit and call.num_losses >= call.max_losses:
                crashed.append(call)
            else:
                self._backlog.add_first(call)
        for call in crashed:
            self._backlog.end(call, Crashed(lost.code, lost.reason))
        self._dispatch()
        self._on_change()

    # Requests

    def memory(self, slot: int) -> memoryview:
        """As the protocol says."""
        return self._local.memory(slot) if self._local is not None else self._memory[slot]

    def watch(self, on_change: Callable[[], object]) -> None:
        """As the protocol says."""
        self._on_change = on_change

    def _local_changed(self) -> None:
        self._dispatch()
        self._on_change()

    def submit(self, request: Request, on_reply: OnReply, max_losses: int = MAX_LOSSES) -> None:
        """As the protocol says. What refers to a slot goes to a process that shares it, if there is one."""
        if self._local is not None and not takes_samples(request):
            self._local.submit(request, on_reply, max_losses)
            return

        self._backlog.submit(request, on_reply, max_losses)
        self._dispatch()

    def _dispatch(self) -> None:
        while (send := self._sender()) is not None and (call := self._backlog.take(is_reader=False)) is not None:
            send(call)

    def _sender(self) -> Callable[[Call], object] | None:
        """Sends a request to a worker that has room for it; None if there is none."""
        if self._local is not None and self._local.num_wanted > 0:
            return partial(self._send_to_process, self._local)

        ready = [worker for worker in self._workers.values() if self._has_room(worker)]
        return partial(self._send, min(ready, key=lambda worker: len(worker.calls))) if ready else None

    def _has_room(self, worker: RemoteWorkerState) -> bool:
        is_here = worker.is_ready and not worker.is_dismissed and worker.process.number < self._num_remote
        return is_here and len(worker.calls) < _MAX_REQUESTS

    def _send_to_process(self, local: ProcessExecutor, call: Call) -> None:
        assert call.on_reply is not None
        self._num_local_scans += 1
        local.submit(call.request, partial(self._processed, call.on_reply), call.max_losses)
        self.slots.done(call.request.slot)  # the process uses it now

    def _processed(self, on_reply: OnReply, reply: Reply | Crashed) -> None:
        self._num_local_scans -= 1
        on_reply(reply)

    def _send(self, worker: RemoteWorkerState, call: Call) -> None:
        worker.calls.append(call)
        if len(worker.calls) == 1:
            worker.be_patient()
        request, text = to_send(call.request, self.memory)
        data = encode(request)
        self.num_bytes_out += len(data) + len(text)
        future = worker.process.handle.answer.remote(call.request_id, data, text).future()
        future.add_done_callback(partial(self._arrived, worker, call))

    def _arrived(self, worker: RemoteWorkerState, call: Call, future: Future[Any]) -> None:
        """An answer is there. Called in a thread of Ray."""
        self._answers.append((worker, call, future))
        self._call_soon(self._wake_up)

    def _wake_up(self) -> None:
        if self._wake is not None:
            self._wake.set()

    async def _take_answers(self) -> None:
        while True:
            self._wake = anyio.Event()
            while self._answers:
                self._answered(*self._answers.popleft())
            await self._wake.wait()

    def _answered(self, worker: RemoteWorkerState, call: Call, future: Future[Any]) -> None:
        if call not in worker.calls or worker.lost is not None:  # it was lost: the request is with another one
            return

        error = future.exception()
        if error is not None:
            if not is_lost(error):
                raise WorkerError(f"an actor failed with {error!r}; please report this") from error

            worker.end(Lost("AD423", f"its worker died: {first_line(error)}"))
            return

        data, text = (memoryview(found).cast("B") for found in future.result())
        self.num_bytes_in += len(data) + len(text)
        reply = in_slot(call.request, decode_reply(bytes(data)), text, self.memory)
        worker.calls.remove(call)
        worker.be_patient()
        self._losses.succeeded()
        self._dispatch()
        self._dismiss_if_done(worker)
        self._backlog.hand_over(call, reply)
        self._on_change()

    def forget(self) -> None:
        """As the protocol says."""
        self._backlog.forget()
        for worker in self._workers.values():
            for call in worker.calls:
                call.on_reply = None
        if self._local is not None:
            self._local.forget()
            self._num_local_scans = 0

    def reopen(self) -> None:
        """As the protocol says. An actor does it between two requests."""
        if self._local is not None:
            self._local.reopen()
        self._is_outdated = True
        self._start_reopening()

    async def _reopen(self) -> None:
        ready = [worker for worker in self._workers.values() if worker.is_ready and worker.lost is None]
        refs = [worker.process.handle.reopen.remote() for worker in ready]
        for ref in refs:
            future = await answer_of(ref, self._call_soon)
            reason = "it was lost" if future.exception() is not None else future.result()
            if reason:
                _log.warning("workers.not_reopened", reason=reason)
            else:
                _log.info("workers.reopened", num_workers=1)

    @property
    def num_wanted(self) -> int:
        """As the protocol says. Scans with samples do not count: they are one window's, and its rows need no more."""
        if self._local is not None:
            return self._local.num_wanted + self._num_local_scans

        calls = [call for worker in self._workers.values() for call in worker.calls]
        num_scans = sum(takes_samples(call.request) for call in calls) + self._backlog.count(takes_samples)
        return _MAX_REQUESTS * self.num_workers - len(calls) - len(self._backlog) + num_scans

    @property
    def is_busy(self) -> bool:
        """As the protocol says."""
        is_busy = any(worker.calls for worker in self._workers.copy().values())
        return is_busy or (self._local is not None and self._local.is_busy)

    def statistics(self) -> ExecutorStatistics:
        """As the protocol says: the processes, and then the actors."""
        states = [state_of(self._workers.get(number)) for number in sorted(self._kept.copy())]
        found = ExecutorStatistics(workers=states, num_queued=len(self._backlog), num_restarts=self._num_restarts)
        if self._local is None:
            return found

        here = self._local.statistics()
        return ExecutorStatistics(
            workers=here.workers + found.workers,
            num_queued=here.num_queued + found.num_queued,
            num_restarts=here.num_restarts + found.num_restarts,
        )
