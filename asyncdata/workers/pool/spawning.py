"""Starting workers: by forking the fork server, or by exec for each worker where a fork is not safe."""

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
    from asyncdata.workers.pool.processes import WorkerProcess
    from asyncdata.workers.pool.shared_resources import Spawner

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

    def __init__(self, spawner: Spawner, started: StartedForkServer) -> None:
        self._handle = Executed(started.process)
        self.process = ChildProcess("forkserver", self._handle, Connection(started.ends.sock), started.ends.output_fd)
        self.reason = ""
        self._told = started.told
        self._spawner = spawner
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
        self._send(SHARE, 0, self._spawner.memory_fds)
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

        return self._spawner.worker(number, handle, ends)

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
    """Starts the workers of a pool.

    The fork server starts in the constructor, so it loads the tokenize function before the caller's loop runs.

    :ivar num_lost: fork servers that were replaced.
    :param started: a fork server that was started before; None for a new one.
    :raises WorkerError: if the system has no room for it.
    """

    def __init__(self, spawner: Spawner, started: StartedForkServer | None = None) -> None:
        self.num_lost = 0
        self._losses = new_patience()
        self._has_started = False
        self._spawner = spawner
        self._shares = True
        started = started or StartedForkServer(spawner.alive)
        self._fork_server: _ForkServerHandle | None = _ForkServerHandle(spawner, started)
        self._group: TaskGroup | None = None
        self._job: Job | None = None
        self._turn = anyio.Lock()

    def begin(self, group: TaskGroup, job: Job) -> None:
        """Allow workers to start, with ``job`` to do."""
        self._group, self._job = group, job
        if self._fork_server is not None:
            group.start_soon(self._fork_server.pump_output)

    async def start_worker(self, number: int) -> WorkerProcess:
        """Start worker ``number``.

        :raises WorkerError: if the system has no room for it, or the tokenize function cannot be opened.
        """
        job = self._job
        if job is None:
            raise WorkerError("begin() has not been called")

        async with self._turn:
            while self._shares:
                server = self._current_fork_server()
                try:
                    await server.open(job, is_first=not self._has_started)
                    worker = await server.fork_worker(number)
                except _LostError as lost:
                    await self._replace(server, str(lost))
                    continue

                self._losses.succeeded()
                self._has_started = True
                if server.reason:
                    self._share_no_more(server)
                return worker

        return self._spawner.spawn(number, frame(0, job))

    def _current_fork_server(self) -> _ForkServerHandle:
        if self._fork_server is None:
            self._fork_server = _ForkServerHandle(self._spawner, StartedForkServer(self._spawner.alive))
            if self._group is not None:
                self._group.start_soon(self._fork_server.pump_output)
        return self._fork_server

    def _share_no_more(self, server: _ForkServerHandle) -> None:
        """It has become a worker. Later workers start by exec, and load the tokenize function themselves."""
        _log.info("workers.not_shared", reason=server.reason)
        server.process.connection.close()
        self._shares, self._fork_server = False, None

    async def _replace(self, server: _ForkServerHandle, reason: str) -> None:
        await server.end()
        self._fork_server = None
        self.num_lost += 1
        how = server.process.how_it_ended()
        _log.warning("forkserver.lost", pid=server.process.pid, reason=reason, how=how)
        wait_s = self._losses.failed(may_pass=may_pass(server.process))
        if wait_s is None:
            raise died_starting(server.process, self._losses.num_failures)

        await pause(wait_s)

    def close(self) -> None:
        """End the fork server. The workers must have ended."""
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None
