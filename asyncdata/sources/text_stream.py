"""Files that are read from front to back: compressed ones, and JSON arrays. How the text is read, and split into rows.

gzip (RFC 1952) is made of members, zstd (RFC 8878) of frames; at the start of each a decoder can begin. What is cut off
or damaged is found by the checks that both formats carry, and named: nothing ends silently.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from io import FileIO
from typing import Any, NamedTuple

import numpy as np

from asyncdata.core.errors import SourceChangedError, SourceError
from asyncdata.core.identity import FileRef, FileRefs
from asyncdata.core.messages import BlockCacheSpec, ReadCounts, ReaderSpec, StoreSpec
from asyncdata.core.types import SourceLocation
from asyncdata.sources.base import FileBlocks, Files
from asyncdata.sources.files import FileChangedError, SameFile, shrunk, unreadable
from asyncdata.sources.json_array import ArrayScan
from asyncdata.sources.remote.reads import ObjectFile, Reads
from asyncdata.sources.remote.store import ObjectStamp
from asyncdata.sources.stream import MAX_ROW_BYTES, Int64, Rows, RowStream, StreamOrder

_PIECE_BYTES = 256 * 1024
_INPUT_BYTES = {"gzip": 64 * 1024, "zstd": 8 * 1024}
_REST = 1 << 62
"""Bytes up to the end of a frame: nothing has to be known of them."""

_UNITS = {"gzip": ("AD121", "member"), "zstd": ("AD122", "frame")}
_OBJECTS_AHEAD = 8
_BOM = b"\xef\xbb\xbf"
_NEWLINE = 10
_IS_BLANK = np.isin(np.arange(256), np.frombuffer(b"\n \t\r\v\f", np.uint8))
_START = {"entry": [0, 0], "offset": 0, "row": 0}


class TextStream(Files, RowStream):
    """Texts whose rows are numbered from 0: lines, blank ones counted, or the elements of an array.

    A state is ``{"file": number, "entry": [offset in the file, offset in its text], "offset": of the row in the text,
    "row": its number}``: decoding begins at the entry, the last place before the row where it can.

    :ivar are_arrays: of each file: whether it is a JSON array; else its rows are lines.
    :ivar codings: of each file: ``plain``, ``gzip`` or ``zstd``.
    """

    def __init__(
        self,
        files: FileRefs,
        max_row_bytes: int,
        codings: Sequence[str],
        are_arrays: Sequence[bool],
        stores: Sequence[StoreSpec] = (),
    ) -> None:
        super().__init__(files, min(max_row_bytes, MAX_ROW_BYTES), stores)
        self.stores = []  # workers read nothing
        self._object_stores = list(stores)
        self._reads = Reads(stores) if stores else None
        self.codings = list(codings)
        self.are_arrays: Sequence[bool] = list(are_arrays)

    def as_blocks(self, block_bytes: int) -> ArrayBlocks | None:
        """The blocks of local files that are not compressed; None for others."""
        if any(coding != "plain" for coding in self.codings) or self._reads is not None:
            return None

        return ArrayBlocks(self.refs, block_bytes, self.max_row_bytes, self.are_arrays)

    def keep_blocks(self, kept: BlockCacheSpec) -> None:
        if self._reads is not None:
            self._reads = Reads([store.with_cache(kept) for store in self._object_stores])

    def close(self) -> None:
        if self._reads is not None:
            self._reads.close()

    @property
    def read_counts(self) -> ReadCounts | None:
        """Counts of requests to the stores."""
        return None if self._reads is None else self._reads.counts

    def read(
        self, order: StreamOrder, epoch: int, state: dict[str, Any] | None, check: Callable[[], object]
    ) -> Generator[Rows]:
        ids = order.files(epoch)
        first = 0 if state is None else ids.index(state["file"])
        begun: dict[int, ObjectFile] = {}
        try:
            for place in range(first, len(ids)):
                self._begin(ids[place : place + _OBJECTS_AHEAD], begun)
                stored = begun.pop(ids[place], None)
                yield from self._read_file(ids[place], _START if state is None else state, check, stored)
                state = None
        finally:
            for stored in begun.values():
                stored.close()

    def _begin(self, file_ids: Sequence[int], begun: dict[int, ObjectFile]) -> None:
        """Begin to read these objects, so that the next one is there when one ends."""
        if self._reads is None:
            return

        for file_id in file_ids:
            if file_id not in begun:
                begun[file_id] = ObjectFile(self._reads, ObjectStamp.of(self.files[file_id]))
                begun[file_id].begin()

    def _read_file(
        self, file_id: int, start: dict[str, Any], check: Callable[[], object], stored: ObjectFile | None
    ) -> Generator[Rows]:
        file = self.files[file_id]
        if file.num_bytes == 0:
            return

        self.check_file(file_id)  # the files before it took their time
        text = CodedText(file, self.codings[file_id], check, stored)
        split = partial(split_array, path=file.path) if self.are_arrays[file_id] else split_lines
        offset, number = start["offset"], start["row"]
        found: TextRows
        for found in split(text.pieces(tuple(start["entry"]), offset), offset, number, self.max_row_bytes):
            entry = list(text.entry(found.offset))
            state = {"file": file_id, "entry": entry, "offset": found.offset, "row": found.number}
            yield Rows(file_id, found.numbers, found.lengths, found.data, found.num_blank, state, found.offsets)

    def location(self, file_id: int, offset: int, num_bytes: int, byte_offset: int = -1) -> SourceLocation:
        """The row's number, with its file's path; its line, and its place in the text."""
        line = None if self.are_arrays[file_id] else offset + 1
        return SourceLocation(self.files[file_id].path, byte_offset, num_bytes, row_number=offset, line=line)


class ArrayBlocks(FileBlocks):
    """Files of which some are JSON arrays; the rows of the others are lines."""

    def __init__(self, files: FileRefs, block_bytes: int, max_row_bytes: int, are_arrays: Sequence[bool]) -> None:
        super().__init__(files, block_bytes, max_row_bytes)
        self.are_arrays = list(are_arrays)
        self.reader = ReaderSpec(
            "asyncdata.sources.json_array:ArrayReader", {"are_arrays": self.are_arrays}, "json-array"
        )


class TextRows(NamedTuple):
    """Consecutive rows of a text, as in :class:`~asyncdata.sources.stream.Rows`.

    :ivar offset: their start in the text.
    :ivar number: the number of the line at ``offset``.
    :ivar offsets: the start of each row in the text, int64 of shape (num_rows,).
    """

    offset: int
    number: int
    numbers: Int64
    lengths: Int64
    data: bytes
    num_blank: int
    offsets: Int64


def split_lines(pieces: Iterable[bytes], offset: int, number: int, max_row_bytes: int) -> Iterator[TextRows]:
    """The lines of a text that has a line's start, that of line ``number``, at ``offset``.

    Lines end with ``\\n`` or ``\\r\\n``. Blank ones have a number and are no rows; a byte-order mark at the start of
    the text is left out; the last line needs no end. Of a line longer than ``max_row_bytes`` no more is held than that.

    :param pieces: the text from ``offset`` on.
    """
    held: list[bytes] = []  # the beginning of a line whose end has not come
    start = b""  # of a line that is too long: a mark, or a byte in place of what is not held
    num_bytes = num_lost = 0  # of it; a line that is too long is not held
    for piece in pieces:
        end = piece.rfind(b"\n") + 1
        if end:
            found = _rows(b"".join(held) + piece[:end], offset, number, num_lost, max_row_bytes)
            yield found
            offset += num_bytes + end
            number += len(found.lengths) + found.num_blank
            held, num_bytes, num_lost = [], 0, 0
        if end < len(piece):
            held.append(piece[end:])
            num_bytes += len(piece) - end
        if num_bytes > max_row_bytes + len(_BOM):
            if not num_lost:
                start = _BOM if offset == 0 and b"".join(held).startswith(_BOM) else b"-"
            held = [start]
            num_lost = num_bytes - len(start)
    if num_bytes:
        yield _rows(b"".join(held) + b"\n", offset, number, num_lost, max_row_bytes)


def _rows(text: bytes, offset: int, number: int, num_lost: int, max_row_bytes: int) -> TextRows:
    """The rows of whole lines. ``num_lost`` bytes of the first line are not in ``text``."""
    if not num_lost and len(text) <= max_row_bytes and not text.strip():  # no array of what may be a bomb
        none = np.empty(0, np.int64)
        return TextRows(offset, number, none, none, b"", text.count(b"\n"), none)

    begin = offset
    if offset == 0 and text.startswith(_BOM):
        text, begin = text[len(_BOM) :], len(_BOM)
    chars = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(chars == _NEWLINE).astype(np.int64, copy=False)
    lengths = np.diff(ends, prepend=-1) - 1
    starts = ends - lengths
    offsets = begin + starts
    offsets[1:] += num_lost
    lengths[0] += num_lost
    is_held = lengths <= max_row_bytes
    is_row = np.ones(len(ends), np.bool_)
    if (_IS_BLANK[chars[starts]] & is_held).any():
        is_row = np.logical_or.reduceat(~_IS_BLANK[chars], starts) | ~is_held
    data = text
    if not (is_row & is_held).all():
        lines = np.flatnonzero(is_row & is_held)
        spans = zip(starts[lines].tolist(), ends[lines].tolist(), strict=True)
        data = b"".join(text[start : end + 1] for start, end in spans)
    num_blank = len(ends) - int(is_row.sum())
    numbers = number + np.flatnonzero(is_row)
    return TextRows(offset, number, numbers, lengths[is_row], data, num_blank, offsets[is_row])


def split_array(pieces: Iterable[bytes], offset: int, number: int, max_row_bytes: int, path: str) -> Iterator[TextRows]:
    """The elements of an array from the text's start on (``offset`` 0), or from element ``number`` on, at ``offset``.

    White space around an element is left out, a byte-order mark at the start of the text is too. Of an element longer
    than ``max_row_bytes`` no more is held than that and a piece.

    :param pieces: the text from ``offset`` on.
    :param path: the file's name in errors.
    :raises SourceError: if the text is not a complete array, after the elements before that.
    """
    scan, held, start, stop = ArrayScan(path, offset, number), list[bytes](), offset, offset
    for piece in pieces:
        first, before = scan.number, stop
        begins, lengths = scan.feed(piece)
        held.append(piece)
        stop += len(piece)
        if len(begins):
            text, places = b"".join(held), zip((begins - start).tolist(), lengths.tolist(), strict=True)
            data = b"".join(text[begin : begin + size] + b"\n" for begin, size in places if size <= max_row_bytes)
            yield TextRows(int(begins[0]), first, first + np.arange(len(begins)), lengths, data, 0, begins)
        if scan.fault is not None:
            raise scan.fault

        if scan.begin >= before:
            held, start = [piece[scan.begin - before :]], scan.begin
        elif scan.begin < 0 or scan.length > max_row_bytes:
            held, start = [], stop
    scan.finish()
    if scan.fault is not None:
        raise scan.fault


class _FrameOfZstd:
    """Where the blocks of a frame end. A decoder that gets no more than one gives 128 KiB of text at most."""

    def __init__(self) -> None:
        self._header, self._size = b"", 5  # as much of the next one as is known, and its bytes
        self._left = 0  # bytes before it

    def take(self, data: bytes) -> int:
        """How many bytes of ``data`` belong to the block that is next, with its header."""
        place = 0
        while not self._left and place < len(data):
            self._header += data[place : place + 1]
            place += 1
            if len(self._header) == self._size:
                self._left = self._after(self._header)
                self._header, self._size = b"", 3
        taken = min(self._left, len(data) - place)
        self._left -= taken
        return place + taken

    def _after(self, header: bytes) -> int:
        """How many bytes follow before the next header: RFC 8878, 3.1.1."""
        if len(header) == 3:
            block = int.from_bytes(header, "little")
            return _REST if block & 1 else 1 if block & 6 == 2 else block >> 3  # the last one; one byte, repeated

        if not header.startswith(b"\x28\xb5\x2f\xfd"):
            return _REST  # it has no text: a frame to skip, or damage

        flags = header[4]
        is_single = flags >> 5 & 1
        return 1 - is_single + (0, 1, 2, 4)[flags & 3] + (is_single, 2, 4, 8)[flags >> 6]


class _Unit:
    """The decoder of one member or frame."""

    def __init__(self, coding: str) -> None:
        self._is_gzip = coding == "gzip"
        self._frame = _FrameOfZstd()
        if self._is_gzip:
            self._decoder: Any = zlib.decompressobj(wbits=31)  # with gzip's header, length and CRC
        else:
            import zstandard

            self._decoder = zstandard.ZstdDecompressor().decompressobj()

    @property
    def is_whole(self) -> bool:
        """Whether its end was reached, and its checksum is right."""
        return bool(self._decoder.eof)

    def decode(self, data: bytes) -> tuple[bytes, bytes]:
        """Some decoded text, and the rest of ``data``."""
        if self._is_gzip:
            text, left = self._decoder.decompress(data, _PIECE_BYTES), self._decoder.unconsumed_tail
            return text, self._decoder.unused_data if self.is_whole else left

        end = self._frame.take(data)
        text = self._decoder.decompress(data[:end]) if data else b""
        return text, self._decoder.unused_data + data[end:]


def decoded_start(head: bytes, coding: str) -> bytes:
    """What can be decoded of a text of which only ``head`` is there, or the first of it.

    :raises SourceError: if it is damaged.
    """
    unit, text = _Unit(coding), b""
    try:
        while head and not unit.is_whole and len(text) < _PIECE_BYTES:
            piece, head = unit.decode(head)
            text += piece
    except Exception as error:  # zlib.error, or zstandard.ZstdError
        raise SourceError(f"{_UNITS[coding][0]} its first {coding} {_UNITS[coding][1]} {_why(error)}") from error

    return text


def _why(error: Exception) -> str:
    """What is wrong with a member or frame, by the decoder's error."""
    if "too much memory" in str(error):
        return "needs more than 128 MiB to be decoded: compress it again, without --long or --ultra"

    return f"is damaged ({error})"


class CodedText:
    """The text of one file, read to the size that the file had at the start.

    :param coding: see :func:`coding_of`.
    :param check: called for each piece; it raises when the text is no longer needed.
    :param stored: reads the file, if it is an object; it is closed after that.
    """

    def __init__(
        self, file: FileRef, coding: str, check: Callable[[], object], stored: ObjectFile | None = None
    ) -> None:
        self._file = file
        self._stored = stored
        self._coding = coding
        self._check = check
        self._entries: deque[tuple[int, int]] = deque()

    def entry(self, offset: int) -> tuple[int, int]:
        """Where a decoder can begin so as to come to ``offset`` of the text soonest: in the file, and in the text.

        Of a text that is being read; entries before the one that is returned are forgotten.
        """
        if self._coding == "plain":
            return offset, offset

        while len(self._entries) > 1 and self._entries[1][1] <= offset:
            self._entries.popleft()
        return self._entries[0]

    def pieces(self, entry: tuple[int, int], offset: int) -> Iterator[bytes]:
        """The text from ``offset`` on, in pieces that are not empty. The text between ``entry`` and ``offset`` is
        decoded and skipped.

        :raises SourceError: if the file is truncated or damaged, after the text before that.
        :raises SourceChangedError: if the file has become shorter.
        """
        if self._stored is not None:
            with closing(self._stored) as stored:
                yield from self._pieces(stored, stored, entry, offset)
            return

        with closing(SameFile(self._file)) as same, open(same.fd, "rb", buffering=0, closefd=False) as file:
            yield from self._pieces(file, same, entry, offset)

    def _pieces(
        self, file: FileIO | ObjectFile, same: SameFile | ObjectFile, entry: tuple[int, int], offset: int
    ) -> Iterator[bytes]:
        num_to_skip = offset - entry[1]
        file.seek(entry[0])
        for piece in _collected(self._decoded(file, entry[1]), partial(_refuse_changed, same)):
            self._check()
            if num_to_skip < len(piece):
                yield piece[num_to_skip:] if num_to_skip else piece
            num_to_skip = max(0, num_to_skip - len(piece))

    def _decoded(self, file: FileIO | ObjectFile, place: int) -> Iterator[bytes]:
        """The text from its byte ``place`` on."""
        if self._coding == "plain":
            while data := self._read(file):
                yield data
            return

        data = b""
        while data := self._padding_left_out(file, data):
            self._entries.append((file.tell() - len(data), place))
            unit = _Unit(self._coding)
            while not unit.is_whole:
                text, data = self._decode(file, unit, data)
                place += len(text)
                yield text

    def _decode(self, file: FileIO | ObjectFile, unit: _Unit, data: bytes) -> tuple[bytes, bytes]:
        """Some text of ``unit``, and the rest of the bytes that were read."""
        data = data or self._read(file)
        try:
            text, left = unit.decode(data)
        except Exception as error:  # zlib.error, or zstandard.ZstdError, which cannot be named without importing it
            raise self._fault(_why(error)) from error

        if not data and not text and not unit.is_whole:
            raise self._fault(f"ends early, at byte {self._file.num_bytes}: it was cut off, or is still being written")

        return text, left

    def _padding_left_out(self, file: FileIO | ObjectFile, data: bytes) -> bytes:
        """The bytes from the next member or frame on; empty at the end of the file."""
        while True:
            if self._coding == "gzip" and self._entries:
                data = data.lstrip(b"\0")  # tapes and some writers fill up the last member with zeros
            if data:
                return data

            data = self._read(file)
            if not data:
                return data

    def _read(self, file: FileIO | ObjectFile) -> bytes:
        """The next bytes; empty at the end that the file had at the start."""
        place = file.tell()
        num_wanted = min(_INPUT_BYTES.get(self._coding, _PIECE_BYTES), self._file.num_bytes - place)
        try:
            data = file.read(num_wanted) if num_wanted > 0 else b""
        except OSError as error:
            raise unreadable(error, self._file.path, place) from error

        if data or num_wanted <= 0:
            return data

        raise SourceChangedError(shrunk(self._file, place))

    def _fault(self, what: str) -> SourceError:
        code, unit = _UNITS[self._coding]
        start = self._entries[-1][0]
        return SourceError(
            f"{code} {self._file.path}: the {self._coding} {unit} that begins at byte {start} {what}. All rows before "
            f"that are delivered; restore the file, and try it with: {self._coding} -t"
        )


def _refuse_changed(same: SameFile | ObjectFile) -> None:
    try:
        same.check()
    except FileChangedError as error:
        raise SourceChangedError(str(error)) from error


def _collected(pieces: Iterator[bytes], check: Callable[[], object]) -> Iterator[bytes]:
    """The same bytes in larger pieces: a file may have a compressed member for every line.

    :param check: called before a piece is given, and before a fault is raised.
    """
    held: list[bytes] = []
    num_bytes = 0
    fault = None
    while fault is None:
        try:
            piece = next(pieces)
        except StopIteration:
            break
        except SourceError as error:
            fault, piece = error, b""
        held.append(piece)
        num_bytes += len(piece)
        if num_bytes >= _PIECE_BYTES:
            check()
            yield b"".join(held)
            held, num_bytes = [], 0
    check()
    if num_bytes:
        yield b"".join(held)
    if fault is not None:
        raise fault
