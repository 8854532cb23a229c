"""The executor of a Ray cluster: worker processes of this machine, if any, and actors for what they do not get done.

One request is one call of an actor, and its answer is copied out of the object store as soon as it is there. Two
requests are under way to each actor, so that it never waits for the next one. An actor that is lost, with its node or
alone, is replaced, and its requests are sent again, as a worker process's are.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import msgspec

from asyncdata.core.errors import SourceError, WorkerError
from asyncdata.core.log import get_logger
from asyncdata.core.messages import Job, Ready, Reply, Short, decode_reply, encode
from asyncdata.core.settings import prepared
from asyncdata.core.threads import call_soon_in_this_loop
from asyncdata.workers.base import error_of, takes_samples
from asyncdata.workers.pool.pool import Lane, Pool, Transport
from asyncdata.workers.pool.worker import Call, Lost, Worker
from asyncdata.workers.ray.actor import Began, difference, in_slot, node_name, terms_of, to_send
from asyncdata.workers.ray.cluster import WATCH, connect, is_lost, kill, new_actors, room_for, run_until_lost
from asyncdata.workers.slots import anonymous_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from anyio.abc import TaskGroup

    from asyncdata.workers.pool.process_pool import Processes
    from asyncdata.workers.ray.settings import RayExecutor

_log = get_logger(__name__)
_FIRST_LOOK_S, _FULL_S, _SLOW_START_S = 2.0, 4.0, 30.0


class _ActorWorker(Worker):
    """An actor, from the trainer's side.

    :param handle: the actor.
    :param actors: what it has in common with the others.
    """

    def __init__(self, number: int, handle: Any, actors: _Actors) -> None:
        super().__init__(number, actors.row_timeout_s)
        self.handle = handle
        self._actors = actors
        self._seen = (0, -1)
        self._sent: deque[tuple[Call, Future[Any]]] = deque()
        self._has_sent = anyio.Event()

    async def begin(self, has_started: Callable[[], bool]) -> None:
        """Wait until its node has proven that it has what is needed, and its tokenize function is open.

        :raises AsyncDataError: naming the node, and what it lacks.
        """
        future = await self._started()
        error = future.exception()
        if error is not None:
            if not is_lost(error) or "ModuleNotFoundError" in str(error):
                raise _not_startable(error)

            raise EOFError(f"its actor could not start: {_first_line(error)}") from error

        found = msgspec.msgpack.decode(future.result(), type=prepared(Began))
        if isinstance(found.ready, Ready):
            await self._actors.check_files(found)
            return

        if has_started() and (isinstance(found.ready, Short) or found.ready.kind == "WorkerError"):
            raise EOFError(found.ready.reason if isinstance(found.ready, Short) else found.ready.message)

        raise error_of(found.ready)

    async def _started(self) -> Future[Any]:
        """The answer to ``begin``. While it has no process, the first of those tells for all what they lack."""
        has_process, waited_s, pause_s = self._progress(), 0.0, _FIRST_LOOK_S
        begun, waiting = self.handle.begin.remote().future(), self._actors.waiting
        waiting[self.number] = self
        try:
            while not has_process.done():
                with anyio.move_on_after(pause_s):
                    await self._actors.finished(has_process)
                    break

                waited_s += pause_s
                pause_s = waited_s
                if self is next(iter(waiting.values())):
                    await self._actors.tell_what_lacks(waited_s)
        finally:
            del waiting[self.number]
            self.lacks = ""
        return await self._actors.finished(begun)

    def _progress(self) -> Future[Any]:
        found: Future[Any] = self.handle.progress.options(concurrency_group=WATCH).remote().future()
        return found

    def send(self, call: Call) -> None:
        request, text = to_send(call.request, self._actors.memory)
        data = encode(request)
        self._actors.num_bytes_out += len(data) + len(text)
        self._sent.append((call, self.handle.answer.remote(call.request_id, data, text).future()))
        self._has_sent.set()

    async def receive(self) -> tuple[int, Reply]:
        while not self._sent:
            self._has_sent = anyio.Event()
            await self._has_sent.wait()
        call, future = self._sent[0]
        await self._actors.finished(future)
        self._sent.popleft()
        error = future.exception()
        if error is not None:
            if not is_lost(error):
                raise WorkerError(f"an actor failed with {error!r}; please report this") from error

            raise EOFError(f"its worker died: {_first_line(error)}") from error

        data, text = (memoryview(found).cast("B") for found in future.result())
        self._actors.num_bytes_in += len(data) + len(text)
        return call.request_id, in_slot(call.request, decode_reply(bytes(data)), text, self._actors.memory)

    def progress(self) -> tuple[int, int]:
        """The progress when the actor was last asked."""
        return self._seen

    async def ask_progress(self) -> None:
        """Ask for the progress. It may not answer, if a library that it has called holds the interpreter."""
        with anyio.move_on_after(self.look_s):
            try:
                self._seen = tuple((await self._actors.finished(self._progress())).result())
            except Exception:  # it is lost: the answers to its requests say so as well
                return

    async def end(self, lost: Lost | None) -> Lost | None:
        """Kill the actor, which worked on the first of its requests."""
        self.kill()
        if lost is None:
            return None

        _log.warning("ray.worker_lost", worker=self.number, reason=lost.reason)
        return lost._replace(request_id=self.calls[0].request_id if self.calls else 0)

    def kill(self) -> None:
        kill(self.handle)


class _Actors(Transport):
    """The actors; see :class:`~asyncdata.workers.pool.pool.Transport`.

    :param first: the first of their numbers.
    :ivar lane: all of them.
    :ivar num_bytes_in: bytes of answers that came into this process; ``num_bytes_out`` of requests.
    :ivar memory: the bytes of a slot.
    :ivar waiting: those that have no process yet, by number.
    :raises ConfigError: if there is no cluster.
    """

    def __init__(self, settings: RayExecutor, row_timeout_s: float, num_actors: int, first: int) -> None:
        connect(settings)
        self._make = new_actors(settings)
        self.settings, self.row_timeout_s = settings, row_timeout_s
        self.lane = Lane(self._start, first, num_actors, settings.num_workers, max_starts=math.inf)
        self.lanes = [self.lane]
        self.num_bytes_in = self.num_bytes_out = 0
        self.memory: Callable[[int], memoryview]
        self.waiting: dict[int, _ActorWorker] = {}
        self._job: Job
        self._terms = b""
        self._call_soon: Any = None

    def prepare(self, slot_bytes: int, num_parts: int) -> Sequence[memoryview]:
        return anonymous_slots(slot_bytes, num_parts)

    async def begin(self, group: TaskGroup, job: Job) -> None:
        self._call_soon = call_soon_in_this_loop()
        self._job, self._terms = job, encode(await anyio.to_thread.run_sync(terms_of, job))
        group.start_soon(run_until_lost)

    async def _start(self, number: int) -> Worker:
        return _ActorWorker(number, self._make(self._terms), self)

    async def finished(self, future: Future[Any]) -> Future[Any]:
        """The future of an object that Ray makes, when it is there. No thread waits for it."""
        done = anyio.Event()
        future.add_done_callback(lambda _: self._call_soon(done.set))
        await done.wait()
        return future

    async def tell_what_lacks(self, waited_s: float) -> None:
        """Note what those lack that wait. Log it after 4 s if the cluster has no room, else after half a minute."""
        number, total = len(self.waiting), self.lane.num_workers
        room = await anyio.to_thread.run_sync(room_for, self.settings, total, number, abandon_on_cancel=True)
        for worker in self.waiting.values():
            worker.lacks = room.text
        if waited_s >= (_FULL_S if room.is_full else _SLOW_START_S):
            _log.warning("ray.worker_waits", num_waiting=number, waited_s=waited_s, reason=room.text)

    async def check_files(self, found: Began) -> None:
        """Raise what a node sees otherwise, unless the file has changed here, too: then its readers report that."""
        jobs = self._job.parts or [self._job]
        for part, number, reason in found.faults:
            here = await anyio.to_thread.run_sync(difference, jobs[part].files[number], node_name())
            if not here:
                raise SourceError(reason)

    async def reopen(self, workers: list[Worker], dismiss: Callable[[Worker], object]) -> None:
        """Open the functions again. An actor does it between two requests, one that is starting when it has started."""
        actors = [worker for worker in workers if isinstance(worker, _ActorWorker)]
        for future in [actor.handle.reopen.remote().future() for actor in actors]:
            await self.finished(future)
            reason = "it was lost" if future.exception() is not None else future.result()
            if reason:
                _log.warning("workers.not_reopened", reason=reason)
            else:
                _log.info("workers.reopened", num_workers=1)


class ClusterExecutor(Pool):
    """A pool of actors, and of worker processes of this machine, which get work first.

    :param local: the worker processes; None: there are none.
    :param row_timeout_s: an actor that makes no progress for so many seconds counts as hung, and is killed.
    :raises ConfigError: if there is no cluster.
    """

    answers_with_samples = True

    def __init__(
        self,
        settings: RayExecutor,
        *,
        row_timeout_s: float = 60.0,
        local: Processes | None = None,
        num_parts: int = 1,
    ) -> None:
        if local is None:
            self.actors = _Actors(settings, row_timeout_s, settings.num_workers, 0)
        else:
            self.actors = _Actors(settings, row_timeout_s, 0, local.lanes[-1].first + 1)
            self.actors.lane.takes = takes_samples  # the rest refers to slots, which the processes share
        super().__init__([self.actors] if local is None else [local, self.actors], num_parts)
        self.actors.memory = self.memory


def _first_line(error: BaseException) -> str:
    """What an error of Ray says first; the rest is for those who know Ray."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else repr(error)


def _not_startable(error: BaseException) -> WorkerError:
    """An actor cannot start at all: without the package, or in an environment that cannot be made."""
    why = [line.strip() for line in str(error).splitlines() if "Error" in line] or [_first_line(error)]
    way_out = (
        "asyncdata must be installed on every node in the version of the trainer, or be sent along: "
        "ray.init(runtime_env={...})"
        if "ModuleNotFoundError" in str(error)
        else "look at what RayExecutor(...) asks for: runtime_env, placement_group, label_selector"
    )
    return WorkerError(f"AD493 an actor cannot start on its node: {why[-1]}. {way_out}")
