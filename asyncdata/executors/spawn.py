"""How a worker process is born, and how its parent sees it: its socket, its output, its progress, its end."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING

import anyio

from asyncdata.errors import WorkerError
from asyncdata.executors.connection import Connection
from asyncdata.executors.worker import PROGRESS, PROGRESS_BYTES
from asyncdata.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import Self

__all__ = ("Spawner", "WorkerProcess", "no_room")

_log = get_logger(__name__)
_BOOT = """\
import json, sys
arguments = json.loads(sys.argv[1])
sys.path[:] = arguments.pop("path")
from asyncdata.executors.worker import main
main(**arguments)
"""
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",  # an `import torch` in a user's function must not make a CUDA context
}
_OUTPUT_BYTES = 4096
_MAX_OUTPUT_EVENTS = 100


class Spawner:
    """The descriptors that all workers of a pool share, and the making of one more worker."""

    def __init__(self, num_workers: int, slot_bytes: int, num_slots: int) -> None:
        with contextlib.ExitStack() as opened:
            self._alive_read, self._alive_write = os.pipe()
            opened.callback(_close, self._alive_read, self._alive_write)
            self._progress_fd = _memory("progress", num_workers * PROGRESS_BYTES)
            opened.callback(_close, self._progress_fd)
            self._slot_fds: list[int] = []
            opened.callback(lambda: _close(*self._slot_fds))
            for number in range(num_slots):
                self._slot_fds.append(_memory(f"slot {number}", slot_bytes))
            self._page = mmap.mmap(self._progress_fd, 0)  # our own memory, not a file of the user's
            self._slots = [memoryview(mmap.mmap(fd, 0) if slot_bytes else b"") for fd in self._slot_fds]
            opened.pop_all()
        _spawners.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _close(self._alive_read, self._alive_write, self._progress_fd, *self._slot_fds)
        self._page.close()
        self._slots.clear()  # not closed: a thread that was abandoned may still write there
        self._alive_write = -1

    def memory(self, slot: int) -> memoryview:
        """The bytes of ``slot``.

        :raises WorkerError: if the workers are gone.
        """
        if not self._slots:
            raise WorkerError("the workers are gone, and the slots with them")

        return self._slots[slot]

    def spawn(self, number: int) -> WorkerProcess:
        """A new worker process; it dies with the calling thread.

        :raises WorkerError: if the system has no room for one more.
        """
        try:
            with _no_fork, contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
                sock, their_sock = socket.socketpair()
                ours.callback(sock.close)
                theirs.callback(their_sock.close)
                output, their_output = os.pipe()
                ours.callback(os.close, output)
                theirs.callback(os.close, their_output)
                os.set_blocking(output, False)
                process = self._start(number, their_sock.fileno(), their_output)
                ours.pop_all()
        except OSError as error:
            raise no_room(error) from error

        return WorkerProcess(number, process, Connection(sock), output, self._page)

    def _start(self, number: int, sock_fd: int, output_fd: int) -> subprocess.Popen[bytes]:
        arguments = {
            "path": [os.path.abspath(entry) for entry in sys.path],
            "number": number,
            "parent": os.getpid(),
            "sock_fd": sock_fd,
            "alive_fd": self._alive_read,
            "progress_fd": self._progress_fd,
            "slot_fds": self._slot_fds,
        }
        with _ctrl_c_blocked():
            return subprocess.Popen(
                [sys.executable, "-I", "-c", _BOOT, json.dumps(arguments)],
                pass_fds=(sock_fd, self._alive_read, self._progress_fd, *self._slot_fds),
                stdin=subprocess.DEVNULL,
                stdout=output_fd,
                stderr=output_fd,
                env=os.environ | _ENVIRONMENT,
            )

    def forget_in_child(self) -> None:
        """In a forked child of the trainer: it must not keep the workers alive by keeping the pipe open."""
        if self._alive_write >= 0:
            os.close(self._alive_write)
            self._alive_write = -1


def no_room(error: OSError) -> WorkerError:
    """Why a worker cannot be born."""
    return WorkerError(
        f"AD426 workers cannot be started: {error.strerror}; raise the limit (ulimit -a), or lower num_workers"
    )


_spawners: weakref.WeakSet[Spawner] = weakref.WeakSet()
# A child that another thread forks meanwhile would inherit the pipe by which Popen hears of exec, and Popen would wait
# for as long as that child lives.
_no_fork = threading.RLock()


def _after_fork_in_child() -> None:
    _no_fork.release()
    for spawner in list(_spawners):
        with contextlib.suppress(OSError):
            spawner.forget_in_child()


os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_after_fork_in_child)


@contextlib.contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """A mask survives exec: Ctrl-C cannot end a worker that has not yet learnt to ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def _memory(name: str, num_bytes: int) -> int:
    """Anonymous shared memory that is gone with its last user."""
    fd = os.memfd_create(f"asyncdata {name}")
    os.ftruncate(fd, num_bytes)
    return fd


class WorkerProcess:
    """One worker, from the parent's side. Owns the connection and the pipe of its output."""

    def __init__(
        self, number: int, process: subprocess.Popen[bytes], connection: Connection, output_fd: int, page: mmap.mmap
    ) -> None:
        self.number = number
        self.pid = process.pid
        self.connection = connection
        self._process = process
        self._output_fd = output_fd
        self._output = b""
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

    @property
    def output(self) -> str:
        """The end of what it wrote to stdout and stderr."""
        return self._output.decode("utf-8", "replace")

    async def pump_output(self) -> None:
        """Turn its stdout and stderr into events, until it ends. Unread, a full pipe would stop it."""
        num_events = 0
        while True:
            await anyio.wait_readable(self._output_fd)
            try:
                piece = os.read(self._output_fd, 64 * 1024)
            except BlockingIOError:
                continue

            if not piece:
                return

            self._output = (self._output + piece)[-_OUTPUT_BYTES:]
            num_events += 1
            if num_events <= _MAX_OUTPUT_EVENTS:
                text = piece[-_OUTPUT_BYTES:].decode("utf-8", "replace").rstrip()
                _log.info("worker.output", worker=self.number, pid=self.pid, text=text)

    def kill(self) -> None:
        """End it and close our descriptors; calling this again does nothing."""
        if self._output_fd < 0:
            return

        self._process.kill()
        self.connection.close()
        with contextlib.suppress(OSError):
            self._output = (self._output + os.read(self._output_fd, 64 * 1024))[-_OUTPUT_BYTES:]
        os.close(self._output_fd)
        self._output_fd = -1

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        return self._process.wait()

    def how_it_ended(self) -> str:
        """``exit status 3`` or ``SIGSEGV``."""
        status = self._process.returncode
        if status is None:
            return "still running"

        names = {number.value: number.name for number in signal.Signals}  # not all of the real-time signals
        return names.get(-status, f"signal {-status}") if status < 0 else f"exit status {status}"
