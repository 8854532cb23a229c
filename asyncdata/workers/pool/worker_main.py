"""A worker process: answers requests from its socket until the trainer's process is gone.

It must never outlive the trainer, whatever it is doing. Three mechanisms ensure that. The kernel kills it when the
thread that started it ends (PR_SET_PDEATHSIG). The trainer holds the only write end of a pipe; when that closes, the
kernel sends SIGIO, whose default action ends even a process that is stuck in C code. And its socket closes.
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
from asyncdata.core.messages import Failed, Ready, Request, Short, decode_request
from asyncdata.core.parent import end_with_parent
from asyncdata.core.read_counts import READ_COUNTS, ReadCounts
from asyncdata.core.shortage import is_shortage
from asyncdata.core.user_traceback import user_traceback
from asyncdata.tokenization.base import open_spec
from asyncdata.tokenization.encoders import idle_work
from asyncdata.workers.part_handler import handler_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asyncdata.core.messages import Data, Job
    from asyncdata.core.specs import TokenizeSpec
    from asyncdata.tokenization.base import BatchTokenizer

__all__ = (
    "PROGRESS",
    "PROGRESS_BYTES",
    "STATUS_SHORT",
    "Opened",
    "SharedMemory",
    "die_with",
    "open_or_report",
    "read_counts_at",
    "line_buffer_output",
    "receive",
    "send_pieces",
    "serve",
    "exit_at_end",
)

PROGRESS = struct.Struct("<Qi")  # the id of the request that is being worked on (0: none), and its row (-1: all)
PROGRESS_BYTES = 64  # one cache line each, so that workers do not disturb one another
_COUNTS_AT = 16
STATUS_SHORT = os.EX_TEMPFAIL
"""Exit status of a process of the pool that ran out of a system resource: no row is to blame."""
_PAUSE_MS = 250
"""No request for so long: the read-ahead is full (four chunks for each worker), so idle work may run, even if it takes
longer than this."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@contextlib.contextmanager
def exit_at_end() -> Iterator[None]:
    """Exit the process after the block, without cleanup: threads or exit hooks of a user could keep it alive.

    The end of the socket is the normal end.
    """
    try:
        yield
    except (EOFError, ConnectionError):  # the other end closed it, or is gone
        pass
    except BaseException as error:
        traceback.print_exc()
        os._exit(STATUS_SHORT if is_shortage(error) else 1)
    os._exit(0)


def line_buffer_output() -> None:
    """Write stdout line by line: in the block buffer of a pipe, a user's output would arrive late, or never."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def die_with(parent: int, alive_fd: int) -> int:
    """End this process when the process ``parent`` ends, and when the last writer of the pipe ``alive_fd`` closes it.

    :return: a descriptor of that pipe with an open file description of its own.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGIO])  # a mask survives exec
    # A second open: the receiver of the signal belongs to the open file description, which all workers would share.
    own_fd = os.open(f"/proc/self/fd/{alive_fd}", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(own_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own_fd, fcntl.F_SETFL, fcntl.fcntl(own_fd, fcntl.F_GETFL) | os.O_ASYNC)
    end_with_parent(parent)
    if _has_ended(own_fd):  # before the signal was enabled
        os._exit(0)
    return own_fd


def _has_ended(pipe_fd: int) -> bool:
    try:
        return os.read(pipe_fd, 1) == b""
    except BlockingIOError:
        return False


class SharedMemory(NamedTuple):
    """The memory that all workers of a pool map: the page of their progress, and the slots."""

    page: mmap.mmap
    slots: list[memoryview]

    @classmethod
    def of(cls, progress_fd: int, slot_fds: list[int], num_parts: int = 1) -> SharedMemory:
        """Map it. These are anonymous files of asyncdata, not files of the user. Each has a slot for each part."""
        memory = [memoryview(mmap.mmap(fd, 0)) if os.fstat(fd).st_size else memoryview(b"") for fd in slot_fds]
        slots = []
        for view in memory:
            size = len(view) // num_parts
            slots += [view[part * size : (part + 1) * size] for part in range(num_parts)]
        return cls(mmap.mmap(progress_fd, 0), slots)


def open_or_report(sock: socket.socket, spec: TokenizeSpec | None) -> BatchTokenizer:
    """Load the tokenize function. If that fails, report it through ``sock``: as :class:`Short` if the system has run
    out of a resource, else as :class:`Failed`.

    :raises EOFError: after a failure was reported.
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
    """What a worker needs to answer requests."""

    job: Job
    tokenizer: BatchTokenizer
    memory: SharedMemory


class _Progress:
    """Shows the parent, through shared memory, the current request and row."""

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
    """Run worker ``number``: announce that it is ready, and answer requests.

    :raises EOFError: when the socket ends.
    """
    _keep_freed_memory()
    _use_batch_scheduling()
    progress = _Progress(opened.memory.page, number * PROGRESS_BYTES)
    sock.sendall(frame(0, Ready(os.getpid())))
    start = read_counts_at(number)
    counts = ReadCounts(memoryview(opened.memory.page)[start : start + READ_COUNTS.size])
    handler = handler_of(opened.job, opened.memory.slots, opened.tokenizer, progress, counts)
    while True:
        if idle_work.is_awaited() and _is_quiet(sock):
            idle_work.pause()
        request_id, body = receive(sock)
        progress.begin(request_id)
        request: Request = decode_request(body)
        reply = handler(request)
        progress.begin(0)
        send_pieces(sock, pieces(request_id, reply))


def read_counts_at(number: int) -> int:
    """Where the page has the counts of requests to stores, of all workers that had this number: by their progress."""
    return number * PROGRESS_BYTES + _COUNTS_AT


def _is_quiet(sock: socket.socket) -> bool:
    """True if no request arrives for 250 ms: the read-ahead is probably full."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return not poll.poll(_PAUSE_MS)


def send_pieces(sock: socket.socket, data: Sequence[Data | bytearray]) -> None:
    """Send all of ``data``; normally in one system call."""
    left = sum(map(len, data)) - sock.sendmsg(data)
    if left:
        sock.sendall(b"".join(data)[-left:])


def _keep_freed_memory() -> None:
    """Keep freed memory for the next reply. The C library would return it to the system each time, and every page would
    fault again. Glibc only; other C libraries have no such function.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)


def _use_batch_scheduling() -> None:
    """Do not preempt the trainer when this worker wakes up. It could be in a call, or run the thread that all workers
    wait for. The worker still gets its share of the CPU. Linux only.

    Measured with two workers and a trainer on two CPUs, where the trainer takes half of the rows per second that are
    possible: the 99.9th percentile of its calls was 0.22 ms instead of 2 to 16 ms; rows/s at full speed did not change.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # where a sandbox forbids it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def receive(sock: socket.socket) -> tuple[int, bytes]:
    """The next frame: its request id and body.

    :raises EOFError: if the socket has ended.
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
