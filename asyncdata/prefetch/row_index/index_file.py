"""A row index on disk. It is appended to while it is built, so that a killed run does not lose what it found.

The file is a header that names what was indexed, then one frame per request: length, digest, the reply in msgpack. A
frame that is not whole ends the file. One process writes; others read what is there, and build the rest in memory.

The size of all indexes, and of the rows that were copied for them, may be limited: the least recently used are removed
first. An index is the file ``identity.index``, and the folder ``identity.rows`` if rows were copied. Its time of use is
when the file was last opened. An index is not removed while a run writes it or has its rows open. An index that is only
read may be removed, as a process can still read a removed file that it has open.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import time
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from asyncdata.core.cache_dir import CacheEntry, evict
from asyncdata.core.file_checks import lock, locked, refuse_foreign
from asyncdata.core.messages import MAX_FRAME_BYTES, Indexed

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ("IndexFile", "hold_rows", "kept_indexes", "make_room", "remove_index")

_MAGIC = b"asyncdata index 1\n"
_FRAME = struct.Struct("<I8s")
_INDEX = re.compile(r"([0-9a-f]+)\.(index|rows)")
_COPY = re.compile(r"\d{12}\.rows")
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
            os.utime(self._fd, ns=(time.time_ns(), os.fstat(self._fd).st_mtime_ns))  # used now
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

    def refuse_all(self) -> None:
        """Refuse all parts: what is appended next overwrites the first of them."""
        self._start = self._end = 0

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


def kept_indexes(folder: str) -> list[CacheEntry]:
    """The row indexes in ``folder``, the most recently used last. The name of each is its identity.

    The size of an index includes the copied rows.

    :raises OSError: if the folder cannot be read.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []

    identities = {found[1] for found in map(_INDEX.fullmatch, names) if found is not None}
    return sorted(_kept(folder, identity) for identity in identities)


def _kept(folder: str, identity: str) -> CacheEntry:
    path = os.path.join(folder, identity)
    (used_ns, size), (copied_ns, _) = _stat(f"{path}.index"), _stat(f"{path}.rows")
    return CacheEntry(used_ns or copied_ns, size + sum(_sizes(f"{path}.rows")), identity)


def _stat(path: str) -> tuple[int, int]:
    with suppress(OSError):
        found = os.stat(path, follow_symlinks=False)
        return found.st_atime_ns, found.st_size
    return 0, 0


def _sizes(folder: str) -> Iterator[int]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            yield entry.stat(follow_symlinks=False).st_size


def _remove_others(folder: str) -> None:
    if others := [name for name in os.listdir(folder) if not _COPY.fullmatch(name)]:
        with locked(folder) as is_free:
            for name in others if is_free else ():
                with suppress(OSError):
                    os.unlink(os.path.join(folder, name))


def hold_rows(folder: str) -> int:
    """A descriptor that keeps copied rows from being removed, until it is closed.

    Other files, such as a half-written copy of a killed worker, are removed if no other process has the folder open.

    :raises OSError: if the folder does not exist, or another user may have written it.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        refuse_foreign(fd, folder)
        _remove_others(folder)
    except BaseException:
        os.close(fd)
        raise

    with suppress(OSError):  # a file system without locks: then no process can lock it for removal either
        lock(fd, is_shared=True)
    return fd


def make_room(folder: str, max_bytes: int, keep: str) -> list[CacheEntry]:
    """Remove the least recently used indexes until all take at most ``max_bytes``; return the removed ones.

    :param keep: the identity of an index that stays; its size counts.
    :raises OSError: if the folder cannot be read, or an index cannot be removed.
    """
    found = kept_indexes(folder)
    excess_bytes = sum(index.num_bytes for index in found) - max_bytes
    return evict([index for index in found if index.name != keep], excess_bytes, partial(remove_index, folder))


def remove_index(folder: str, identity: str) -> bool:
    """Remove an index if no process uses it; return whether it is gone.

    :raises OSError: if it cannot be removed.
    """
    path = os.path.join(folder, identity)
    with suppress(FileNotFoundError), locked(f"{path}.index") as is_free:
        if not is_free:
            return False

    with suppress(FileNotFoundError), locked(f"{path}.rows") as is_free:
        if not is_free:
            return False

        shutil.rmtree(f"{path}.rows")
    with suppress(FileNotFoundError):
        os.unlink(f"{path}.index")
    return True
