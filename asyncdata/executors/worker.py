"""A worker process: answers requests from its socket until the trainer's process is gone.

It must never outlive its parent, whatever it is doing. Three things see to that: the kernel kills it when the thread
that
spawned it ends (PR_SET_PDEATHSIG); the last write end of a pipe lies in the parent, and its closing sends SIGIO, whose
default action ends even a process that is stuck in C code; and its socket ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import mmap
import os
import signal
import socket
import struct
import sys
import traceback

from asyncdata.executors.handler import Handler
from asyncdata.tokenization.base import open_spec
from asyncdata.wire import HEADER, Failed, Job, Ready, Request, decode_job, decode_request, frame

__all__ = ("PROGRESS", "PROGRESS_BYTES", "main")

PROGRESS = struct.Struct("<Qi")  # the id of the request that is being worked on (0: none), and its row (-1: all)
PROGRESS_BYTES = 64  # one cache line each, so that workers do not disturb one another
_PR_SET_PDEATHSIG = 1


def main(number: int, parent: int, sock_fd: int, alive_fd: int, progress_fd: int, slot_fds: list[int]) -> None:
    """Run worker ``number`` of the process ``parent``, with the descriptors it was born with."""
    _die_with(parent, alive_fd)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # into a pipe, what a user prints would come late, or never
    sock = socket.socket(fileno=sock_fd)
    page = mmap.mmap(progress_fd, 0)  # our own memory, not a file of the user's
    slots = [memoryview(mmap.mmap(fd, 0)) if os.fstat(fd).st_size else memoryview(b"") for fd in slot_fds]
    try:
        _serve(sock, slots, _Progress(page, number * PROGRESS_BYTES))
    except (EOFError, ConnectionError):
        pass  # the parent closed the socket, or is gone
    os._exit(0)  # nothing to tidy up, and a user's threads or exit hooks must not keep us


def _die_with(parent: int, alive_fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGIO])  # a mask survives exec
    # Opened anew: who gets the signal is a property of the open file, which all workers would share.
    alive_fd = os.open(f"/proc/self/fd/{alive_fd}", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(alive_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive_fd, fcntl.F_SETFL, fcntl.fcntl(alive_fd, fcntl.F_GETFL) | os.O_ASYNC)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we listened
        os._exit(0)


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


def _serve(sock: socket.socket, slots: list[memoryview], progress: _Progress) -> None:
    _, body = _receive(sock)
    handler = _open(sock, decode_job(body), slots, progress)
    while True:
        request_id, body = _receive(sock)
        progress.begin(request_id)
        request: Request = decode_request(body)
        reply = handler(request)
        progress.begin(0)
        sock.sendall(frame(request_id, reply))


def _open(sock: socket.socket, job: Job, slots: list[memoryview], progress: _Progress) -> Handler:
    try:
        if job.tokenize is None:
            raise ValueError("a worker needs a tokenize function that can be imported")

        tokenizer = open_spec(job.tokenize)
    except BaseException as error:  # also SystemExit: whatever a user's module does at import
        message = f"AD426 the tokenize function cannot be opened: {error!r}"
        sock.sendall(frame(0, Failed("WorkerError", message, traceback.format_exc())))
        raise EOFError from error

    sock.sendall(frame(0, Ready(os.getpid())))
    return Handler(job, slots, tokenizer, progress)


def _receive(sock: socket.socket) -> tuple[int, bytes]:
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
