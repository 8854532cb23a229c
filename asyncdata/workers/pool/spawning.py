"""Starting workers: by forking a fork server, or, where a fork is not safe, by making a fork server the worker."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import anyio

from asyncdata.core.errors import WorkerError
from asyncdata.core.framing import frame
from asyncdata.core.log import get_logger
from asyncdata.core.messages import Failed, Short
from asyncdata.workers.pool.connection import Connection
from asyncdata.workers.pool.deadlines import pause
from asyncdata.workers.pool.early_start import StartedForkServer
from asyncdata.workers.pool.forkserver_messages import (
    COMMAND,
    FORK,
    REAP,
    SHARE,
    ForkedWorker,
    Loaded,
    NotForked,
    Reaped,
    decode_answer,
)
from asyncdata.workers.pool.lost_workers import died_starting, may_pass, new_patience
from asyncdata.workers.pool.popen import new_ends, no_room
from asyncdata.workers.pool.processes import ChildProcess, Executed, Forked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anyio.abc import TaskGroup

    from asyncdata.core.messages import Job
    from asyncdata.workers.pool.forkserver_messages import Answer
    from asyncdata.workers.pool.processes import SharedResources, WorkerProcess

__all__ = ("WorkerFactory",)

_log = get_logger(__name__)
_PATIENCE_S = 10.0
"""The fork server answers within milliseconds. After this time it is taken to hang."""
_SHUTDOWN_S = 1.0
"""How long the fork server may take to end by itself."""


class _LostError(Exception):
    """The fork server has died, or was killed because it did not answer."""


class _ForkServerHandle:
    """A fork server, from the trainer's side.

    :ivar reason: why its workers cannot share its memory; empty if they can, and before it has loaded anything.
    """

    def __init__(self, shared: SharedResources, started: StartedForkServer) -> None:
        self._handle = Executed(started.process)
        self.process = ChildProcess("forkserver", self._handle, Connection(started.ends.sock), started.ends.output_fd)
        self.reason = ""
        self._told = started.told
        self._shared = shared
        self._is_open = False
        self._lost_because = ""
        self._turn = anyio.Lock()

    async def open(self, job: Job, *, is_first: bool) -> None:
        """Load the tokenize function of ``job``, without a time limit.

        :param is_first: whether no fork server has loaded it before. Then a shortage of memory, processes or
            descriptors is an error, too.
        :raises WorkerError: if it cannot be loaded.
        """
        if self._is_open:
            return

        await self._tell(frame(0, job.tokenize))
        loaded = await self._answer()
        if isinstance(loaded, Short) and not is_first:
            raise self._lost(loaded.reason)

        if isinstance(loaded, Short):
            raise WorkerError(f"{loaded.reason}\n{loaded.traceback}".rstrip())

        if isinstance(loaded, Failed):
            raise WorkerError(f"{loaded.message}\n{loaded.traceback}".rstrip())

        self.reason, self._is_open = loaded.reason if isinstance(loaded, Loaded) else "", True
        self._send(SHARE, 0, self._shared.memory_fds)
        await self._send_first(frame(0, job))

    async def _tell(self, spec: bytearray) -> None:
        if self._told and self._told != spec:
            raise self._lost("it has loaded another function")

        if not self._told:
            await self._send_first(spec)
            self._told = spec

    async def _send_first(self, data: bytes | bytearray) -> None:
        try:
            await self.process.connection.send_first(data)
        except OSError as error:
            raise self._lost("it died") from error

    async def pump_output(self) -> None:
        """Log its output until it and all other writers of its pipe have ended."""
        try:
            await self.process.pump_output()
        finally:
            self.process.close_output()

    async def fork_worker(self, number: int) -> WorkerProcess:
        """Worker ``number``: a fork, or, if memory cannot be shared, the fork server itself."""
        async with self._turn:
            with new_ends() as ends:
                self._send(FORK, number, ends.their_fds)
            try:
                handle = self._handle if self.reason else await self._forked()
            except BaseException:
                ends.close()
                raise

        return self._shared.worker(number, handle, ends)

    async def _forked(self) -> Forked:
        answer = await self._answer_in_time()
        if isinstance(answer, NotForked):
            error = OSError(answer.errno, os.strerror(answer.errno))
            raise no_room(error) from error

        if not isinstance(answer, ForkedWorker):
            raise WorkerError(f"the fork server answered a fork with {type(answer).__name__}; it is out of step")

        try:
            pidfd = os.pidfd_open(answer.pid)
        except ProcessLookupError as error:
            raise _LostError("it died") from error
        except OSError as error:
            raise no_room(error) from error

        forked = Forked(answer.pid, pidfd, self._status_of)
        if not self._handle.is_alive():  # the pid may already belong to another process
            forked.forget()
            raise _LostError("it died")

        return forked

    async def _status_of(self, pid: int) -> int | None:
        """The exit status of a worker that has ended. Only the fork server, its parent, can read it."""
        try:
            async with self._turn:
                self._send(REAP, pid)
                answer = await self._answer_in_time()
        except _LostError:
            return None

        return answer.status if isinstance(answer, Reaped) else None

    def _send(self, operation: int, argument: int, fds: Sequence[int] = ()) -> None:
        if self._lost_because:
            raise _LostError(self._lost_because)

        try:
            self.process.connection.send_with(COMMAND.pack(operation, argument), fds)
        except OSError as error:
            raise self._lost("it died") from error

    async def _answer_in_time(self) -> Answer:
        with anyio.move_on_after(_PATIENCE_S):
            return await self._answer()

        raise self._lost(f"no answer in {_PATIENCE_S:g} s; it was killed")

    async def _answer(self) -> Answer:
        try:
            _, body = await self.process.connection.receive()
        except (EOFError, OSError) as error:
            raise self._lost("it died") from error

        answer: Answer = decode_answer(body)
        return answer

    def _lost(self, reason: str) -> _LostError:
        """Kill the fork server and its workers: a late answer could be taken for the answer to a later command."""
        self._lost_because = reason
        self._handle.kill()
        return _LostError(reason)

    async def end(self) -> None:
        """Kill it, and wait until it has ended."""
        self._handle.kill()
        with anyio.CancelScope(shield=True):
            await self._handle.ended()
        self.process.connection.close()
        self.process.read_remaining_output()

    def close(self) -> None:
        """Let it reap its workers and end by itself; kill it if that takes too long."""
        self.process.connection.close()
        self._handle.wait_or_kill(_SHUTDOWN_S if self._is_open and not self._lost_because else 0)
        self.process.close_output()


class WorkerFactory:
    """Starts the workers of a pool: forks of one fork server. If its memory cannot be shared, each worker is a fork
    server of its own, which loads the tokenize function itself and then becomes the worker.

    The fork server starts in the constructor, so it loads the tokenize function before the caller's loop runs.

    :ivar num_lost: fork servers that were replaced.
    :param started: a fork server that was started before; None for a new one.
    :raises WorkerError: if the system has no room for it.
    """

    def __init__(self, shared: SharedResources, started: StartedForkServer | None = None) -> None:
        self.num_lost = 0
        self._losses = new_patience()
        self._has_started = False
        self._shared = shared
        self._is_shareable = True
        server = _ForkServerHandle(shared, started or StartedForkServer(shared.alive))
        self._fork_server: _ForkServerHandle | None = server
        self._servers = {server}  # that have not ended, and are no workers
        self._outdated: set[_ForkServerHandle] = set()
        self._group: TaskGroup | None = None
        self._job: Job | None = None
        self._turn = anyio.Lock()

    def begin(self, group: TaskGroup, job: Job) -> None:
        """Allow workers to start, with ``job`` to do."""
        self._group, self._job = group, job
        for server in self._servers:
            group.start_soon(server.pump_output)

    async def start_worker(self, number: int) -> WorkerProcess:
        """Start worker ``number``.

        :raises WorkerError: if the system has no room for it, or the tokenize function cannot be opened.
        """
        worker = None
        while worker is None:
            if not self._is_shareable:
                worker = await self._start_from(self._new_fork_server(), number)
                continue

            async with self._turn:
                if self._is_shareable:
                    self._fork_server = self._fork_server or self._new_fork_server()
                    worker = await self._start_from(self._fork_server, number)
        return worker

    async def _start_from(self, server: _ForkServerHandle, number: int) -> WorkerProcess | None:
        """Worker ``number`` from this fork server; None if the fork server was lost."""
        if self._job is None:
            raise WorkerError("begin() has not been called")

        try:
            await server.open(self._job, is_first=not self._has_started)
            worker = await server.fork_worker(number)
        except _LostError as lost:
            await self._replace(server, str(lost))
            return None

        self._losses.succeeded()
        self._has_started = True
        if server.reason:
            self._is_worker_now(server)
        return worker

    def _new_fork_server(self) -> _ForkServerHandle:
        server = _ForkServerHandle(self._shared, StartedForkServer(self._shared.alive))
        self._servers.add(server)
        if self._group is not None:
            self._group.start_soon(server.pump_output)
        return server

    def _is_worker_now(self, server: _ForkServerHandle) -> None:
        """It has become a worker. All later workers load the tokenize function themselves."""
        if self._is_shareable:
            _log.info("workers.not_shared", reason=server.reason)
        self._is_shareable, self._fork_server = False, None
        self._servers.remove(server)
        server.process.connection.close()

    async def reload(self) -> bool:
        """Have later workers use the tokenize function as it is when it is opened now: a new fork server opens it.

        Workers can be started meanwhile, and the earlier ones live on. Return False if it cannot be opened; then later
        workers are as the earlier ones.
        """
        if self._job is None or not self._is_shareable:
            return self._job is not None  # without sharing, each worker opens it

        try:
            server = self._new_fork_server()
        except WorkerError as error:
            return _not_reloaded(str(error))

        try:
            await server.open(self._job, is_first=False)
        except (_LostError, WorkerError) as error:
            await self._end(server)
            return _not_reloaded(str(error))

        async with self._turn:
            self._outdated = self._servers - {server}
            self._fork_server = server
        return True

    async def end_outdated(self) -> None:
        """End the fork servers of before the last :meth:`reload`. Their workers must have ended."""
        while self._outdated:
            await self._end(self._outdated.pop())

    async def _end(self, server: _ForkServerHandle) -> None:
        await server.end()
        self._servers.discard(server)

    async def _replace(self, server: _ForkServerHandle, reason: str) -> None:
        await self._end(server)
        if self._fork_server is server:
            self._fork_server = None
        self.num_lost += 1
        how = server.process.how_it_ended()
        _log.warning("forkserver.lost", pid=server.process.pid, reason=reason, how=how)
        wait_s = self._losses.failed(may_pass=may_pass(server.process))
        if wait_s is None:
            raise died_starting(server.process, self._losses.num_failures)

        await pause(wait_s)

    def close(self) -> None:
        """End the fork servers. The workers must have ended."""
        while self._servers:
            self._servers.pop().close()
        self._fork_server = None


def _not_reloaded(reason: str) -> bool:
    _log.warning("workers.not_reopened", reason=reason)
    return False
