"""How processes of a pool are born by exec, and the descriptors that all of them share."""

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
from typing import TYPE_CHECKING, NamedTuple

from asyncdata.errors import WorkerError
from asyncdata.executors.connection import Connection
from asyncdata.executors.offspring import Executed, WorkerProcess
from asyncdata.executors.worker import PROGRESS_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import Self

    from asyncdata.executors.offspring import Life

__all__ = ("Ends", "Spawner", "new_ends", "no_room")

_BOOT = """\
import json, sys
arguments = json.loads(sys.argv[1])
sys.path[:] = arguments.pop("path")
from asyncdata.executors.{} import main
main(**arguments)
"""
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",  # an `import torch` in a user's function must not make a CUDA context
}


class Ends(NamedTuple):
    """A socket and a pipe for output, between this process and one of the pool.

    :ivar their_fds: the other end of the socket, and of the pipe.
    """

    sock: socket.socket
    output_fd: int
    their_fds: tuple[int, int]

    def close(self) -> None:
        """Close ours."""
        self.sock.close()
        os.close(self.output_fd)


@contextlib.contextmanager
def new_ends() -> Iterator[Ends]:
    """New ends: theirs are closed here when the block is left, and ours as well if it fails.

    Nothing is forked meanwhile: a child that held their ends would hide the end of the process that they are for.

    :raises WorkerError: if the system has no room for them, or for what is done with them.
    """
    try:
        with _no_fork, contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            sock, their_sock = socket.socketpair()
            ours.callback(sock.close)
            theirs.callback(their_sock.close)
            output_fd, their_output_fd = os.pipe()
            ours.callback(os.close, output_fd)
            theirs.callback(os.close, their_output_fd)
            os.set_blocking(output_fd, False)
            yield Ends(sock, output_fd, (their_sock.fileno(), their_output_fd))
            ours.pop_all()
    except OSError as error:
        raise no_room(error) from error


class Spawner:
    """The descriptors that all processes of a pool share, and the making of one more."""

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

    def spawn(self, number: int, greeting: bytes = b"") -> WorkerProcess:
        """A new worker process; it dies with the calling thread.

        :param greeting: its job, to be sent to it.
        :raises WorkerError: if the system has no room for one more.
        """
        with new_ends() as ends:
            return self.worker(number, self.execute("worker", ends, number=number), ends, greeting)

    def worker(self, number: int, life: Life, ends: Ends, greeting: bytes = b"") -> WorkerProcess:
        """The worker that has the other ends of ``ends``."""
        return WorkerProcess(number, life, Connection(ends.sock), ends.output_fd, self._page, greeting)

    def execute(self, module: str, ends: Ends, **more: int) -> Executed:
        """A new interpreter that runs ``main`` of a module of this folder, with the other ends of ``ends``."""
        sock_fd, output_fd = ends.their_fds
        arguments = {
            "path": [os.path.abspath(entry) for entry in sys.path],
            "parent": os.getpid(),
            "sock_fd": sock_fd,
            "alive_fd": self._alive_read,
            "progress_fd": self._progress_fd,
            "slot_fds": self._slot_fds,
        }
        with _ctrl_c_blocked():
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _BOOT.format(module), json.dumps(arguments | more)],
                pass_fds=(sock_fd, self._alive_read, self._progress_fd, *self._slot_fds),
                stdin=subprocess.DEVNULL,
                stdout=output_fd,
                stderr=output_fd,
                env=os.environ | _ENVIRONMENT,
            )
        return Executed(process)

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
