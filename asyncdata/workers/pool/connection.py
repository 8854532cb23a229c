"""The parent's end of a worker's socket: whole frames, in as few system calls as possible.

While the trainer runs Python code, every return from a call that released the GIL may wait 5 ms. So a frame costs one
wait and one or two receives, and a send never waits. A request may be larger than the socket's buffer, for example one
for a plan of many rows; then a task sends the rest later.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING

import anyio

from asyncdata.core.errors import WorkerError
from asyncdata.core.framing import HEADER
from asyncdata.core.messages import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ("Connection",)

_SCRATCH_BYTES = 16 * 1024
_STALLED = struct.pack("ll", 0, 20_000)  # 20 ms: a worker that stopped inside a frame must not block the loop


class Connection:
    """Owns ``sock``."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _STALLED)
        self._sock = sock
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))  # headers, and the bytes that arrive with them
        self._start = self._end = 0
        self._request_id = 0
        self._body: memoryview | None = None
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
        # it with zeros first.
        self._body, self._num_read = np.empty(length, np.uint8).data, 0

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
