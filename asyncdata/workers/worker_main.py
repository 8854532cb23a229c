"""What runs in the processes of a pool: the fork server, which opens the tokenize function once, and its workers.

The fork server has one thread, and no descriptor through which its children could disturb one another. If the tokenize
function has started a thread or opened a descriptor, it shares nothing and becomes a worker itself. A worker answers
requests from its socket.

None must ever outlive the trainer, whatever it is doing. Three mechanisms ensure that. The kernel kills the fork server
when the thread that started it ends, and the workers when the fork server ends (PR_SET_PDEATHSIG). The trainer holds
the only write end of a pipe; when that closes, the kernel sends SIGIO, whose default action ends even a process that is
stuck in C code. And their sockets close.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import io
import mmap
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Never

from asyncdata.core.errors import is_shortage
from asyncdata.core.messages import (
    HEADER,
    READ_COUNTS,
    Data,
    Job,
    ReadCounts,
    Ready,
    Request,
    Tokenize,
    TokenizeSpec,
    decode_job,
    decode_request,
    decode_spec,
    frame,
    pieces,
)
from asyncdata.core.settings import resolve_path
from asyncdata.core.threads import end_with_parent
from asyncdata.tokenization.base import BatchTokenizer, open_spec
from asyncdata.tokenization.encoders.fast_backends import do_idle_work, do_when_idle, give_back_memory, has_idle_work
from asyncdata.workers.base import (
    COMMAND,
    FORK,
    MAX_FDS,
    PROGRESS,
    PROGRESS_BYTES,
    STATUS_SHORT,
    Answer,
    ForkedWorker,
    Loaded,
    NotForked,
    Reaped,
    read_counts_at,
)
from asyncdata.workers.request_handler import Handler, not_opened

_FORK_FDS = 2
_PAUSE_MS = 250
"""No request for so long: the read-ahead is full (four chunks for each worker), so idle work may run, even if it takes
longer than this."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_KEPT_BYTES, _KEPT_BYTES_OF_MEDIA = 64 << 20, 512 << 20


def main(parent: int, sock_fd: int, alive_fd: int) -> None:
    """Run the fork server of the process ``parent``, with the descriptors that it inherited."""
    with _exit_at_end():
        own_alive_fd = _die_with(parent, alive_fd)
        _line_buffer_output()
        control = socket.socket(fileno=sock_fd)
        before = descriptors()
        tokenizer = open_or_report(control, decode_spec(receive(control)[1]))
        reason = why_not_shared(before)
        control.sendall(frame(0, Loaded(reason)))
        opened = _share(control, tokenizer)
        if not reason:
            _ForkLoop(control, opened, alive_fd, own_alive_fd).run()

        _, number, fds = _receive_command(control)
        control.close()
        _work(number, fds, opened)  # it becomes the first worker that is requested


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


class _Opened(NamedTuple):
    """What a worker needs to answer requests.

    :ivar page: the page of the workers' progress, which all of them map, as they do the slots.
    """

    job: Job
    tokenizer: BatchTokenizer
    page: mmap.mmap
    slots: list[memoryview]


def _share(control: socket.socket, tokenizer: BatchTokenizer) -> _Opened:
    """Receive what workers need besides the tokenize function. What is mapped are anonymous files of asyncdata, not
    files of the user; each has a slot for each part of a mixture.
    """
    _, _, (progress_fd, *slot_fds) = _receive_command(control)
    job = decode_job(receive(control)[1])
    num_parts, slots = max(1, len(job.parts)), list[memoryview]()
    for fd in slot_fds:
        memory = memoryview(mmap.mmap(fd, 0) if os.fstat(fd).st_size else b"")
        size = len(memory) // num_parts
        slots += [memory[part * size : (part + 1) * size] for part in range(num_parts)]
    page = mmap.mmap(progress_fd, 0)
    for fd in (progress_fd, *slot_fds):
        os.close(fd)
    return _Opened(job, tokenizer, page, slots)


def _work(number: int, fds: list[int], opened: _Opened) -> None:
    """Run worker ``number``, with the descriptors of its socket and its output."""
    sock_fd, output_fd = fds
    for standard in (1, 2):
        os.dup2(output_fd, standard)
    os.close(output_fd)
    _serve(number, socket.socket(fileno=sock_fd), opened)


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

    def __init__(self, control: socket.socket, opened: _Opened, alive_fd: int, own_alive_fd: int) -> None:
        self._control = control
        self._opened = opened
        self._alive_fd = alive_fd
        self._own_alive_fd = own_alive_fd
        self._libc = ctypes.CDLL(None)
        self._pid = os.getpid()
        self._workers: set[int] = set()

    def run(self) -> Never:
        """Run until the socket ends.

        :raises EOFError: then.
        """
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
                self._control.sendall(frame(0, answer))
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
            with _exit_at_end():
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
        _die_with(self._pid, self._alive_fd)
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


@contextlib.contextmanager
def _exit_at_end() -> Iterator[None]:
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


def _line_buffer_output() -> None:
    """Write stdout line by line: in the block buffer of a pipe, a user's output would arrive late, or never."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def _die_with(parent: int, alive_fd: int) -> int:
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
        sock.sendall(frame(0, not_opened(error)))
        raise EOFError from error


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


def _serve(number: int, sock: socket.socket, opened: _Opened) -> None:
    """Run worker ``number``: announce that it is ready, and answer requests.

    :raises EOFError: when the socket ends.
    """
    _keep_freed_memory(_KEPT_BYTES)
    _use_batch_scheduling()
    progress = _Progress(opened.page, number * PROGRESS_BYTES)
    sock.sendall(frame(0, Ready(os.getpid())))
    start = read_counts_at(number)
    counts = ReadCounts(memoryview(opened.page)[start : start + READ_COUNTS.size])
    handler = Handler(opened.job, opened.slots, opened.tokenizer, progress, counts)
    if opened.job.keeps_blocks:
        signal.signal(signal.SIGTERM, lambda *_: _finish(handler))
    freed = _FreedMemory()
    while True:
        if has_idle_work() and _is_quiet(sock):
            do_idle_work()
        request_id, body = receive(sock)
        progress.begin(request_id)
        request: Request = decode_request(body)
        if isinstance(request, Tokenize) and request.is_load:
            _keep_freed_memory(_KEPT_BYTES_OF_MEDIA, maps_blocks=False)
            do_when_idle(freed)
        reply = handler(request)
        progress.begin(0)
        send_pieces(sock, pieces(request_id, reply))


def _finish(handler: Handler) -> None:
    """End when what was read is on the disk."""
    handler.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)


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


class _FreedMemory:
    """What the loading of media has freed and kept."""

    def on_pause(self) -> None:
        """Give it back."""
        give_back_memory()


def _keep_freed_memory(num_bytes: int, *, maps_blocks: bool = True) -> None:
    """Keep freed memory for the next reply. The C library would return it to the system each time, and every page would
    fault again. Glibc only; other C libraries have no such function.

    :param num_bytes: the most that is kept.
    :param maps_blocks: whether blocks of over 32 MB are mapped, and so never kept. A processor makes and frees several
        such blocks a video; measured on videos of 54 MB of pixels, their page faults were a third of its CPU time.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, num_bytes)
        if not maps_blocks:
            mallopt(_M_MMAP_MAX, 0)


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
