"""The processes of a pool, from the trainer's side: their ends, sockets and output, and the memory that they share."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import anyio.to_thread

from asyncdata.core.errors import WorkerError, get_logger
from asyncdata.core.messages import HEADER, MAX_FRAME_BYTES, READ_COUNTS
from asyncdata.core.threads import no_op
from asyncdata.workers.base import NUM_SLOTS, PROGRESS_BYTES, STATUS_SHORT, read_counts_at
from asyncdata.workers.popen import AlivePipe, Ends, no_room

_log = get_logger(__name__)
_SCRATCH_BYTES = 16 * 1024
_STALLED = struct.pack("ll", 0, 20_000)  # 20 ms: a worker that stopped inside a frame must not block the loop
_OUTPUT_BYTES = 4096
_MAX_OUTPUT_EVENTS = 100
_CRASHES = frozenset(
    -number
    for number in (
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGSEGV,
        signal.SIGSYS,
        signal.SIGTRAP,
    )
)
_NO_MEMORY = ("memory allocation of ", "std::bad_alloc")
"""What Rust and C++ print before they abort because no memory is left."""


class Executed:
    """A child of this process.

    :ivar status: how it ended: an exit status, or a signal as a negative number; None while that is not known.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._process = process

    @property
    def status(self) -> int | None:
        return self._process.returncode

    def kill(self) -> None:
        """Kill it. A process that has got its pid since then is not hit."""
        self._process.kill()

    def finish(self, timeout_s: float) -> None:
        """Ask it to end by itself, and wait for that."""
        self._process.terminate()
        self.wait_or_kill(timeout_s)

    async def ended(self) -> None:
        """Wait until it has ended, and can no longer write to shared memory."""
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
        """Read how it ended, after it has: nothing to do."""

    def wait(self) -> None:
        """As :meth:`ended`, but blocking."""
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
    """A grandchild: a child of the fork server. It has the methods of :class:`Executed`.

    :param pidfd: refers to this process even after its pid is reused.
    :param ask_status: asks the fork server for the exit status of its child with a given pid.
    """

    def __init__(self, pid: int, pidfd: int, ask_status: Callable[[int], Awaitable[int | None]]) -> None:
        self.pid = pid
        self.status: int | None = None
        self._pidfd = pidfd
        self._ask = ask_status

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def finish(self, timeout_s: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            poll.poll(timeout_s * 1000)

    async def ended(self) -> None:
        await anyio.wait_readable(self._pidfd)

    async def ask_status(self) -> None:
        self.status = await self._ask(self.pid)

    def wait(self) -> None:
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


class Connection:
    """This process's end of a socket, which it owns: whole frames, in as few system calls as possible.

    While the trainer runs Python code, every return from a call that released the GIL may wait 5 ms. So a frame costs
    one wait and one or two receives, and a send never waits. A request may be larger than the socket's buffer, for
    example one for a plan of many rows; then a task sends the rest later.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _STALLED)
        self._sock = sock
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))  # headers, and the bytes that arrive with them
        self._start = self._end = 0
        self._request_id = 0
        self._body: memoryview | None = None
        self._spare: Any = None
        self._user: Callable[[], object] = no_op
        self._num_read = 0
        self._unsent: deque[memoryview] = deque()
        self._has_unsent = anyio.Event()

    async def send_first(self, data: bytes | bytearray) -> None:
        """Send ``data``, however long, to a worker that may still be starting."""
        view = memoryview(data)
        while view:
            await anyio.wait_writable(self._sock)
            view = view[self._sock.send(view, socket.MSG_DONTWAIT) :]

    def send(self, data: bytes | bytearray) -> None:
        """Send a request: as much as the socket takes now, and the rest by :meth:`send_rest`.

        :raises OSError: if the worker is gone.
        """
        view = memoryview(data)
        if not self._unsent:
            view = view[self._send_some(view) :]
        if view:
            self._unsent.append(view)
            self._has_unsent.set()

    async def send_rest(self) -> None:
        """Send what :meth:`send` could not send, until the worker is gone."""
        with contextlib.suppress(OSError):
            while True:
                self._has_unsent = anyio.Event()
                while self._unsent:
                    await anyio.wait_writable(self._sock)
                    rest = self._unsent[0][self._send_some(self._unsent[0]) :]
                    self._unsent.popleft()
                    if rest:
                        self._unsent.appendleft(rest)
                await self._has_unsent.wait()

    def _send_some(self, view: memoryview) -> int:
        try:
            return self._sock.send(view, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def send_with(self, data: bytes, fds: Sequence[int]) -> None:
        """Send ``data`` and descriptors, which are duplicated into the other process.

        :raises OSError: if the process is gone, or its socket is full.
        """
        if socket.send_fds(self._sock, [data], fds, socket.MSG_DONTWAIT) != len(data):
            raise BrokenPipeError("the fork server's socket took only a part of a command")

    async def receive(self) -> tuple[int, memoryview]:
        """The next frame: its request id, and its body, which is read-only and owned by the caller.

        :raises EOFError: if the worker is gone.
        """
        while (body := self._whole_body()) is None:
            await anyio.wait_readable(self._sock)
            self._read()
        self._body = None
        return self._request_id, body.toreadonly()

    def _whole_body(self) -> memoryview | None:
        """Move the bytes in the scratch buffer to the current body; return it if it is complete."""
        if self._body is None and self._end - self._start >= HEADER.size:
            self._begin_body()
        if self._body is None:
            return None

        num_bytes = min(self._end - self._start, len(self._body) - self._num_read)
        self._body[self._num_read : self._num_read + num_bytes] = self._scratch[self._start : self._start + num_bytes]
        self._num_read += num_bytes
        self._start += num_bytes
        return self._body if self._num_read == len(self._body) else None

    def _begin_body(self) -> None:
        length, self._request_id = HEADER.unpack_from(self._scratch, self._start)
        if length > MAX_FRAME_BYTES:
            raise WorkerError(f"a worker announced a reply of {length} bytes; it is out of step")

        import numpy as np  # a late import: the fork server loads the tokenize function meanwhile

        self._start += HEADER.size
        # Each body has its own memory, because decoding returns views into it without a copy. np.empty does not fill
        # it with zeros first. Memory of which no view is left is used again: new memory costs more than the copy.
        spare = self._spare
        if not (spare is not None and length <= len(spare) <= 2 * length and self._user() is None):
            spare = self._spare = np.empty(length, np.uint8)
        user = spare[:length]  # an object of its own: every view into the body keeps it
        self._user = weakref.ref(user)
        self._body, self._num_read = user.data, 0

    def _read(self) -> None:
        self._scratch[: self._end - self._start] = self._scratch[self._start : self._end]
        self._start, self._end = 0, self._end - self._start
        if self._body is None:
            self._end += self._receive(self._scratch[self._end :], 0)
            self._whole_body()
        if self._body is not None and self._num_read < len(self._body):
            self._num_read += self._receive(self._body[self._num_read :], socket.MSG_WAITALL)

    def _receive(self, into: memoryview, flags: int) -> int:
        try:
            received = self._sock.recv_into(into, 0, flags)
        except BlockingIOError:
            return 0
        except ConnectionError as error:
            raise EOFError from error

        if received == 0:
            raise EOFError

        return received

    def close(self) -> None:
        """Close the socket; the worker reads end-of-file."""
        self._sock.close()


class ChildProcess:
    """One process, its socket, and the pipe of its output.

    :param name: its name in events: a worker's number, or ``forkserver``.
    """

    def __init__(self, name: int | str, handle: Executed | Forked, ends: Ends) -> None:
        self.pid = handle.pid
        self.handle = handle
        self.connection = Connection(ends.sock)
        self._name = name
        self._output_fd = ends.output_fd
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

    def kill(self, finish_s: float = 0) -> None:
        """Kill it and close our descriptors; calling this again does nothing.

        :param finish_s: it is asked to end by itself before, and gets so many seconds.
        """
        if self._output_fd >= 0:
            if finish_s:
                self.handle.finish(finish_s)
            self.handle.kill()
            self.connection.close()
            self.read_remaining_output()
            self.close_output()

    def how_it_ended(self) -> str:
        """``exit status 3`` or ``SIGSEGV``."""
        status = self.handle.status
        if status is None:
            return "exit status unknown"

        names = {number.value: number.name for number in signal.Signals}  # without most real-time signals
        return names.get(-status, f"signal {-status}") if status < 0 else f"exit status {status}"

    def ran_short(self) -> str:
        """The resource that it ran out of, if that was the cause of its end; empty otherwise."""
        if self.handle.status == STATUS_SHORT:
            return (self.output.rstrip().splitlines() or ["out of memory"])[-1]

        if self.handle.status == -signal.SIGABRT:
            return next((line for line in self.output.splitlines() if any(sign in line for sign in _NO_MEMORY)), "")

        return ""

    def may_pass(self) -> bool:
        """Whether the cause of its end is transient: it was killed from outside, or the system had run out of a
        resource.
        """
        status = self.handle.status
        is_own = status is not None and (status >= 0 or status in _CRASHES)
        return not is_own or bool(self.ran_short())


class SharedResources:
    """Holds the descriptors that all processes of a pool share.

    :ivar page: the page of the workers' progress.
    :ivar slots: the memory of each slot; empty after the end.
    :param alive: the pipe of a fork server that was started before; None for a new one.
    :param num_parts: parts of a mixture; there are ``NUM_SLOTS`` for each, and the slots of all in the same memory.
    :raises WorkerError: if no memory or no descriptor is left.
    """

    def __init__(self, num_workers: int, slot_bytes: int, num_parts: int, alive: AlivePipe | None = None) -> None:
        self._counts_at = [read_counts_at(number) for number in range(num_workers)]
        self._reads = {"num_reads": 0, "num_retried": 0}
        try:
            with contextlib.ExitStack() as opened:
                self.alive = alive or AlivePipe()
                opened.callback(self.alive.close)
                self.memory_fds: list[int] = []
                opened.callback(lambda: _close(self.memory_fds))
                self.memory_fds.append(_memory("progress", num_workers * PROGRESS_BYTES))
                for number in range(NUM_SLOTS):
                    self.memory_fds.append(_memory(f"slot {number}", slot_bytes * num_parts))
                progress_fd, *slot_fds = self.memory_fds
                self.page = mmap.mmap(progress_fd, 0)  # our own memory, not a file of the user
                memory = [memoryview(mmap.mmap(fd, 0) if slot_bytes else b"") for fd in slot_fds]
                self.slots = [
                    view[part * slot_bytes : (part + 1) * slot_bytes] for view in memory for part in range(num_parts)
                ]
                opened.pop_all()
        except OSError as error:
            raise no_room(error) from error

    def close(self) -> None:
        """Close the descriptors. The processes have ended, or end with the pipe."""
        self.alive.close()
        _close(self.memory_fds)
        self.num_reads()  # for the last time
        self.page.close()
        self.slots.clear()  # not closed: an abandoned thread may still write there

    def num_reads(self) -> dict[str, int]:
        """Requests of all workers to stores, as fields of the statistics."""
        with contextlib.suppress(ValueError):  # the page is closed: any thread may call this at any time
            counts = [READ_COUNTS.unpack_from(self.page, start) for start in self._counts_at]
            names = "num_reads", "num_retried", "num_cached", "num_cache_failures"
            self._reads = dict(zip(names, map(sum, zip(*counts, strict=True)), strict=True)) if counts else {}
        return self._reads


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _memory(name: str, num_bytes: int) -> int:
    """Anonymous shared memory; the kernel frees it when its last user closes it."""
    fd = os.memfd_create(f"asyncdata {name}")
    os.ftruncate(fd, num_bytes)
    return fd
