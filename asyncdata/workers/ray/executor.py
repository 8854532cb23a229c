"""The executor of a Ray cluster: worker processes of this machine, if any, and actors for what they do not get done.

One request is one call of an actor, and its answer is copied out of the object store as soon as it is there. Two
requests are under way to each actor, so that it never waits for the next one. An actor that is lost, with its node or
alone, is replaced, and its requests are sent again, as a worker process's are.
"""

from __future__ import annotations

import math
import os
import socket
import sys
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import anyio.to_thread
import msgspec

from asyncdata.core.errors import ConfigError, SourceError, WorkerError, get_logger
from asyncdata.core.messages import Job, Ready, Reply, Short, decode_reply, encode
from asyncdata.core.settings import missing_package, prepared
from asyncdata.core.threads import call_soon_in_this_loop
from asyncdata.workers.base import anonymous_slots, error_of, takes_samples
from asyncdata.workers.pool import Lane, Pool, Transport
from asyncdata.workers.ray.actor import Began, RemoteWorker, difference, in_slot, node_name, terms_of, to_send
from asyncdata.workers.worker import Call, Lost, Worker, pause

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from anyio.abc import TaskGroup

    from asyncdata.workers.process_pool import Processes
    from asyncdata.workers.ray import RayExecutor


_VARIABLE, _TIMEOUT_S = "RAY_ADDRESS", 10.0
_AGAIN_S = 1.0
_HEAD_TRIES = 20
"""A head with fault tolerance starts again. Ray waits for it for a minute, and then ends this process."""

WATCH = "watch"
"""The concurrency group of what is asked of an actor while it works."""


_sent: list[Any] = []
"""The runtime environment that this process connected with, if it was a loader that did."""


def connect(settings: RayExecutor) -> None:
    """Connect this process to the cluster, unless it is connected to one.

    The connection stays open when a loader is closed, as other code may use it.

    :raises ConfigError: without ray, if no cluster is there, or for Ray Client.
    """
    try:
        import ray
    except ImportError as error:
        raise missing_package("RayExecutor", "ray", error) from error

    client = sys.modules.get("ray.util.client")
    if client is not None and client.ray.is_connected():
        raise ConfigError(
            "AD490 this process is connected by Ray Client (ray://), which passes every byte through one connection, "
            "and cannot be used: run the trainer on a node of the cluster, or as a job (`ray job submit`)"
        )

    if ray.is_initialized():
        return

    given = os.environ.get(_VARIABLE, "") if settings.address == "auto" else settings.address
    try:
        _refuse_if_none_listens(given)
        ray.init(address=settings.address, runtime_env=settings.runtime_env)
        _sent[:] = [settings.runtime_env]
    except (OSError, ValueError, RuntimeError) as error:
        where = f"{_VARIABLE}={given}" if given != settings.address and given else f"address={settings.address!r}"
        way_out = "name one that runs" if given else f"set {_VARIABLE}, or call ray.init() before"
        raise ConfigError(
            f"AD491 there is no Ray cluster at {where}: {error}. Start one (`ray start --head` here, and `ray start "
            f"--address=HOST:PORT` on the other nodes), or {way_out}; or leave executor=RayExecutor(...) out, and "
            "worker processes of this machine are used"
        ) from error


def _refuse_if_none_listens(address: str) -> None:
    """Ray itself would try for minutes, and then end this process."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        with suppress(TimeoutError), socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_S):
            pass


def new_actors(settings: RayExecutor) -> Callable[[bytes], Any]:
    """A function that makes an actor with these terms. It returns at once; the actor starts when there is room.

    :raises ConfigError: for options that cannot be; also by the function, for what the placement group cannot hold.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Strategy

    group = settings.placement_group
    if group is None and settings.placement_group_bundle >= 0:
        raise ConfigError(
            f"AD497 RayExecutor(placement_group_bundle={settings.placement_group_bundle}) is of no placement group: "
            "pass placement_group=..., such as ray.util.get_current_placement_group()"
        )

    options: dict[str, Any] = {
        "num_cpus": settings.num_cpus,
        "max_restarts": 0,  # the pool replaces it, as every other worker
        "max_task_retries": 0,
        "max_concurrency": 1,
        "scheduling_strategy": "SPREAD" if group is None else Strategy(group, settings.placement_group_bundle),
    }
    for name in ("resources", "label_selector", "runtime_env"):
        value = getattr(settings, name)
        if value is not None and not (name == "runtime_env" and value in _sent):
            options[name] = value
    try:
        made = ray.remote(concurrency_groups={WATCH: 1})(RemoteWorker).options(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"AD497 Ray refuses these actors: {error} Folders of this machine are sent only when the process connects: "
            "call ray.init(runtime_env={...}) before, or let the first loader of the process connect"
        ) from error

    def new_actor(terms: bytes) -> Any:
        try:
            return made.remote(terms)
        except ValueError as error:
            raise ConfigError(
                f"AD497 Ray refuses these actors: {error} See num_cpus, resources and placement_group_bundle of "
                "RayExecutor(...)"
            ) from error

    return new_actor


def is_lost(error: BaseException) -> bool:
    """Whether an actor's answer is this because the actor, its node, or its answer was lost."""
    from ray import exceptions

    lost = (
        exceptions.RayActorError,
        exceptions.ObjectLostError,
        exceptions.NodeDiedError,
        exceptions.WorkerCrashedError,
    )
    return isinstance(error, lost)


def kill(actor: Any) -> None:
    """Kill the actor, whatever it does."""
    import ray

    try:
        ray.kill(actor, no_restart=True)
    except Exception:  # ray was shut down meanwhile, and all actors with it
        return


async def run_until_lost() -> None:
    """Hold a connection to Ray's process on this node, and one to the cluster's head, until one of them has ended.

    When a process ends, the system closes its connections and refuses new ones. It accepts them for a process that is
    busy or stopped, so a slow cluster is not a lost one.

    :raises WorkerError: when one has ended.
    """
    import ray

    context = ray.get_runtime_context()
    head, here = context.gcs_address, context.get_node_id()
    async with anyio.create_task_group() as group:
        group.start_soon(_run_until_refused, f"its head (GCS) at {head}", head, _HEAD_TRIES)
        nodes = await anyio.to_thread.run_sync(ray.nodes, abandon_on_cancel=True)
        node = next(one for one in nodes if one["NodeID"] == here)
        address = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
        group.start_soon(_run_until_refused, f"its process on this node (raylet) at {address}", address, 1)


async def _run_until_refused(who: str, address: str, max_tries: int) -> None:
    host, _, port = address.rpartition(":")
    num_refused = 0
    while num_refused < max_tries:
        try:
            async with await anyio.connect_tcp(host.strip("[]"), int(port)) as stream:
                num_refused = 0
                async for _ in stream:  # until it is closed at the other end
                    pass
        except (OSError, anyio.BrokenResourceError) as error:
            num_refused += isinstance(error.__cause__, ConnectionRefusedError)
        await pause(_AGAIN_S if num_refused < max_tries else 0.0)
    raise WorkerError(
        f"AD498 the Ray cluster is lost: {who} has ended. No row is lost: start the cluster again, and resume from the "
        "last state. Ray also ends this process, when it next needs what has ended"
    )


class Room(NamedTuple):
    """What actors lack that have no process yet.

    :ivar is_full: whether less is free than one of them needs.
    """

    is_full: bool
    text: str


def room_for(settings: RayExecutor, num_workers: int, num_waiting: int) -> Room:
    """What actors lack that have no process yet.

    :param num_workers: how many there should be.
    :param num_waiting: how many have none.
    """
    import ray

    free, total = ray.available_resources(), ray.cluster_resources()
    group, number = settings.placement_group, settings.placement_group_bundle
    suffix = "" if group is None else f"_group_{group.id.hex()}" if number < 0 else f"_group_{number}_{group.id.hex()}"
    needs = {"CPU": settings.num_cpus, **(settings.resources or {})}
    amounts = [f"{free.get(one + suffix, 0):g} of {total.get(one + suffix, 0):g} {one}" for one in needs]
    needed = ", ".join(f"{name} {amount:g}" for name, amount in needs.items())
    bound = [name for name in ("label_selector", "runtime_env") if getattr(settings, name)]
    also = f", and {', '.join(bound)} must fit" if bound else ""
    is_full = any(free.get(name + suffix, 0) < amount for name, amount in needs.items())
    where = "the Ray cluster" if group is None else "the placement group"
    return Room(
        is_full,
        f"{where} {'has no room' if is_full else 'has not started all actors'}: {num_workers} actors wanted, "
        f"{num_workers - num_waiting} started, {', '.join(amounts)} free; each needs {needed} on one node{also}",
    )


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
    """The actors; see :class:`~asyncdata.workers.pool.Transport`.

    :param first: the first of their numbers.
    :ivar lane: all of them.
    :ivar num_bytes_in: bytes of answers that came into this process; ``num_bytes_out`` of requests.
    :ivar memory: the bytes of a slot.
    :ivar waiting: those that have no process yet, by number.
    """

    def __init__(self, settings: RayExecutor, row_timeout_s: float, num_actors: int, first: int) -> None:
        self.settings, self.row_timeout_s = settings, row_timeout_s
        self.lane = Lane(self._start, first, num_actors, settings.num_workers, max_starts=math.inf)
        self.lanes = [self.lane]
        self.num_bytes_in = self.num_bytes_out = 0
        self.memory: Callable[[int], memoryview]
        self.waiting: dict[int, _ActorWorker] = {}
        self._job: Job
        self._make: Callable[[bytes], Any] | None = None
        self._terms = b""
        self._call_soon: Any = None

    def connect(self) -> None:
        """Connect with the cluster, if that has not been done.

        :raises ConfigError: if there is none, or for options that cannot be.
        """
        if self._make is None:
            connect(self.settings)
            self._make = new_actors(self.settings)

    def prepare(self, slot_bytes: int, num_parts: int) -> Sequence[memoryview]:
        self.connect()
        return anonymous_slots(slot_bytes, num_parts)

    async def begin(self, group: TaskGroup, job: Job) -> None:
        self._call_soon = call_soon_in_this_loop()
        self._job, self._terms = job, encode(await anyio.to_thread.run_sync(terms_of, job))
        group.start_soon(run_until_lost)

    async def _start(self, number: int) -> Worker:
        assert self._make is not None, "prepare() comes first"
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
    """

    answers_with_samples = True

    def __init__(
        self, settings: RayExecutor, *, row_timeout_s: float = 60.0, local: Processes | None = None, num_parts: int = 1
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
