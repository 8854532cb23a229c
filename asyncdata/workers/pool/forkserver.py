"""The template of the workers: a process that loads the tokenize function once, and is forked for each worker.

It has one thread, and no descriptor by which its children could disturb one another; where the tokenize function has
opened or started one, it shares nothing, and becomes a worker itself. It ends as a worker does (see
:mod:`asyncdata.workers.pool.worker_main`), and its workers end with it.
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
from asyncdata.workers.pool.forkserver_messages import COMMAND, FORK, MAX_FDS, Born, Loaded, NotBorn, Reaped, framed
from asyncdata.workers.pool.worker_main import (
    Opened,
    SharedMemory,
    die_with,
    open_or_tell,
    print_by_the_line,
    receive,
    serve,
    to_the_end,
)

if TYPE_CHECKING:
    from asyncdata.tokenization.base import BatchTokenizer
    from asyncdata.workers.pool.forkserver_messages import Answer

__all__ = ("descriptors", "main", "why_not_shared")

_FORK_FDS = 2


def main(parent: int, sock_fd: int, alive_fd: int) -> None:
    """Run the template of the workers of the process ``parent``, with the descriptors it was born with."""
    with to_the_end():
        own_alive_fd = die_with(parent, alive_fd)
        print_by_the_line()
        control = socket.socket(fileno=sock_fd)
        before = descriptors()
        tokenizer = open_or_tell(control, decode_spec(receive(control)[1]))
        reason = why_not_shared(before)
        control.sendall(framed(Loaded(reason)))
        opened = _share(control, tokenizer)
        if reason:
            _become_a_worker(control, opened)
        else:
            _Template(control, opened, alive_fd, own_alive_fd).run()


def descriptors() -> set[str]:
    """What is open, by number and name: another file under an old number is another one."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} ({os.readlink(f'/proc/self/fd/{fd}')})")
        except OSError:  # that by which the list was read
            continue
    return found


def why_not_shared(before: set[str]) -> str:
    """Why this process cannot be forked without harm; nothing if it can.

    :param before: the descriptors that were open before the tokenize function was.
    """
    try:
        _name_a_process()
    except (AttributeError, OSError) as error:  # an old kernel, or a container that forbids it
        return f"a process cannot be named for certain here: {error}"

    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads > 1:
        return f"the tokenize function has started threads: there are {num_threads}"

    opened = sorted(descriptors() - before)
    return f"the tokenize function keeps open descriptor {opened[0]}" if opened else ""


def _name_a_process() -> None:
    """What the trainer has to do to end a worker that is not its child.

    :raises OSError: if that is not to be had; AttributeError if Python was built without it.
    """
    pidfd = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(pidfd, 0)
    finally:
        os.close(pidfd)


def _share(control: socket.socket, tokenizer: BatchTokenizer) -> Opened:
    """What workers need besides the tokenize function."""
    _, _, fds = _receive_command(control)
    job = decode_job(receive(control)[1])
    opened = Opened(job, tokenizer, SharedMemory.of(fds[0], fds[1:]))
    for fd in fds:
        os.close(fd)
    return opened


def _become_a_worker(control: socket.socket, opened: Opened) -> None:
    """The first to be asked for. The template's socket ends with that."""
    _, number, fds = _receive_command(control)
    control.close()
    _work(number, fds, opened)


def _work(number: int, fds: list[int], opened: Opened) -> None:
    """Be worker ``number``, with the descriptors that it was given."""
    sock_fd, output_fd = fds
    for standard in (1, 2):
        os.dup2(output_fd, standard)
    os.close(output_fd)
    serve(number, socket.socket(fileno=sock_fd), opened)


def _receive_command(control: socket.socket) -> tuple[int, int, list[int]]:
    """What is to be done, for which worker, and with which descriptors."""
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


class _Template:
    """Forks a worker when it is told to, and waits for the end of one when it is told to."""

    def __init__(self, control: socket.socket, opened: Opened, alive_fd: int, own_alive_fd: int) -> None:
        self._control = control
        self._opened = opened
        self._alive_fd = alive_fd
        self._own_alive_fd = own_alive_fd
        self._libc = ctypes.CDLL(None)
        self._pid = os.getpid()
        self._workers: set[int] = set()

    def run(self) -> None:
        resolve_path(self._opened.job.reader.path)  # the module that every worker needs next
        gc.collect()
        give_back_memory()  # what workers fill anew need not be kept here
        gc.freeze()  # or the first collection in a worker would copy all that it looks at
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
        """Born with the template's memory as it is: that is shared until somebody writes to it."""
        if len(fds) < _FORK_FDS:
            return NotBorn(errno.EMFILE)

        self._flush()
        try:
            pid = os.fork()
        except OSError as error:
            return NotBorn(error.errno or errno.EAGAIN)

        if pid == 0:
            with to_the_end():
                self._begin_life()
                _work(number, fds, self._opened)
        self._workers.add(pid)
        return Born(pid)

    def _flush(self) -> None:
        """What was printed so far must not be printed by each worker again."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._libc.fflush(None)

    def _begin_life(self) -> None:
        """In the worker: what a process of its own has of its own."""
        die_with(self._pid, self._alive_fd)
        os.close(self._own_alive_fd)
        self._control.close()
        if (numpy_random := sys.modules.get("numpy.random")) is not None:
            numpy_random.seed()  # Python sees to that of its own

    def _reap(self, pid: int) -> Answer:
        """Until then the system gives its pid to nobody else."""
        if pid not in self._workers:
            return Reaped(None)

        self._workers.discard(pid)
        return Reaped(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def _end_workers(self) -> None:
        for pid in self._workers:
            os.kill(pid, signal.SIGKILL)
        for pid in self._workers:
            os.waitpid(pid, 0)
