"""The parent's end of a worker's socket: whole frames, in as few system calls as possible.

Beside a busy Python trainer every return from a call that released the GIL may wait 5 ms. So a frame costs one wait and
one or two receives, and a send never waits: no more than two small requests are ever on their way to a worker.
"""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING

import anyio

from asyncdata.errors import WorkerError
from asyncdata.wire import HEADER, MAX_FRAME_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ("Connection",)

_BUFFER_BYTES = 256 * 1024
_STALLED = struct.pack("ll", 0, 20_000)  # 20 ms: a worker stopped in the middle of a frame must not stop the loop


class Connection:
    """Owns ``sock``."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _STALLED)
        self._sock = sock
        self._buffer = bytearray(_BUFFER_BYTES)
        self._start = self._end = 0

    async def send_first(self, data: bytes) -> None:
        """Send ``data``, however long, to a worker that may still be starting."""
        view = memoryview(data)
        while view:
            await anyio.wait_writable(self._sock)
            view = view[self._sock.send(view, socket.MSG_DONTWAIT) :]

    def send(self, data: bytes) -> None:
        """Send a request.

        :raises OSError: if the worker is gone, or its socket full against all expectation.
        """
        if self._sock.send(data, socket.MSG_DONTWAIT) != len(data):
            raise BrokenPipeError("a worker's socket took only a part of a request")

    def send_with(self, data: bytes, fds: Sequence[int]) -> None:
        """Send ``data`` and descriptors, which the other end gets as its own.

        :raises OSError: as :meth:`send` does.
        """
        if socket.send_fds(self._sock, [data], fds, socket.MSG_DONTWAIT) != len(data):
            raise BrokenPipeError("a template's socket took only a part of a command")

    async def receive(self) -> tuple[int, bytes]:
        """The next frame: its request id and body.

        :raises EOFError: if the worker is gone.
        """
        while (found := self._next()) is None:
            await anyio.wait_readable(self._sock)
            self._read()
        return found

    def _next(self) -> tuple[int, bytes] | None:
        if self._missing():
            return None

        length, request_id = HEADER.unpack_from(self._buffer, self._start)
        begin = self._start + HEADER.size
        body = bytes(memoryview(self._buffer)[begin : begin + length])
        self._start = begin + length
        if self._start == self._end:
            self._start = self._end = 0
        return request_id, body

    def _missing(self) -> int:
        """Bytes that the first frame in the buffer lacks, as far as is known."""
        have = self._end - self._start
        if have < HEADER.size:
            return HEADER.size - have

        length = int(HEADER.unpack_from(self._buffer, self._start)[0])
        if length > MAX_FRAME_BYTES:
            raise WorkerError(f"a worker announced a reply of {length} bytes; it is out of step")

        return max(0, HEADER.size + length - have)

    def _read(self) -> None:
        self._make_room()
        self._receive(len(self._buffer) - self._end, 0)
        if missing := self._missing():
            self._make_room(missing)
            self._receive(missing, socket.MSG_WAITALL)

    def _receive(self, num_bytes: int, flags: int) -> None:
        try:
            received = self._sock.recv_into(memoryview(self._buffer)[self._end :], num_bytes, flags)
        except BlockingIOError:
            return
        except ConnectionError as error:
            raise EOFError from error

        if received == 0:
            raise EOFError

        self._end += received

    def _make_room(self, num_bytes: int = _BUFFER_BYTES // 2) -> None:
        if len(self._buffer) - self._end >= num_bytes:
            return

        rest = self._buffer[self._start : self._end]
        self._buffer = bytearray(max(_BUFFER_BYTES, len(rest) + num_bytes))
        self._buffer[: len(rest)] = rest
        self._start, self._end = 0, len(rest)

    def close(self) -> None:
        """Close the socket; the worker sees its end."""
        self._sock.close()
