"""A segment of the token cache: two files, to which one worker appends blocks of samples, and which any process reads.

``NAME.arrow`` is an Arrow IPC stream of one record batch per block, for every tool that reads Arrow. ``NAME.index``
says for each block where its batch is, and all that Arrow does not need: where the rows are in their file, which of
them yield no sample and why, and checksums. It is written after the batch. So a block is there as soon as its entry in
the index is complete, whatever became of the process that wrote it; and what is read is what was written.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from asyncdata.core.extras import missing_package
from asyncdata.core.messages import Column, Data, Tokenized
from asyncdata.prefetch.merged_samples import Piece

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncdata.prefetch.merged_samples import Found, Indices
    from asyncdata.prefetch.windows.base import Int32

try:
    import xxhash
except ImportError as error:  # said here, as every use of the token cache comes by
    raise missing_package("the token cache", "xxhash", error) from error

__all__ = (
    "HEAD",
    "INDEX_SUFFIX",
    "NO_SUM",
    "SUFFIX",
    "TOKENS",
    "VERSION",
    "DamagedError",
    "Entry",
    "Segment",
    "checksum",
    "index_of",
)

VERSION = 2
"""Of the format. It is part of a cache's key: other versions are in other folders."""

SUFFIX, INDEX_SUFFIX = ".arrow", ".index"
NO_SUM = 0
"""Stands for the checksum of a text that is not known."""

HEAD = struct.Struct("<IQ")
"""Before each entry: its bytes, and their checksum."""

_FIRST_READ = 16 << 10
_MAX_ENTRY_BYTES = 1 << 30
TOKENS = ""
"""The name of the tokens among the values."""


class DamagedError(Exception):
    """A segment is not what was written. The message says how."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A block, as the index has it.

    :ivar file: digest, bytes and mtime (ns) of the file that it comes from; ``start`` and ``stop`` are its place there.
    :ivar block_bytes: of the blocks of its source.
    :ivar text_sum: the checksum of its text; ``NO_SUM`` if that was not read as a whole.
    :ivar offsets: of the rows, from the block's start on, int32; ``lengths`` (int32) are their bytes.
    :ivar kept: the rows that have a sample, as in a reply; so are ``drops`` and ``notes``.
    :ivar values: column (``""``: tokens) -> where its values begin in the body, and where each stops there (uint32).
    :ivar body: where the batch's body is in the other file; ``body_bytes`` its size.
    """

    file: tuple[str, int, int]
    start: int
    stop: int
    block_bytes: int
    text_sum: int
    offsets: Data
    lengths: Data
    num_blank: int
    kept: Data
    drops: dict[str, Data]
    notes: dict[str, Data]
    values: dict[str, tuple[int, Data]] = {}
    body: int = 0
    body_bytes: int = 0
    body_sum: int = 0

    @property
    def num_rows(self) -> int:
        """How many rows the block has."""
        return len(self.lengths) // 4

    @property
    def num_samples(self) -> int:
        """How many of them have a sample."""
        return len(self.values[TOKENS][1]) // 4


_decode = msgspec.msgpack.Decoder(Entry).decode


def checksum(data: bytes | bytearray | memoryview) -> int:
    """xxh3-64 (Yann Collet): it finds damage, at the speed of memory, but not attacks."""
    return xxhash.xxh3_64_intdigest(data)


def index_of(path: str) -> str:
    """The path of the index of the segment at ``path``."""
    return path.removesuffix(SUFFIX) + INDEX_SUFFIX


class Segment:
    """A segment, open for reading.

    :ivar num_bytes: of both files, when it was opened.
    :raises OSError: if it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._data = os.open(path, flags)
        try:
            self._index = os.open(index_of(path), flags)
        except BaseException:
            os.close(self._data)
            raise

    @property
    def num_bytes(self) -> int:
        """Bytes of both files by now."""
        return os.fstat(self._data).st_size + os.fstat(self._index).st_size

    def entries(self, first: int = 0) -> Iterator[tuple[int, int, Entry]]:
        """The entries from ``first`` on: where each is, where the next one is, and what it says.

        What is after the last complete entry is being written, or its writer was killed: it is passed over.

        :raises DamagedError: at one that is not what was written.
        """
        end = os.fstat(self._index).st_size
        while first + HEAD.size <= end:
            (num_bytes, _) = HEAD.unpack(_read(self._index, HEAD.size, first))
            stop = first + HEAD.size + num_bytes
            if stop > end:
                return

            yield first, stop, self.entry(first)
            first = stop

    def entry(self, at: int) -> Entry:
        """The entry at this place.

        :raises DamagedError: if it is not what was written.
        """
        data = os.pread(self._index, _FIRST_READ, at)
        if len(data) < HEAD.size:
            raise DamagedError(f"its index ends before byte {at}")

        num_bytes, expected = HEAD.unpack_from(data)
        if num_bytes > _MAX_ENTRY_BYTES:
            raise DamagedError(f"the entry at byte {at} of its index is larger than any is")

        body = memoryview(data)[HEAD.size : HEAD.size + num_bytes]
        if len(body) < num_bytes:
            body = memoryview(_read(self._index, num_bytes, at + HEAD.size))
        if checksum(body) != expected:
            raise DamagedError(f"the entry at byte {at} of its index is not what was written")

        try:
            return _decode(body)
        except msgspec.DecodeError as error:
            raise DamagedError(f"the entry at byte {at} of its index cannot be read: {error}") from error

    def samples(self, entry: Entry) -> Tokenized:
        """The samples of a block, as a worker's reply has them.

        :raises DamagedError: if they are not what was written.
        """
        body = self._body(entry)
        columns = {
            name: Column(body[start : start + _last(ends)], ends) for name, (start, ends) in entry.values.items()
        }
        tokens = columns.pop(TOKENS)
        token_ends = (np.frombuffer(tokens.ends, np.uint32) >> 2).tobytes()
        return Tokenized(tokens.data, token_ends, entry.kept, columns, entry.drops, [], 0.0, notes=entry.notes)

    def rows(self, entry: Entry, rows: Indices, offsets: Int32, found: Found) -> None:
        """Add single rows of a block to ``found``: those that begin at these offsets of it.

        :param rows: their numbers there.
        :raises DamagedError: if there are none, or they are not what was written.
        """
        body, all_offsets = self._body(entry), np.frombuffer(entry.offsets, np.int32)
        numbers = np.minimum(np.searchsorted(all_offsets, offsets), len(all_offsets) - 1)
        if (all_offsets[numbers] != offsets).any():
            raise DamagedError("a block has other rows")

        for marked, own in ((found.drops, entry.drops), (found.notes, entry.notes)):
            for name, data in own.items():
                marked.setdefault(name, []).extend(rows[np.isin(numbers, np.frombuffer(data, np.int32))].tolist())
        kept = np.frombuffer(entry.kept, np.int32) if entry.kept else np.arange(entry.num_rows)
        samples = np.searchsorted(kept, numbers)
        is_kept = np.isin(numbers, kept)
        rows, samples = rows[is_kept], samples[is_kept]
        starts, sizes = {}, {}
        for name, (first, data) in entry.values.items():
            ends = np.frombuffer(data, np.uint32).astype(np.int64)
            sizes[name] = np.diff(ends, prepend=0)[samples]
            starts[name] = first + ends[samples] - sizes[name]
        found.pieces.append(Piece(body, rows, starts, sizes))

    def _body(self, entry: Entry) -> memoryview:
        body = memoryview(_read(self._data, entry.body_bytes, entry.body))
        if checksum(body) != entry.body_sum:
            raise DamagedError(f"the {len(body)} bytes from byte {entry.body} on are not what was written")

        return body

    def verify(self) -> None:
        """Compare every byte that is read with its checksum.

        :raises DamagedError: naming the first that does not match.
        """
        for _, _, entry in self.entries():
            self.samples(entry)

    def touch(self) -> None:
        """Set the time of last use to now: least recently used segments are evicted first."""
        os.utime(self._data)

    def close(self) -> None:
        """Close both files."""
        os.close(self._data)
        os.close(self._index)


def _read(fd: int, num_bytes: int, offset: int) -> bytes:
    data = os.pread(fd, num_bytes, offset)
    while len(data) < num_bytes:
        more = os.pread(fd, num_bytes - len(data), offset + len(data))
        if not more:
            raise DamagedError(f"it ends at byte {offset + len(data)}")

        data += more
    return data


def _last(ends: Data) -> int:
    return int(np.frombuffer(ends, np.uint32)[-1]) if len(ends) else 0
