"""A row index on disk. It is appended to while it is built, so that a killed run does not lose what it found.

The file is a header that names what was indexed, then one frame per request: length, digest, the reply in msgpack. A
frame that is not whole ends the file. One process writes; others read what is there, and build the rest in memory.
"""

from __future__ import annotations

import os
import struct
import time
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from asyncdata.core.file_lock import lock
from asyncdata.core.file_owner import refuse_foreign
from asyncdata.core.messages import MAX_FRAME_BYTES, Indexed

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ("IndexFile",)

_MAGIC = b"asyncdata index 1\n"
_FRAME = struct.Struct("<I8s")
_decode = msgspec.msgpack.Decoder(Indexed).decode
_encode = msgspec.msgpack.Encoder().encode


class IndexFile:
    """The file of the index ``identity`` in ``folder``.

    :raises OSError: if it cannot be opened, or another user may have written it.
    """

    def __init__(self, folder: str, identity: str) -> None:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self.path = Path(folder) / f"{identity}.index"
        self._header = _MAGIC + identity.encode() + b"\n"
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._start = self._end = 0  # of the last part that was read
        try:
            refuse_foreign(self._fd, str(self.path))
            self._is_writer = lock(self._fd)
            os.utime(self._fd, ns=(time.time_ns(), os.fstat(self._fd).st_mtime_ns))  # used now: see ``eviction``
        except BaseException:
            self.close()
            raise

    def parts(self) -> Iterator[Indexed]:
        """The parts that were written, in order, up to the first that is not whole."""
        header = os.pread(self._fd, len(self._header), 0)
        if header != self._header:
            return

        self._start = self._end = len(header)
        while (body := self._frame()) is not None:
            try:
                part = _decode(body)
            except msgspec.DecodeError:  # written by another release
                return

            self._start, self._end = self._end, self._end + _FRAME.size + len(body)
            yield part

    def refuse(self) -> None:
        """Refuse the part that :meth:`parts` gave last: what is appended next overwrites it."""
        self._end = self._start

    def _frame(self) -> bytes | None:
        head = os.pread(self._fd, _FRAME.size, self._end)
        if len(head) < _FRAME.size:
            return None

        length, digest = _FRAME.unpack(head)
        body = os.pread(self._fd, length, self._end + _FRAME.size) if length <= MAX_FRAME_BYTES else b""
        return body if len(body) == length and _digest(body) == digest else None

    def append(self, part: Indexed) -> None:
        """Append one part; do nothing if another process is the writer.

        :raises OSError: if it cannot be written.
        """
        if not self._is_writer:
            return

        if self._end == 0:
            self._write(self._header)
        body = _encode(part)
        self._write(_FRAME.pack(len(body), _digest(body)) + body)

    def _write(self, data: bytes) -> None:
        if os.pwrite(self._fd, data, self._end) < len(data):
            raise OSError(28, "the disk is full")

        self._end += len(data)

    def finish(self) -> None:
        """All parts are written: make the file durable.

        :raises OSError: if that fails.
        """
        if self._is_writer:
            if os.fstat(self._fd).st_size > self._end:
                os.ftruncate(self._fd, self._end)
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file, and let another process write."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=8).digest()
