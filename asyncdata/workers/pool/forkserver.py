"""The fork server: a process that loads the tokenize function once, and is forked for each worker.

It has one thread, and no descriptor through which its children could disturb one another. If the tokenize function has
started a thread or opened a descriptor, the fork server shares nothing and becomes a worker itself. It ends as a worker
does (see :mod:`asyncdata.workers.pool.worker_main`), and its workers end with it.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from asyncdata.core.import_path import resolve_path
from asyncdata.core.messages import decode_job, decode_spec
from asyncdata.tokenization.encoders.fast_backends import give_back_memory
from asyncdata.workers.pool.forkserver_messages import (
    COMMAND,
    FORK,
    MAX_FDS,
    ForkedWorker,
    Loaded,
    NotForked,
    Reaped,
    framed,
)
from asyncdata.workers.pool.worker_main import (
    Opened,
    SharedMemory,
    die_with,
    exit_at_end,
    line_buffer_output,
    open_or_report,
    receive,
    serve,
)

if TYPE_CHECKING:
    from asyncdata.tokenization.base import BatchTokenizer
    from asyncdata.workers.pool.forkserver_messages import Answer

__all__ = ("descriptors", "main", "why_not_shared")

_FORK_FDS = 2


def main(parent: int, sock_fd: int, alive_fd: int) -> None:
    """Run the fork server of the process ``parent``, with the descriptors that it inherited."""
    with exit_at_end():
        own_alive_fd = die_with(parent, alive_fd)
        line_buffer_output()
        control = socket.socket(fileno=sock_fd)
        before = descriptors()
        tokenizer = open_or_report(control, decode_spec(receive(control)[1]))
        reason = why_not_shared(before)
        control.sendall(framed(Loaded(reason)))
        opened = _share(control, tokenizer)
        if reason:
            _become_a_worker(control, opened)
        else:
            _ForkLoop(control, opened, alive_fd, own_alive_fd).run()


def descriptors() -> set[str]:
    """The open descriptors as "number (target)", so that a reused number with another target counts as new."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} ({os.readlink(f'/proc/self/fd/{fd}')})")
        except OSError:  # the descriptor that listed the folder
            continue
    return found


def why_not_shared(before: set[str]) -> str:
    """Why this process cannot be forked safely; empty if it can.

    :param before: the descriptors that were open before the tokenize function was opened.
    """
    try:
        _check_pidfd()
    except (AttributeError, OSError) as error:  # an old kernel, or a container that forbids it
        return f"a process cannot be identified by a pidfd here: {error}"

    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads > 1:
        return f"the tokenize function has started threads: there are {num_threads}"

    opened = sorted(descriptors() - before)
    return f"the tokenize function keeps open descriptor {opened[0]}" if opened else ""


def _check_pidfd() -> None:
    """Try the calls by which the trainer ends a worker that is not its own child.

    :raises OSError: if the kernel or the container forbids them.
    :raises AttributeError: if Python was built without them.
    """
    pidfd = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(pidfd, 0)
    finally:
        os.close(pidfd)


def _share(control: socket.socket, tokenizer: BatchTokenizer) -> Opened:
    """Receive what workers need besides the tokenize function."""
    _, _, fds = _receive_command(control)
    job = decode_job(receive(control)[1])
    opened = Opened(job, tokenizer, SharedMemory.of(fds[0], fds[1:], max(1, len(job.parts))))
    for fd in fds:
        os.close(fd)
    return opened


def _become_a_worker(control: socket.socket, opened: Opened) -> None:
    """Become the first worker that is requested. The fork server's socket is closed."""
    _, number, fds = _receive_command(control)
    control.close()
    _work(number, fds, opened)


def _work(number: int, fds: list[int], opened: Opened) -> None:
    """Run worker ``number``, with the descriptors of its socket and its output."""
    sock_fd, output_fd = fds
    for standard in (1, 2):
        os.dup2(output_fd, standard)
    os.close(output_fd)
    serve(number, socket.socket(fileno=sock_fd), opened)


def _receive_command(control: socket.socket) -> tuple[int, int, list[int]]:
    """The next command: its operation, its argument, and the descriptors that came with it."""
    data = b""
    fds: list[int] = []
    while len(data) < COMMAND.size:
        room = COMMAND.size - len(data)
        piece, more, _, _ = socket.recv_fds(control, room, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        if not piece:
            raise EOFError

        data, fds = data + piece, fds + more
    operation, argument = COMMAND.unpack(data)
    return operation, argument, fds


class _ForkLoop:
    """Forks and reaps workers on command."""

    def __init__(self, control: socket.socket, opened: Opened, alive_fd: int, own_alive_fd: int) -> None:
        self._control = control
        self._opened = opened
        self._alive_fd = alive_fd
        self._own_alive_fd = own_alive_fd
        self._libc = ctypes.CDLL(None)
        self._pid = os.getpid()
        self._workers: set[int] = set()

    def run(self) -> None:
        for job in (self._opened.job, *self._opened.job.parts):
            resolve_path(job.reader.path)  # imported once, for all workers
        gc.collect()
        give_back_memory()  # free memory: each worker would get a copy of its pages as soon as it writes
        gc.freeze()  # without it, the first collection in a worker would copy every page that it visits
        try:
            while True:
                operation, argument, fds = _receive_command(self._control)
                answer = self._fork(argument, fds) if operation == FORK else self._reap(argument)
                for fd in fds:
                    os.close(fd)
                self._control.sendall(framed(answer))
        finally:
            if os.getpid() == self._pid:
                self._end_workers()

    def _fork(self, number: int, fds: list[int]) -> Answer:
        """Fork a worker. Memory is shared with it until one side writes to a page."""
        if len(fds) < _FORK_FDS:
            return NotForked(errno.EMFILE)

        self._flush()
        try:
            pid = os.fork()
        except OSError as error:
            return NotForked(error.errno or errno.EAGAIN)

        if pid == 0:
            with exit_at_end():
                self._init_child()
                _work(number, fds, self._opened)
        self._workers.add(pid)
        return ForkedWorker(pid)

    def _flush(self) -> None:
        """Flush what is buffered, so that no worker prints it again."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._libc.fflush(None)

    def _init_child(self) -> None:
        """Set up the forked worker: its signals, its descriptors and its random generator."""
        die_with(self._pid, self._alive_fd)
        os.close(self._own_alive_fd)
        self._control.close()
        if (numpy_random := sys.modules.get("numpy.random")) is not None:
            numpy_random.seed()  # Python reseeds its own generator after a fork

    def _reap(self, pid: int) -> Answer:
        """Reap a worker that has ended. Until then the system does not reuse its pid."""
        if pid not in self._workers:
            return Reaped(None)

        self._workers.discard(pid)
        return Reaped(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def _end_workers(self) -> None:
        for pid in self._workers:
            os.kill(pid, signal.SIGKILL)
        for pid in self._workers:
            os.waitpid(pid, 0)
