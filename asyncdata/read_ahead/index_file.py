"""A row index on disk. It is appended to while it is built, so that a killed run does not lose what it found.

It is two files. ``identity.places`` is the rows alone, twelve bytes each (:func:`rows_of`): processes map it, so that a
node has it once in memory. ``identity.index`` is a header that names what was indexed, then one frame per request:
length, number of rows, a digest of it and of its rows, and the rest of the reply in msgpack. A frame that is not whole,
or whose rows are not, ends the index. One process writes; others read what is there, build the rest in memory, and map
it too when it has been written.

Rows that were once written are not overwritten, as another process may have them mapped: if some are refused, the
others are copied to a new file, which takes the place of the old one.

The size of all indexes, and of the rows that were copied for them, may be limited: the least recently used are removed
first. An index is these files, and the folder ``identity.rows`` if rows were copied. Its time of use is when
``identity.index`` was last opened. An index is not removed while a run writes it or has its rows open. An index that is
only read may be removed, as a process can still read a removed file that it has open or mapped.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import shutil
import struct
import time
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from asyncdata.core.files import CacheEntry, evict, lock, locked, refuse_foreign
from asyncdata.core.messages import MAX_FRAME_BYTES, Indexed

if TYPE_CHECKING:
    from collections.abc import Iterator

    Int32 = np.ndarray[Any, np.dtype[np.int32]]


_MAGIC = b"asyncdata index 2\n"
_FRAME = struct.Struct("<II8s")
_ROW_BYTES = 12
_SUFFIXES = ("index", "places", "rows")
_INDEX = re.compile(rf"([0-9a-f]+)\.({'|'.join(_SUFFIXES)})")
_COPY = re.compile(r"\d{12}\.rows")
_OPENED = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_decode = msgspec.msgpack.Decoder(Indexed).decode
_encode = msgspec.msgpack.Encoder().encode


def rows_of(part: Indexed) -> Int32:
    """The rows of a part, int32 of shape (num_rows, 3): offset, length, and tokens, or the negative mark."""
    rows = np.zeros((len(part.lengths) // 4, 3), np.int32)
    for number, column in enumerate((part.offsets, part.lengths, part.num_tokens)):
        if column:
            rows[:, number] = np.frombuffer(column, np.int32)
    if part.marks:
        marks = np.frombuffer(part.marks, np.uint8)
        rows[:, 2] = np.where(marks, -marks.astype(np.int32), rows[:, 2])
    return rows


def _with_rows(part: Indexed, rows: Int32) -> Indexed:
    """The part of a frame, in which one byte of ``num_tokens`` is left if they were counted, with its rows."""
    offsets, lengths, numbers = rows.T
    marks = np.maximum(-numbers, 0).astype(np.uint8)
    return msgspec.structs.replace(
        part,
        offsets=offsets.tobytes(),
        lengths=lengths.tobytes(),
        marks=marks.tobytes() if marks.any() else b"",
        num_tokens=np.maximum(numbers, 0).tobytes() if part.num_tokens else b"",
    )


class IndexFile:
    """The files of the index ``identity`` in ``folder``.

    :raises OSError: if they cannot be opened, or another user may have written them.
    """

    def __init__(self, folder: str, identity: str) -> None:
        self._fd = self._rows_fd = -1
        self._start = self._end = (0, 0)  # of the last part that was read or written: byte and row
        self._mapped: Int32 = np.empty((0, 3), np.int32)
        self.path = Path(folder) / f"{identity}.index"
        self._header = _MAGIC + identity.encode() + b"\n"
        os.makedirs(folder, mode=0o700, exist_ok=True)
        try:
            self._fd = _opened(self.path)
            self._rows_fd = _opened(self.path.with_suffix(".places"))
            self.is_writer = lock(self._fd)
            os.utime(self._fd, ns=(time.time_ns(), os.fstat(self._fd).st_mtime_ns))  # used now
        except BaseException:
            self.close()
            raise

    def parts(self) -> Iterator[Indexed]:
        """The parts that were written, in order, up to the first that is not whole.

        :raises OSError: if they cannot be read.
        """
        self.refuse_all()
        while (part := self._next()) is not None:
            yield part

    def read_on(self) -> None:
        """Read the parts that another process has written since.

        :raises OSError: if they cannot be read.
        """
        while self._next() is not None:
            pass

    @property
    def rows(self) -> Int32:
        """The rows of all parts that were read or written, as by :func:`rows_of`, mapped.

        :raises OSError: if they cannot be mapped.
        """
        return self._rows(self._end[1])

    def refuse(self) -> None:
        """Refuse the part that :meth:`parts` gave last: what is appended next takes its place."""
        self._end = self._start

    def refuse_all(self) -> None:
        """Refuse all parts: what is appended next takes their place."""
        self._start = self._end = (0, 0)
        self._mapped = self._mapped[:0]

    def _next(self) -> Indexed | None:
        at, first = self._end
        if not at:
            at = len(self._header)
            if os.pread(self._fd, at, 0) != self._header:
                return None

        head = os.pread(self._fd, _FRAME.size, at)
        if len(head) < _FRAME.size:
            return None

        length, num_rows, digest = _FRAME.unpack(head)
        body = os.pread(self._fd, length, at + _FRAME.size) if length <= MAX_FRAME_BYTES else b""
        rows = self._rows(first + num_rows)[first:]
        if len(body) < length or len(rows) < num_rows or _digest(first, body, rows) != digest:
            return None

        try:
            part = _with_rows(_decode(body), rows)
        except msgspec.DecodeError:  # written by another release
            return None

        self._start, self._end = self._end, (at + _FRAME.size + length, first + num_rows)
        return part

    def _rows(self, stop: int) -> Int32:
        """The rows up to ``stop``, or fewer if the file has fewer."""
        if len(self._mapped) >= stop:
            return self._mapped[:stop]

        if not (len(self._mapped) or self.is_writer):  # it may have been renewed
            self._reopen_rows()
        if num_rows := os.fstat(self._rows_fd).st_size // _ROW_BYTES:
            found = mmap.mmap(self._rows_fd, num_rows * _ROW_BYTES, prot=mmap.PROT_READ)
            self._mapped = np.frombuffer(found, np.int32).reshape(-1, 3)
        return self._mapped[:stop]

    def append(self, part: Indexed) -> None:
        """Append one part; do nothing if another process is the writer.

        :raises OSError: if it cannot be written.
        """
        if not self.is_writer:
            return

        at, first = self._end
        if os.fstat(self._rows_fd).st_size > first * _ROW_BYTES:
            self._renew_rows(first)
        rows = rows_of(part)
        rest = msgspec.structs.replace(part, offsets=b"", lengths=b"", marks=b"", num_tokens=part.num_tokens[:1])
        body = _encode(rest)
        _write(self._rows_fd, rows.tobytes(), first * _ROW_BYTES)
        if not at:
            at = _write(self._fd, self._header, 0)
        frame = _FRAME.pack(len(body), len(rows), _digest(first, body, rows)) + body
        self._start, self._end = self._end, (at + _write(self._fd, frame, at), first + len(rows))

    def _renew_rows(self, num_rows: int) -> None:
        """Put a new file, with the first rows only, in the place of the one that other processes may have mapped."""
        kept, self._mapped = self._rows(num_rows), self._mapped[:0]
        self.path.with_suffix(".places").unlink()
        self._reopen_rows()
        for first in range(0, num_rows, 1 << 20):
            _write(self._rows_fd, kept[first : first + (1 << 20)].tobytes(), first * _ROW_BYTES)

    def _reopen_rows(self) -> None:
        old, self._rows_fd = self._rows_fd, _opened(self.path.with_suffix(".places"))
        os.close(old)

    def finish(self) -> None:
        """All parts are written: make the files durable.

        :raises OSError: if that fails.
        """
        if self.is_writer:
            os.fsync(self._rows_fd)
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the files, and let another process write. Rows that are mapped stay so."""
        for fd in (self._fd, self._rows_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._rows_fd = -1


def _opened(path: Path) -> int:
    fd = os.open(path, _OPENED, 0o600)
    try:
        refuse_foreign(fd, str(path))
    except BaseException:
        os.close(fd)
        raise

    return fd


def _write(fd: int, data: bytes, at: int) -> int:
    if os.pwrite(fd, data, at) < len(data):
        raise OSError(errno.ENOSPC, "the disk is full")

    return len(data)


def _digest(first: int, body: bytes, rows: Int32) -> bytes:
    """Also of the row that is the first, as what is left of refused parts may follow a part of another length."""
    found = blake2b(first.to_bytes(8, "little") + body, digest_size=8)
    found.update(rows.data)
    return found.digest()


def _kept_indexes(folder: str) -> list[CacheEntry]:
    """The row indexes in ``folder``. The name of each is its identity; its size includes the copied rows."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []

    identities = {found[1] for found in map(_INDEX.fullmatch, names) if found is not None}
    return [_kept(folder, identity) for identity in identities]


def _kept(folder: str, identity: str) -> CacheEntry:
    path = os.path.join(folder, identity)
    (used_ns, size), (placed_ns, rows_size), (copied_ns, _) = (_stat(f"{path}.{end}") for end in _SUFFIXES)
    return CacheEntry(used_ns or placed_ns or copied_ns, size + rows_size + sum(_sizes(f"{path}.rows")), identity)


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
    found = _kept_indexes(folder)
    excess_bytes = sum(index.num_bytes for index in found) - max_bytes
    return evict([index for index in found if index.name != keep], excess_bytes, partial(_remove_index, folder))


def _remove_index(folder: str, identity: str) -> bool:
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
    for suffix in ("places", "index"):
        with suppress(FileNotFoundError):
            os.unlink(f"{path}.{suffix}")
    return True
