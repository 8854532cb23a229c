"""A worker process: answers requests from its socket until the trainer's process is gone.

It must never outlive the trainer, whatever it is doing. Three things see to that: the kernel kills it when the thread
that made it ends (PR_SET_PDEATHSIG); the last write end of a pipe lies in the trainer, and its closing sends SIGIO,
whose default action ends even a process that is stuck in C code; and its socket ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import mmap
import os
import select
import signal
import socket
import struct
import sys
import traceback
from typing import TYPE_CHECKING, NamedTuple

from asyncdata.core.framing import HEADER, frame, pieces
from asyncdata.core.messages import Failed, Job, Ready, Request, Short, decode_job, decode_request
from asyncdata.core.shortage import is_shortage
from asyncdata.core.user_traceback import user_traceback
from asyncdata.tokenization.base import open_spec
from asyncdata.tokenization.encoders import idle_work
from asyncdata.workers.pool.parent import end_with_parent
from asyncdata.workers.request_handler import Handler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asyncdata.core.messages import Data
    from asyncdata.core.specs import TokenizeSpec
    from asyncdata.tokenization.base import BatchTokenizer

__all__ = (
    "PROGRESS",
    "PROGRESS_BYTES",
    "STATUS_SHORT",
    "Opened",
    "SharedMemory",
    "die_with",
    "main",
    "open_or_tell",
    "print_by_the_line",
    "receive",
    "send_pieces",
    "serve",
    "to_the_end",
)

PROGRESS = struct.Struct("<Qi")  # the id of the request that is being worked on (0: none), and its row (-1: all)
PROGRESS_BYTES = 64  # one cache line each, so that workers do not disturb one another
STATUS_SHORT = os.EX_TEMPFAIL
"""How a process of the pool ends by itself when the system has no more of something: no row is to blame."""
_PAUSE_MS = 250
"""What is done in it may take longer. But who asks so seldom has enough read ahead: four chunks for each worker."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def main(number: int, parent: int, sock_fd: int, alive_fd: int, progress_fd: int, slot_fds: list[int]) -> None:
    """Run worker ``number`` of the process ``parent``, with the descriptors it was born with."""
    with to_the_end():
        die_with(parent, alive_fd)
        print_by_the_line()
        sock, memory = socket.socket(fileno=sock_fd), SharedMemory.of(progress_fd, slot_fds)
        job = decode_job(receive(sock)[1])
        serve(number, sock, Opened(job, open_or_tell(sock, job.tokenize), memory))


@contextlib.contextmanager
def to_the_end() -> Iterator[None]:
    """Nothing comes behind this: no tidying up, and no threads or exit hooks of a user's that could keep the process.

    The end of the socket is the end that is meant.
    """
    try:
        yield
    except (EOFError, ConnectionError):  # the other end closed it, or is gone
        pass
    except BaseException as error:
        traceback.print_exc()
        os._exit(STATUS_SHORT if is_shortage(error) else 1)
    os._exit(0)


def print_by_the_line() -> None:
    """Into a pipe, what a user prints would come late, or never."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def die_with(parent: int, alive_fd: int) -> int:
    """End with the process ``parent``, and with the last writer of the pipe ``alive_fd``.

    :return: a descriptor of that pipe that is this process's own.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGIO])  # a mask survives exec
    # Opened anew: who gets the signal is a property of the open file, which all workers would share.
    own_fd = os.open(f"/proc/self/fd/{alive_fd}", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(own_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own_fd, fcntl.F_SETFL, fcntl.fcntl(own_fd, fcntl.F_GETFL) | os.O_ASYNC)
    end_with_parent(parent)
    if _has_ended(own_fd):  # before we listened
        os._exit(0)
    return own_fd


def _has_ended(pipe_fd: int) -> bool:
    try:
        return os.read(pipe_fd, 1) == b""
    except BlockingIOError:
        return False


class SharedMemory(NamedTuple):
    """What all workers of a pool map: where each tells its progress, and the slots."""

    page: mmap.mmap
    slots: list[memoryview]

    @classmethod
    def of(cls, progress_fd: int, slot_fds: list[int]) -> SharedMemory:
        """Mapped here; our own memory, not files of the user's."""
        slots = [memoryview(mmap.mmap(fd, 0)) if os.fstat(fd).st_size else memoryview(b"") for fd in slot_fds]
        return cls(mmap.mmap(progress_fd, 0), slots)


def open_or_tell(sock: socket.socket, spec: TokenizeSpec | None) -> BatchTokenizer:
    """The tokenize function, loaded. Where that cannot be done, the other end is told; where the system is short of
    something, as a :class:`Short`.

    :raises EOFError: then.
    """
    try:
        if spec is None:
            raise ValueError("a worker needs a tokenize function that can be imported")

        return open_spec(spec)
    except BaseException as error:  # also SystemExit: whatever a user's module does at import
        message, trace = f"AD426 the tokenize function cannot be opened: {error!r}", user_traceback(error)
        sock.sendall(frame(0, Short(message, trace) if is_shortage(error) else Failed("WorkerError", message, trace)))
        raise EOFError from error


class Opened(NamedTuple):
    """All that a worker works with."""

    job: Job
    tokenizer: BatchTokenizer
    memory: SharedMemory


class _Progress:
    """Tells the parent, through shared memory, which request and row is being worked on."""

    def __init__(self, page: mmap.mmap, offset: int) -> None:
        self._page = page
        self._offset = offset
        self._request_id = 0

    def begin(self, request_id: int) -> None:
        self._request_id = request_id
        self(-1)

    def __call__(self, row: int) -> None:
        PROGRESS.pack_into(self._page, self._offset, self._request_id, row)


def serve(number: int, sock: socket.socket, opened: Opened) -> None:
    """Be worker ``number``: announce it, and answer requests.

    :raises EOFError: when the socket ends.
    """
    _keep_freed_memory()
    _let_the_trainer_go_first()
    progress = _Progress(opened.memory.page, number * PROGRESS_BYTES)
    sock.sendall(frame(0, Ready(os.getpid())))
    handler = Handler(opened.job, opened.memory.slots, opened.tokenizer, progress)
    while True:
        if idle_work.is_awaited() and _is_quiet(sock):
            idle_work.pause()
        request_id, body = receive(sock)
        progress.begin(request_id)
        request: Request = decode_request(body)
        reply = handler(request)
        progress.begin(0)
        send_pieces(sock, pieces(request_id, reply))


def _is_quiet(sock: socket.socket) -> bool:
    """Whether nothing is asked for a while: who waits for what comes next has enough of it, most likely."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return not poll.poll(_PAUSE_MS)


def send_pieces(sock: socket.socket, data: Sequence[Data | bytearray]) -> None:
    """All of ``data``: in one call, if nothing comes between."""
    left = sum(map(len, data)) - sock.sendmsg(data)
    if left:
        sock.sendall(b"".join(data)[-left:])


def _keep_freed_memory() -> None:
    """Have the memory of one reply serve for the next: the C library would give it back to the system each time, and
    every page of it would fault again. Glibc only; others have no such function.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)


def _let_the_trainer_go_first() -> None:
    """A worker that has something to do again need not interrupt who runs on its CPU, which may be the trainer in a
    call, or the thread that all workers wait for: it has its share of the CPU all the same. Linux only.

    Two workers and a trainer on two CPUs that takes half of what there is at most: the 99.9th percentile of its calls
    was 0.22 ms in place of 2 to 16, and rows/s at full speed were the same.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # where a sandbox forbids it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def receive(sock: socket.socket) -> tuple[int, bytes]:
    """The next frame: its request id and body.

    :raises EOFError: if there is none.
    """
    length, request_id = HEADER.unpack(_exactly(sock, HEADER.size))
    return request_id, _exactly(sock, length)


def _exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        received = sock.recv_into(view, len(view), socket.MSG_WAITALL)
        if not received:
            raise EOFError

        view = view[received:]
    return bytes(data)
