"""The processes of a pool, from the trainer's side: what they share, their sockets, output, progress and status."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import subprocess
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.to_thread

from asyncdata.core.errors import WorkerError
from asyncdata.core.log import get_logger
from asyncdata.core.read_counts import READ_COUNTS
from asyncdata.workers.pool.connection import Connection
from asyncdata.workers.pool.popen import AlivePipe, no_room
from asyncdata.workers.pool.worker_main import PROGRESS, PROGRESS_BYTES, read_counts_at

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType
    from typing import Self

    from asyncdata.workers.pool.popen import Ends

__all__ = ("ChildProcess", "Executed", "Forked", "ProcessHandle", "SharedResources", "WorkerProcess")

_log = get_logger(__name__)
_OUTPUT_BYTES = 4096
_MAX_OUTPUT_EVENTS = 100


class ProcessHandle(Protocol):
    """A process that can be killed and waited for.

    :ivar status: how it ended: an exit status, or a signal as a negative number; None while that is not known.
    """

    pid: int

    @property
    def status(self) -> int | None:
        """As the class says."""
        ...

    def kill(self) -> None:
        """Kill it. A process that has got its pid since then is not hit."""
        ...

    async def ended(self) -> None:
        """Wait until it has ended, and can no longer write to shared memory."""
        ...

    async def ask_status(self) -> None:
        """Read how it ended, after it has."""
        ...

    def wait(self) -> None:
        """As :meth:`ended`, but blocking; then close the handle."""
        ...


class Executed:
    """A child of this process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._process = process

    @property
    def status(self) -> int | None:
        """As the protocol says."""
        return self._process.returncode

    def kill(self) -> None:
        """As the protocol says."""
        self._process.kill()

    async def ended(self) -> None:
        """As the protocol says."""
        if self._process.poll() is not None:
            return

        try:
            pidfd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # an old kernel, a container that forbids it, or no descriptor left
            await anyio.to_thread.run_sync(self._process.wait)
            return

        try:
            await anyio.wait_readable(pidfd)  # no thread: there may be no room for one
        finally:
            os.close(pidfd)
        self._process.wait()

    async def ask_status(self) -> None:
        """As the protocol says; the status is already known."""

    def wait(self) -> None:
        """As the protocol says."""
        self._process.wait()

    def wait_or_kill(self, timeout_s: float) -> None:
        """Wait until it ends by itself; kill it after ``timeout_s``."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None


class Forked:
    """A grandchild: a child of the fork server.

    :param pidfd: refers to this process even after its pid is reused.
    :param ask_status: asks the fork server for the exit status of its child with a given pid.
    """

    def __init__(self, pid: int, pidfd: int, ask_status: Callable[[int], Awaitable[int | None]]) -> None:
        self.pid = pid
        self.status: int | None = None
        self._pidfd = pidfd
        self._ask = ask_status

    def kill(self) -> None:
        """As the protocol says."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def ended(self) -> None:
        """As the protocol says."""
        await anyio.wait_readable(self._pidfd)

    async def ask_status(self) -> None:
        """As the protocol says."""
        self.status = await self._ask(self.pid)

    def wait(self) -> None:
        """As the protocol says."""
        if self._pidfd < 0:
            return

        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.poll()
        if self.status is None:
            self._adopt()
        self.forget()

    def forget(self) -> None:
        """Close the pidfd, which may refer to another process."""
        os.close(self._pidfd)
        self._pidfd = -1

    def _adopt(self) -> None:
        """Reap it if this process is process 1 of its container, which inherits the children of a dead fork server."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)


class ChildProcess:
    """One process, its socket, and the pipe of its output.

    :param name: its name in events: a worker's number, or ``forkserver``.
    """

    def __init__(self, name: int | str, handle: ProcessHandle, connection: Connection, output_fd: int) -> None:
        self.pid = handle.pid
        self.handle = handle
        self.connection = connection
        self._name = name
        self._output_fd = output_fd
        self._output = b""

    @property
    def output(self) -> str:
        """The end of what it wrote to stdout and stderr."""
        return self._output.decode("utf-8", "replace")

    async def pump_output(self) -> None:
        """Turn its stdout and stderr into events until it ends. A full pipe would block it."""
        num_events = 0
        while True:
            await anyio.wait_readable(self._output_fd)
            piece = self._read()
            if piece == b"":
                return

            num_events += piece is not None
            if piece is not None and num_events <= _MAX_OUTPUT_EVENTS:
                text = piece[-_OUTPUT_BYTES:].decode("utf-8", "replace").rstrip()
                _log.info("worker.output", worker=self._name, pid=self.pid, text=text)

    def _read(self) -> bytes | None:
        """What it has written: None if there is nothing yet, ``b""`` at the end."""
        try:
            piece = os.read(self._output_fd, 64 * 1024)
        except BlockingIOError:
            return None

        self._output = (self._output + piece)[-_OUTPUT_BYTES:]
        return piece

    def read_remaining_output(self) -> None:
        """Read what it wrote before its end and was not read yet."""
        with contextlib.suppress(OSError):
            self._read()

    def close_output(self) -> None:
        """Close the pipe of its output; calling this again does nothing."""
        if self._output_fd >= 0:
            os.close(self._output_fd)
            self._output_fd = -1

    def how_it_ended(self) -> str:
        """``exit status 3`` or ``SIGSEGV``."""
        status = self.handle.status
        if status is None:
            return "exit status unknown"

        names = {number.value: number.name for number in signal.Signals}  # without most real-time signals
        return names.get(-status, f"signal {-status}") if status < 0 else f"exit status {status}"


class WorkerProcess(ChildProcess):
    """One worker, from the trainer's side."""

    def __init__(
        self, number: int, handle: ProcessHandle, connection: Connection, output_fd: int, page: mmap.mmap
    ) -> None:
        super().__init__(number, handle, connection, output_fd)
        self.number = number
        self._page = page

    def progress(self) -> tuple[int, int]:
        """The id of the request it is working on (0: none), and the row (-1: all rows at once)."""
        try:
            request_id, row = PROGRESS.unpack_from(self._page, self.number * PROGRESS_BYTES)
        except ValueError:  # the page is closed: any thread may call this at any time
            return 0, -1

        return request_id, row

    def clear_progress(self) -> None:
        """Reset the progress of a worker that has died."""
        PROGRESS.pack_into(self._page, self.number * PROGRESS_BYTES, 0, -1)

    def kill(self) -> None:
        """Kill it and close our descriptors; calling this again does nothing."""
        if self._output_fd < 0:
            return

        self.handle.kill()
        self.connection.close()
        self.read_remaining_output()
        self.close_output()

    def wait(self) -> None:
        """Wait until it has ended."""
        self.handle.wait()


class SharedResources:
    """Holds the descriptors that all processes of a pool share.

    :param alive: the pipe of a fork server that was started before; None for a new one.
    :param num_parts: parts of a mixture; there are ``num_slots`` for each, and the slots of all in the same memory.
    :raises WorkerError: if no memory or no descriptor is left.
    """

    def __init__(
        self, num_workers: int, slot_bytes: int, num_slots: int, alive: AlivePipe | None = None, num_parts: int = 1
    ) -> None:
        self._counts_at = [read_counts_at(number) for number in range(num_workers)]
        self._reads = {"num_reads": 0, "num_retried": 0}
        try:
            with contextlib.ExitStack() as opened:
                self.alive = alive or AlivePipe()
                opened.callback(self.alive.close)
                self.memory_fds: list[int] = []
                opened.callback(lambda: _close(self.memory_fds))
                self.memory_fds.append(_memory("progress", num_workers * PROGRESS_BYTES))
                for number in range(num_slots):
                    self.memory_fds.append(_memory(f"slot {number}", slot_bytes * num_parts))
                progress_fd, *slot_fds = self.memory_fds
                self._page = mmap.mmap(progress_fd, 0)  # our own memory, not a file of the user
                memory = [memoryview(mmap.mmap(fd, 0) if slot_bytes else b"") for fd in slot_fds]
                self._slots = [
                    view[part * slot_bytes : (part + 1) * slot_bytes] for view in memory for part in range(num_parts)
                ]
                opened.pop_all()
        except OSError as error:
            raise no_room(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.alive.close()
        _close(self.memory_fds)
        self.num_reads()  # for the last time
        self._page.close()
        self._slots.clear()  # not closed: an abandoned thread may still write there

    def memory(self, slot: int) -> memoryview:
        """The bytes of ``slot``.

        :raises WorkerError: if the pool has ended.
        """
        if not self._slots:
            raise WorkerError("the workers have ended, and the slots are gone")

        return self._slots[slot]

    def num_reads(self) -> dict[str, int]:
        """Requests of all workers to stores, as fields of the statistics."""
        with contextlib.suppress(ValueError):  # the page is closed: any thread may call this at any time
            counts = [READ_COUNTS.unpack_from(self._page, start) for start in self._counts_at]
            names = "num_reads", "num_retried", "num_cached", "num_cache_failures"
            self._reads = dict(zip(names, map(sum, zip(*counts, strict=True)), strict=True)) if counts else {}
        return self._reads

    def worker(self, number: int, handle: ProcessHandle, ends: Ends) -> WorkerProcess:
        """The worker that has the other ends of ``ends``."""
        return WorkerProcess(number, handle, Connection(ends.sock), ends.output_fd, self._page)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _memory(name: str, num_bytes: int) -> int:
    """Anonymous shared memory; the kernel frees it when its last user closes it."""
    fd = os.memfd_create(f"asyncdata {name}")
    os.ftruncate(fd, num_bytes)
    return fd
