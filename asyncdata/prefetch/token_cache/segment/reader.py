"""Reads segments of the token cache: one open segment, and all that a worker has open."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import numpy as np

from asyncdata.prefetch.token_cache.segment.layout import (
    ENTRY,
    FOOTER_BYTES,
    VERSION,
    DamagedError,
    Entry,
    block_head,
    check_meta,
    checksum,
    decode_meta,
    pad,
    unpack_entry,
    unpack_footer,
)

if TYPE_CHECKING:
    from asyncdata.prefetch.token_cache.segment.layout import Meta

__all__ = ("Segment", "Segments")

_MAX_OPEN_SEGMENTS = 128
_MAX_KNOWN_SEGMENTS = 16_384
_MAX_META_BYTES = 64 << 20


class Segment:
    """One segment, open for reading.

    :ivar head: the bytes before the records of each of its blocks in a slot.
    :ivar record_words: words of a record.
    :raises OSError: if it cannot be opened.
    :raises DamagedError: if it is not a segment, or damaged.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = _opened(path)
        try:
            self.num_bytes = self._size()
            footer = self._read(self.num_bytes - FOOTER_BYTES, FOOTER_BYTES)
            self._footer, digest = unpack_footer(footer, self.num_bytes)
            self.meta = self._meta(footer, digest)
        except BaseException:
            os.close(self._fd)
            raise

        self.head = block_head(self.meta.names)
        self.record_words = self.meta.names.record_words
        self._record_bytes = 4 * self.record_words

    def _size(self) -> int:
        found = os.fstat(self._fd)
        self._inode = found.st_ino
        if not stat.S_ISREG(found.st_mode) or found.st_size < FOOTER_BYTES:
            raise DamagedError("it is no segment")

        return found.st_size

    def _meta(self, footer: bytes, digest: bytes) -> Meta:
        if self._footer.meta_bytes > _MAX_META_BYTES:
            raise DamagedError("its meta is larger than any is")

        data = self._read(self._footer.meta, self._footer.meta_bytes)
        check_meta(footer, data, digest)
        try:
            meta = decode_meta(data)
        except msgspec.DecodeError as error:
            raise DamagedError(f"its meta cannot be read: {error}") from error

        if meta.version != VERSION:
            raise DamagedError(f"it is of version {meta.version}")

        return meta

    def _read(self, offset: int, num_bytes: int) -> bytes:
        data = os.pread(self._fd, num_bytes, offset) if offset >= 0 else b""
        while 0 < len(data) < num_bytes:
            more = os.pread(self._fd, num_bytes - len(data), offset + len(data))
            if not more:
                break

            data += more
        if len(data) != num_bytes:
            raise DamagedError(f"it ends at byte {offset + len(data)}")

        return data

    @property
    def num_entries(self) -> int:
        """How many blocks it has."""
        return self._footer.num_entries

    def entry(self, number: int) -> Entry:
        """Where a block is.

        :raises DamagedError: if that is not what was written.
        """
        if not 0 <= number < self.num_entries:
            raise DamagedError(f"it has no entry {number}")

        return unpack_entry(self._read(self._footer.entries + number * ENTRY.itemsize, ENTRY.itemsize))

    def entries(self) -> np.ndarray[Any, Any]:
        """All entries, as an array of :data:`~asyncdata.prefetch.token_cache.segment.layout.ENTRY`.

        :raises DamagedError: if they are damaged.
        """
        size = ENTRY.itemsize
        data = self._read(self._footer.entries, self.num_entries * size)
        for start in range(0, len(data), size):
            unpack_entry(data[start : start + size])
        return np.frombuffer(data, ENTRY)

    def room_of(self, entry: Entry) -> int:
        """Bytes of a slot that the block takes, from an offset on that is a multiple of eight."""
        return len(self.head) + pad(entry.num_rows * self._record_bytes) + pad(entry.body_bytes)

    def read_into(self, room: memoryview, entry: Entry) -> int:
        """Read the block into ``room``; return the offset of its first record there.

        :raises DamagedError: if it is not what was written.
        """
        begin, num_bytes = len(self.head), entry.num_rows * self._record_bytes
        records_stop, body = begin + num_bytes, begin + pad(num_bytes)
        room[:begin] = self.head
        self._fill(room[begin:records_stop], entry.records, entry.records_sum)
        self._fill(room[body : body + entry.body_bytes], entry.body, entry.body_sum)
        return begin

    def _fill(self, room: memoryview, offset: int, expected: int) -> None:
        num_bytes = os.preadv(self._fd, [room], offset)
        while num_bytes < len(room):
            read = os.preadv(self._fd, [room[num_bytes:]], offset + num_bytes)
            if not read:
                raise DamagedError(f"it ends at byte {offset + num_bytes}")

            num_bytes += read
        if checksum(room) != expected:
            raise DamagedError(f"the {num_bytes} bytes from byte {offset} on are not what was written")

    def touch(self) -> None:
        """Set the time of last use to now: least recently used segments are evicted first."""
        os.utime(self._fd)

    def verify(self) -> None:
        """Compare every byte that is used with its checksum.

        :raises DamagedError: naming the first that does not match.
        """
        for number in range(self.num_entries):
            entry = self.entry(number)
            self.read_into(memoryview(bytearray(self.room_of(entry))), entry)

    def reopen(self) -> None:
        """Open the file again. What it says of itself was compared with its digest before.

        :raises OSError: if it cannot be opened.
        :raises DamagedError: if it is another file.
        """
        self._fd = _opened(self._path)
        found = os.fstat(self._fd)
        if (found.st_ino, found.st_size) != (self._inode, self.num_bytes):
            self.close()
            raise DamagedError("another file is in its place")

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


SegmentT = TypeVar("SegmentT", bound=Segment)


def _opened(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


class Segments(Generic[SegmentT]):
    """The segments of a folder that a worker has read. A few have an open file; a window may need a thousand."""

    def __init__(self, folder: str, kind: type[SegmentT]) -> None:
        self._folder = folder
        self._kind = kind
        self._open: dict[str, SegmentT] = {}
        self._closed: dict[str, SegmentT] = {}

    @property
    def num_known(self) -> int:
        """How many segments it knows."""
        return len(self._open) + len(self._closed)

    def get(self, name: str) -> SegmentT:
        """The segment of that name.

        :raises OSError: if it cannot be opened.
        :raises DamagedError: if it is no segment.
        """
        segment = self._open.pop(name, None)
        if segment is None:
            segment = self._opened(name)
            if len(self._open) >= _MAX_OPEN_SEGMENTS:
                self._close_one()
        self._open[name] = segment  # the last one is the one last used
        return segment

    def _opened(self, name: str) -> SegmentT:
        segment = self._closed.pop(name, None)
        if segment is None:
            return self._kind(os.path.join(self._folder, name))

        segment.reopen()
        return segment

    def _close_one(self) -> None:
        name = next(iter(self._open))
        self._closed[name] = segment = self._open.pop(name)
        segment.close()
        if len(self._closed) > _MAX_KNOWN_SEGMENTS:
            del self._closed[next(iter(self._closed))]

    def forget(self, name: str) -> None:
        """Close the segment, which cannot be used."""
        segment = self._open.pop(name, None)
        if segment is not None:
            segment.close()

    def close(self) -> None:
        """Close all of them."""
        while self._open:
            self._open.popitem()[1].close()
