"""Finds the rows in a byte block of lines, in a worker. Runs without numpy."""

from __future__ import annotations

import os
from array import array
from operator import sub
from typing import TYPE_CHECKING

from asyncdata.sources.files import BlockRows, FileChangedError, OpenFiles, SameFile, shrunk, unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncdata.core.identity import FileRef
    from asyncdata.core.messages import Block, Job, Overflow

    Read = Callable[[int, FileRef, int, int], bytes]


_BOM = b"\xef\xbb\xbf"
_BLANKS = frozenset(b" \t\r\v\f")
_PIECE_BYTES = 16 * 1024
_OPENS, _CLOSES = ord("{"), ord("}")


class LineReader:
    """Rows are lines: the :class:`~asyncdata.sources.files.BlockReader` of JSONL files."""

    def __init__(self, job: Job) -> None:
        self._files = job.files
        self._slack_bytes = job.slack_bytes
        self._max_row_bytes = job.max_row_bytes
        self._open = OpenFiles(lambda file_id: SameFile.checked(job.files[file_id]))

    def read_block(self, block: Block, num_bytes: int) -> BlockRows:
        """The rows of ``block``; all fit, with what is read beyond it."""
        file = self._files[block.file_id]
        return self._find(self._fd(block.file_id), file, block)

    def _find(self, fd: int, file: FileRef, block: Block) -> BlockRows:
        return read_block(fd, file, block, self._slack_bytes, self._max_row_bytes)

    def read_rows(self, places: Sequence[Overflow], lengths: Sequence[int]) -> list[bytes]:
        return [
            read_row(self._fd(place.file_id), self._files[place.file_id], place.offset, lengths[place.row])
            for place in places
        ]

    def _fd(self, file_id: int) -> int:
        return self._open.to_read(file_id).fd

    def check(self) -> None:
        self._open.check()

    def close(self) -> None:
        self._open.close()


def read_block(
    fd: int,
    file: FileRef,
    block: Block,
    slack_bytes: int,
    max_row_bytes: int,
    read: Read | None = None,
    max_kept_bytes: int = 0,
) -> BlockRows:
    """Read ``block`` with the byte before it and ``slack_bytes`` after it, and find the rows that begin in it.

    ``data[0]`` is the byte before the block, or a newline where the block begins its file.

    :param read: gives (fd, file, offset, number of bytes) the file's text with ``\\n`` wherever a line ends; None: the
        text as it is. Of what is beyond the over-read it may give more or less than asked for, but at least a byte.
    :param max_kept_bytes: the last row is in ``data``, even if it goes beyond the over-read, if so much of it is there.
    :raises FileChangedError: if the file has become shorter.
    """
    read = read or read_row
    first = block.start == 0
    offset = 0 if first else block.start - 1
    data = read(fd, file, offset, min(block.stop + slack_bytes, file.num_bytes) - offset)
    if first:
        data = b"\n" + data
    tail = file.num_bytes - (block.start - 1 + len(data))  # bytes of the file after the part that was read
    limit = 1 + block.stop - block.start  # a row starts before this
    start = data.find(b"\n", 0, limit - 1) + 1
    if first and data.startswith(_BOM, 1):
        start += len(_BOM)
        limit = max(limit, min(start + 1, len(data)))  # the mark's block is that of the row after it
    starts, lengths, start = _ordinary_rows(data, start, limit, max_row_bytes)
    offsets, num_blank = array("i", [start - 1 for start in starts]), 0
    while 0 < start < limit:
        end = data.find(b"\n", start)
        cut = end < 0 and tail > 0
        if end < 0:
            end = len(data)
        length = end - start
        if cut:
            limits = max_row_bytes, max_kept_bytes
            rest, pieces = _rest_of_row(fd, file, file.num_bytes - tail, length, limits, read)
            length += rest
            if rest <= max_kept_bytes and length <= max_row_bytes:
                data, cut = b"".join((data, *pieces)), False
                end = len(data)
        if length > max_row_bytes:
            length = -1
        elif length and data[start] in _BLANKS:
            row = read(fd, file, block.start - 1 + start, length) if cut else data[start:end]
            length = 0 if row.isspace() else length
        if length:
            starts.append(start if 0 <= length <= len(data) - start else -1)
            lengths.append(length)
            offsets.append(start - 1)
        else:
            num_blank += 1
        start = end + 1
    return BlockRows(data, starts, lengths, offsets, num_blank)


def _ordinary_rows(data: bytes, start: int, limit: int, max_row_bytes: int) -> tuple[array[int], array[int], int]:
    """The starts and lengths of the rows that begin in ``[start, limit)``, and where to continue.

    None, and to go on from ``start``, if one of them needs a closer look: it may be blank, or is too long.
    """
    ends: list[int] = []
    find, add, begin = data.find, ends.append, start
    while 0 < begin < limit and (end := find(b"\n", begin)) >= 0:
        add(end)
        begin = end + 1
    begins = [start, *[end + 1 for end in ends[:-1]]] if ends else []
    lengths = list(map(sub, ends, begins))
    is_ordinary = ends and 0 < min(lengths) and max(lengths) <= max_row_bytes
    if not is_ordinary or not _BLANKS.isdisjoint(map(data.__getitem__, begins)):
        return array("i"), array("i"), start

    return array("i", begins), array("i", lengths), begin


def _rest_of_row(
    fd: int, file: FileRef, offset: int, had: int, limits: tuple[int, int], read: Read
) -> tuple[int, list[bytes]]:
    """How many bytes a row has from ``offset`` on, and these bytes, in pieces. They grow with the row.

    :param had: bytes of the row before ``offset``.
    :param limits: the row is looked at no further than the first; if its rest is longer than the second, it is not
        stored.
    """
    length, end, pieces = 0, -1, list[bytes]()
    max_row_bytes, max_kept_bytes = limits
    while end < 0 and length <= max_row_bytes and offset + length < file.num_bytes:
        size = max(_PIECE_BYTES, (had + length) // 4)
        piece = read(fd, file, offset + length, min(size, file.num_bytes - offset - length))
        end = piece.find(b"\n")
        pieces.append(piece if end < 0 else piece[:end])
        length += len(pieces[-1])
        if length > max_kept_bytes:
            pieces.clear()
    return length, pieces


def read_row(fd: int, file: FileRef, offset: int, num_bytes: int) -> bytes:
    """So many bytes of a file: a row that is not wholly in its slot.

    :raises FileChangedError: if the file has become shorter.
    """
    data = _read_some(fd, file, offset, num_bytes)
    while len(data) < num_bytes:
        more = _read_some(fd, file, offset + len(data), num_bytes - len(data))
        if not more:
            raise FileChangedError(shrunk(file, offset + len(data)))

        data += more
    return data


def _read_some(fd: int, file: FileRef, offset: int, num_bytes: int) -> bytes:
    try:
        return os.pread(fd, num_bytes, offset)
    except OSError as error:
        raise unreadable(error, file.path, offset) from error


class PythonLineReader(LineReader):
    """Rows are what ``[line.strip() for line in open(path)]`` would be, less the empty ones.

    A line ends with ``\\n``, ``\\r\\n``, or ``\\r`` alone. White space of Unicode around a row is no part of it.
    """

    def _find(self, fd: int, file: FileRef, block: Block) -> BlockRows:
        found = read_block(fd, file, block, self._slack_bytes, self._max_row_bytes, _read_lines)
        rows = self._stripped(fd, file, block, found)
        # The newline of a \r\n would end an additional empty line here.
        num_ends = read_row(fd, file, *_span(block)).count(b"\r\n") if found.num_blank else 0
        return rows._replace(num_blank=rows.num_blank - num_ends)

    def _stripped(self, fd: int, file: FileRef, block: Block, found: BlockRows) -> BlockRows:
        """The rows without the white space around them; a row of white space only is blank."""
        data, lengths = found.data, found.lengths
        plain = [
            length < 0 or (start >= 0 and data[start] == _OPENS and data[start + length - 1] == _CLOSES)
            for start, length in zip(found.starts, lengths, strict=True)
        ]
        if all(plain):
            return found

        starts, kept, offsets = (type(found.starts)("i") for _ in range(3))
        for is_plain, start, length, offset in zip(plain, found.starts, lengths, found.offsets, strict=True):
            raw = b"" if is_plain else self._raw(fd, file, block, data, start, length, offset)
            before, size = (0, length) if is_plain else _stripped(raw)
            if size:
                starts.append(start + before if start >= 0 else -1)
                kept.append(size)
                offsets.append(offset + before)
        return found._replace(
            starts=starts, lengths=kept, offsets=offsets, num_blank=found.num_blank + len(lengths) - len(kept)
        )

    @staticmethod
    def _raw(
        fd: int, file: FileRef, block: Block, data: bytes | bytearray, start: int, length: int, offset: int
    ) -> bytes:
        return bytes(data[start : start + length]) if start >= 0 else read_row(fd, file, block.start + offset, length)


def _read_lines(fd: int, file: FileRef, offset: int, num_bytes: int) -> bytes:
    data = read_row(fd, file, offset, num_bytes)
    return data.replace(b"\r", b"\n") if b"\r" in data else data


def _span(block: Block) -> tuple[int, int]:
    """Offset and length of the block with the byte before it."""
    start = max(0, block.start - 1)
    return start, block.stop - start


def _stripped(raw: bytes) -> tuple[int, int]:
    """How many bytes of white space are before the text, and how many bytes the text has."""
    text = raw.decode("utf-8", "surrogateescape")
    rest = text.lstrip()
    before = len(raw) - len(rest.encode("utf-8", "surrogateescape"))
    return before, len(rest.rstrip().encode("utf-8", "surrogateescape"))
