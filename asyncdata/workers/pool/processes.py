"""The processes of a pool as the trainer sees them: their sockets, their output, their progress, their ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.to_thread

from asyncdata.core.log import get_logger
from asyncdata.workers.pool.worker_main import PROGRESS, PROGRESS_BYTES

if TYPE_CHECKING:
    import mmap
    from collections.abc import Awaitable, Callable

    from asyncdata.workers.pool.connection import Connection

__all__ = ("Executed", "Forked", "Life", "Offspring", "WorkerProcess")

_log = get_logger(__name__)
_OUTPUT_BYTES = 4096
_MAX_OUTPUT_EVENTS = 100


class Life(Protocol):
    """A process that can be ended, and whose end can be waited for.

    :ivar status: how it ended: an exit status, or a signal as a negative number; None while that is not known.
    """

    pid: int

    @property
    def status(self) -> int | None:
        """As the class says."""
        ...

    def kill(self) -> None:
        """End it. Its pid may be another's by now: that one is safe."""
        ...

    async def ended(self) -> None:
        """Until it is gone for certain, and writes nowhere any more."""
        ...

    async def ask_status(self) -> None:
        """Learn how it ended, once it has."""
        ...

    def wait(self) -> None:
        """As :meth:`ended`, blocking; and give back what its handle costs."""
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
        """As the protocol says; it is known already."""

    def wait(self) -> None:
        """As the protocol says."""
        self._process.wait()

    def wait_or_kill(self, timeout_s: float) -> None:
        """Until it is gone: by itself, or else by force."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None


class Forked:
    """A grandchild: a child of the template.

    :param pidfd: names it for ever, whatever becomes of its pid.
    :param ask_status: asks the template how the child with a pid has ended.
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
        """Close the handle of what may be another process."""
        os.close(self._pidfd)
        self._pidfd = -1

    def _adopt(self) -> None:
        """A trainer that is process 1 of its container inherits the children of a template that died."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)


class Offspring:
    """One process, its socket, and the pipe of its output.

    :param name: what events call it: a worker's number, or ``template``.
    """

    def __init__(self, name: int | str, life: Life, connection: Connection, output_fd: int) -> None:
        self.pid = life.pid
        self.life = life
        self.connection = connection
        self._name = name
        self._output_fd = output_fd
        self._output = b""

    @property
    def output(self) -> str:
        """The end of what it wrote to stdout and stderr."""
        return self._output.decode("utf-8", "replace")

    async def pump_output(self) -> None:
        """Turn its stdout and stderr into events, until it ends. Unread, a full pipe would stop it."""
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
        """What it has written; None if there is nothing yet, and nothing at all at the end."""
        try:
            piece = os.read(self._output_fd, 64 * 1024)
        except BlockingIOError:
            return None

        self._output = (self._output + piece)[-_OUTPUT_BYTES:]
        return piece

    def read_last_words(self) -> None:
        """What it wrote before its end, and nobody has read yet."""
        with contextlib.suppress(OSError):
            self._read()

    def close_output(self) -> None:
        """Nobody reads it any more; calling this again does nothing."""
        if self._output_fd >= 0:
            os.close(self._output_fd)
            self._output_fd = -1

    def how_it_ended(self) -> str:
        """``exit status 3`` or ``SIGSEGV``."""
        status = self.life.status
        if status is None:
            return "nobody saw how"

        names = {number.value: number.name for number in signal.Signals}  # not all of the real-time signals
        return names.get(-status, f"signal {-status}") if status < 0 else f"exit status {status}"


class WorkerProcess(Offspring):
    """One worker, from the trainer's side.

    :param greeting: the job, for a worker that has not got it from a template.
    """

    def __init__(
        self,
        number: int,
        life: Life,
        connection: Connection,
        output_fd: int,
        page: mmap.mmap,
        greeting: bytes | bytearray = b"",
    ) -> None:
        super().__init__(number, life, connection, output_fd)
        self.number = number
        self.greeting = greeting
        self._page = page

    def progress(self) -> tuple[int, int]:
        """The request it is working on (0: none), and the row of it (-1: on all at once)."""
        try:
            request_id, row = PROGRESS.unpack_from(self._page, self.number * PROGRESS_BYTES)
        except ValueError:  # closed: any thread may ask, at any time
            return 0, -1

        return request_id, row

    def clear_progress(self) -> None:
        """Forget what a dead worker was doing."""
        PROGRESS.pack_into(self._page, self.number * PROGRESS_BYTES, 0, -1)

    def kill(self) -> None:
        """End it and close our descriptors; calling this again does nothing."""
        if self._output_fd < 0:
            return

        self.life.kill()
        self.connection.close()
        self.read_last_words()
        self.close_output()

    def wait(self) -> None:
        """Until it has ended."""
        self.life.wait()
