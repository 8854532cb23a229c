"""A fork server, from the trainer's side: it opens the tokenize function, and starts workers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import anyio

from asyncdata.core.errors import WorkerError
from asyncdata.core.framing import frame
from asyncdata.core.messages import Failed, Short
from asyncdata.workers.base import error_of
from asyncdata.workers.pool.popen import StartedForkServer, new_ends, no_room
from asyncdata.workers.pool.process_messages import (
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
from asyncdata.workers.pool.processes import ChildProcess, Executed, Forked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.core.messages import Job
    from asyncdata.workers.pool.process_messages import Answer
    from asyncdata.workers.pool.processes import SharedResources

_PATIENCE_S = 10.0
"""The fork server answers within milliseconds. After this time it is taken to hang."""
_SHUTDOWN_S = 1.0
"""How long the fork server may take to end by itself."""


class LostError(Exception):
    """The fork server has died, or was killed because it did not answer."""


class ForkServer:
    """A fork server, from the trainer's side.

    :ivar reason: why its workers cannot share its memory; empty if they can, and before it has loaded anything.
    """

    def __init__(self, shared: SharedResources, started: StartedForkServer) -> None:
        self._handle = Executed(started.process)
        self.process = ChildProcess("forkserver", self._handle, started.ends)
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

        spec = frame(0, job.tokenize)
        if self._told and self._told != spec:
            raise self._lost("it has loaded another function")

        if not self._told:
            await self._send_first(spec)
            self._told = spec
        loaded = await self._answer()
        if isinstance(loaded, Short) and not is_first:
            raise self._lost(loaded.reason)

        if isinstance(loaded, Failed | Short):
            raise error_of(loaded)

        self.reason, self._is_open = loaded.reason if isinstance(loaded, Loaded) else "", True
        self._send(SHARE, 0, self._shared.memory_fds)
        await self._send_first(frame(0, job))

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

    async def fork_worker(self, number: int) -> ChildProcess:
        """Worker ``number``: a fork, or, if memory cannot be shared, the fork server itself."""
        async with self._turn:
            with new_ends() as ends:
                self._send(FORK, number, ends.their_fds)
            try:
                handle = self._handle if self.reason else await self._forked()
            except BaseException:
                ends.close()
                raise

        return ChildProcess(number, handle, ends)

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
            raise LostError("it died") from error
        except OSError as error:
            raise no_room(error) from error

        forked = Forked(answer.pid, pidfd, self._status_of)
        if not self._handle.is_alive():  # the pid may already belong to another process
            forked.forget()
            raise LostError("it died")

        return forked

    async def _status_of(self, pid: int) -> int | None:
        """The exit status of a worker that has ended. Only the fork server, its parent, can read it."""
        try:
            async with self._turn:
                self._send(REAP, pid)
                answer = await self._answer_in_time()
        except LostError:
            return None

        return answer.status if isinstance(answer, Reaped) else None

    def _send(self, operation: int, argument: int, fds: Sequence[int] = ()) -> None:
        if self._lost_because:
            raise LostError(self._lost_because)

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

    def _lost(self, reason: str) -> LostError:
        """Kill the fork server and its workers: a late answer could be taken for the answer to a later command."""
        self._lost_because = reason
        self._handle.kill()
        return LostError(reason)

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
