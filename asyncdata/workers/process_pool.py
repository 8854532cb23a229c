"""Worker processes: forked from a fork server, fed over socketpairs, replaced when they die, hang or grow too large.

The trainer's process is never forked, nothing is pickled, and no ``__main__`` is imported again.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

import anyio

from asyncdata.core.errors import WorkerError, get_logger
from asyncdata.core.messages import Failed, Job, Ready, Reply, Short, decode_reply, frame
from asyncdata.workers.base import (
    COMMAND,
    FORK,
    PROGRESS,
    PROGRESS_BYTES,
    REAP,
    SHARE,
    Answer,
    ForkedWorker,
    Loaded,
    NotForked,
    Reaped,
    decode_answer,
    error_of,
)
from asyncdata.workers.machine import resident_memory
from asyncdata.workers.pool import Lane, Transport, with_reader
from asyncdata.workers.popen import EarlyForkServer, StartedForkServer, new_ends, no_room
from asyncdata.workers.processes import ChildProcess, Executed, Forked, SharedResources
from asyncdata.workers.worker import Call, Lost, Worker, died_starting, new_patience, pause

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Coroutine, Sequence

    from anyio.abc import TaskGroup


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


_log = get_logger(__name__)
_MAX_WORKERS = 64
_LOOK_EVERY_S = 0.5
_FINISH_S = 1.5


class ProcessWorker(Worker):
    """A worker process.

    :param page: where it writes its progress.
    :param max_bytes: memory that it may use; None means no limit.
    :ivar finish_s: seconds that it gets to write what it has read, when the pool closes.
    """

    finish_s = 0.0

    def __init__(
        self, number: int, process: ChildProcess, page: mmap.mmap, max_bytes: int | None, row_timeout_s: float
    ) -> None:
        super().__init__(number, row_timeout_s)
        self.pid = process.pid
        self._process = process
        self._page = page
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._has_outgrown = self._is_short = False
        self._next_look = 0.0

    @property
    def is_spent(self) -> bool:  # type: ignore[override]
        return self._has_outgrown or self._is_short or self.is_outdated

    def tasks(self) -> list[Callable[[], Coroutine[Any, Any, Any]]]:
        return [self._process.pump_output, self._process.connection.send_rest]

    async def begin(self, has_started: Callable[[], bool]) -> None:
        _, reply = await self.receive()
        if isinstance(reply, Short) and has_started():
            raise EOFError

        if not isinstance(reply, Ready):
            raise error_of(reply)

        if self._has_outgrown:
            raise WorkerError(
                f"AD426 a worker uses {self._num_bytes} bytes before it has tokenized a row, but "
                f"Limits(max_bytes_per_worker={self._max_bytes}): raise it"
            )

    def send(self, call: Call) -> None:
        with contextlib.suppress(OSError):  # it is gone: receive() detects that
            self._process.connection.send(frame(call.request_id, call.request))

    async def receive(self) -> tuple[int, Reply]:
        request_id, body = await self._process.connection.receive()
        reply = decode_reply(body)
        self._look_at_memory()
        if isinstance(reply, Short) and self.is_ready and not self._is_short:  # another worker may succeed
            self._is_short = True
            _log.warning("worker.short", worker=self.number, pid=self.pid, reason=reply.reason)
        return request_id, reply

    def progress(self) -> tuple[int, int]:
        try:
            request_id, row = PROGRESS.unpack_from(self._page, self.number * PROGRESS_BYTES)
        except ValueError:  # the page is closed: any thread may call this at any time
            return 0, -1

        return request_id, row

    def waited_s(self) -> float:
        try:
            with open(f"/proc/{self.pid}/schedstat", "rb") as file:  # of its main thread, which has the row
                return int(file.read().split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    def _look_at_memory(self) -> None:
        """Measure its memory, but not at every reply: each measurement is a system call."""
        now = time.monotonic()
        if self._max_bytes is None or self._has_outgrown or now < self._next_look:
            return

        self._next_look = now + _LOOK_EVERY_S
        self._num_bytes = resident_memory(self._process.pid)
        self._has_outgrown = self._num_bytes > self._max_bytes
        if self._has_outgrown:
            sizes = self._num_bytes, self._max_bytes
            _log.warning("worker.outgrown", worker=self.number, pid=self.pid, num_bytes=sizes[0], max_bytes=sizes[1])

    async def end(self, lost: Lost | None) -> Lost | None:
        """Kill the process. If it died with its fork server, its exit status is unknown, and no request is blamed."""
        process = self._process
        process.kill()
        with anyio.CancelScope(shield=True):
            await process.handle.ended()
        await process.handle.ask_status()
        if lost is None:
            return None

        how = process.how_it_ended()
        _log.warning("worker.lost", worker=self.number, pid=self.pid, reason=lost.reason, how=how)
        request_id, row = self.progress()
        PROGRESS.pack_into(self._page, self.number * PROGRESS_BYTES, 0, -1)
        has_died = lost.code == "AD423"  # one that hung was killed by the pool itself
        return lost._replace(
            how=how,
            output=process.output,
            may_pass=has_died and process.may_pass(),
            shortage=process.ran_short(),
            request_id=0 if has_died and process.handle.status is None else request_id,
            row=row,
        )

    def kill(self) -> None:
        self._process.kill(self.finish_s)
        self._process.handle.wait()


class Processes(Transport):
    """Worker processes of this machine.

    :param num_workers: processes at the start; each runs one request at a time.
    :param row_timeout_s: a worker that makes no progress for so many seconds counts as hung, and is killed. Progress is
        a reply, or, if the tokenize function runs row by row, a row.
    :param max_workers: the largest number of workers; None means 64, or ``num_workers`` if that is more.
    :param early: a fork server that was started before; :meth:`prepare` must run in its thread.
    :param max_bytes_per_worker: a worker that uses more memory is replaced after it has answered its requests.
    """

    def __init__(
        self,
        num_workers: int,
        row_timeout_s: float = 60.0,
        max_workers: int | None = None,
        early: EarlyForkServer | None = None,
        max_bytes_per_worker: int | None = None,
    ) -> None:
        most = max(num_workers, max_workers or _MAX_WORKERS)
        self._row_timeout_s, self._max_bytes, self._early = row_timeout_s, max_bytes_per_worker, early
        self._workers, self._reader = Lane(self._start, 0, num_workers, most), Lane(self._start, most)
        self.lanes = [self._workers, self._reader]
        self._shared: SharedResources | None = None
        self._is_shareable = True
        self._fork_server: ForkServer | None = None
        self._servers: set[ForkServer] = set()  # that have not ended, and are no workers
        self._has_started = False
        self._num_lost, self._losses = 0, new_patience()

    def prepare(self, slot_bytes: int, num_parts: int) -> Sequence[memoryview]:
        """Make the slots, and start the fork server, so that it loads the tokenize function before the loop runs."""
        started = self._early.take() if self._early is not None else None
        with contextlib.ExitStack() as failing:
            if started is not None:
                failing.callback(started.end)
            alive = None if started is None else started.alive
            shared = SharedResources(self._reader.first + 1, slot_bytes, num_parts, alive)
            failing.callback(shared.close)
            self._fork_server = ForkServer(shared, started or StartedForkServer(shared.alive))
            failing.pop_all()
        self._shared, self._servers = shared, {self._fork_server}
        return shared.slots

    async def begin(self, group: TaskGroup, job: Job) -> None:
        self._group, self._job, self._turn = group, job, anyio.Lock()  # here: a lock belongs to the loop it is made in
        for server in self._servers:
            group.start_soon(server.pump_output)
        with_reader(self._workers, self._reader, job)

    async def _start(self, number: int) -> Worker:
        """Start worker ``number``: a fork of the fork server. If its memory cannot be shared, the worker is a fork
        server of its own, which has loaded the tokenize function itself.

        :raises WorkerError: if the system has no room for it, or the tokenize function cannot be opened.
        """
        assert self._shared is not None, "prepare() comes first"
        process = None
        while process is None:
            if not self._is_shareable:
                process = await self._start_from(self._new_fork_server(self._shared), number)
                continue

            async with self._turn:
                if self._is_shareable:
                    self._fork_server = self._fork_server or self._new_fork_server(self._shared)
                    process = await self._start_from(self._fork_server, number)
        worker = ProcessWorker(number, process, self._shared.page, self._max_bytes, self._row_timeout_s)
        if self._job.keeps_blocks and number in self._reader.numbers():
            worker.finish_s = _FINISH_S
        return worker

    def _new_fork_server(self, shared: SharedResources) -> ForkServer:
        server = ForkServer(shared, StartedForkServer(shared.alive))
        self._servers.add(server)
        self._group.start_soon(server.pump_output)
        return server

    async def _start_from(self, server: ForkServer, number: int) -> ChildProcess | None:
        """Worker ``number`` from this fork server; None if the fork server was lost."""
        try:
            await server.open(self._job, is_first=not self._has_started)
            process = await server.fork_worker(number)
        except LostError as lost:
            await self._replace(server, str(lost))
            return None

        self._losses.succeeded()
        self._has_started = True
        if server.reason:  # it has become the worker, and so will all later ones
            if self._is_shareable:
                _log.info("workers.not_shared", reason=server.reason)
            self._is_shareable, self._fork_server = False, None
            self._servers.remove(server)
            server.process.connection.close()
        return process

    async def _replace(self, server: ForkServer, reason: str) -> None:
        await self._end(server)
        if self._fork_server is server:
            self._fork_server = None
        self._num_lost += 1
        how = server.process.how_it_ended()
        _log.warning("forkserver.lost", pid=server.process.pid, reason=reason, how=how)
        wait_s = self._losses.failed(may_pass=server.process.may_pass())
        if wait_s is None:
            raise died_starting(self._losses.num_failures, how, server.process.output)

        await pause(wait_s)

    async def _end(self, server: ForkServer) -> None:
        await server.end()
        self._servers.discard(server)

    async def reopen(self, workers: list[Worker], dismiss: Callable[[Worker], object]) -> None:
        """Replace all workers, each after its requests, by forks of a new fork server. Without sharing, each opens the
        tokenize function anyway.
        """
        earlier = await self._reload() if self._is_shareable else set()
        if earlier is None:
            return

        outdated = [worker for worker in workers if isinstance(worker, ProcessWorker)]
        for worker in outdated:
            worker.is_outdated = True
            dismiss(worker)
        for worker in outdated:
            await worker.ended.wait()
        for server in earlier:
            await self._end(server)
        _log.info("workers.reopened", num_workers=self._workers.num_workers)

    async def _reload(self) -> set[ForkServer] | None:
        """Have a new fork server open the tokenize function, and fork later workers. Workers can be started meanwhile.

        Return the earlier fork servers, whose workers live on; None if it cannot be opened.
        """
        assert self._shared is not None, "prepare() comes first"
        server = None
        try:
            server = self._new_fork_server(self._shared)
            await server.open(self._job, is_first=False)
        except (LostError, WorkerError) as error:
            if server is not None:
                await self._end(server)
            _log.warning("workers.not_reopened", reason=str(error))
            return None

        async with self._turn:
            self._fork_server = server
            return self._servers - {server}

    @property
    def num_restarts(self) -> int:
        return self._num_lost

    def num_reads(self) -> dict[str, int]:
        return {} if self._shared is None else self._shared.num_reads()

    def close(self) -> None:
        for server in self._servers:
            server.close()
        if self._shared is not None:
            self._shared.close()
