"""JSON arrays whose elements are rows, unchanged: finds the elements, and reads them in a worker.

An element is what stands between two commas of the array. Only quotes, brackets and commas are looked at, many at once,
so that elements reach the worker undecoded; whether one is JSON is for the worker to judge. An element belongs to the
block that holds its first byte. Where one begins follows from all that comes before it, so an array is scanned from its
front, and a worker remembers how far it has scanned.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncdata.core.errors import SourceError
from asyncdata.sources.files import BlockRows
from asyncdata.sources.line_scanner import LineReader, read_row

if TYPE_CHECKING:
    from asyncdata.core.identity import FileRef
    from asyncdata.core.messages import Block, Job
    from asyncdata.sources.stream import Int64


_PIECE_BYTES = 256 * 1024
_MAX_SCANS = 64
_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
"""The white space of JSON."""

_IS_SPACE = np.isin(np.arange(256), np.frombuffer(_SPACE, np.uint8))
_IS_MARK = np.isin(np.arange(256), np.frombuffer(b"[]{},", np.uint8))
_DEPTH = np.zeros(256, np.int8)
_DEPTH[list(b"[{")], _DEPTH[list(b"]}")] = 1, -1
_QUOTE, _COMMA = b'",'

Chars = np.ndarray[Any, np.dtype[np.uint8]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
_NOTHING: Int64 = np.empty(0, np.int64)


class ArrayScan:
    """The state of the scan after some pieces of an array's text.

    :param offset: where the text starts: the file, or element ``number``.
    :ivar offset: of the next piece.
    :ivar number: the number of the current, incomplete element.
    :ivar fault: the fault of the array, at :attr:`offset`. No element begins after :attr:`begin`.
    """

    def __init__(self, path: str, offset: int, number: int) -> None:
        self.offset = offset
        self.number = number
        self.fault: SourceError | None = None
        self._path = path
        self._is_begun = offset > 0
        self._is_ended = False
        self._held = _NOTHING  # of the current element, the first and the last byte that are not white space, so far
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False  # the first byte of the next piece

    @property
    def begin(self) -> int:
        """The first byte of the current element; -1 if it was not read yet."""
        return int(self._held[0]) if len(self._held) else -1

    @property
    def length(self) -> int:
        """Bytes of the current element so far, without white space around it."""
        return int(self._held[-1] + 1 - self._held[0])

    def lacks(self, stop: int) -> bool:
        """Whether an element that begins before ``stop`` may be incomplete."""
        return (self.begin if len(self._held) else self.offset) < stop

    def feed(self, piece: bytes) -> tuple[Int64, Int64]:
        """The first bytes and the lengths of the elements that end in the next piece, before a fault if there is one.

        :raises SourceError: if it does not begin as an array does.
        """
        if not self._is_begun:
            num_before, self._is_begun = _opening(piece, self.offset, self._path)
            self.offset += num_before
            piece = piece[num_before:]
        start = self.offset
        self.offset += len(piece)
        chars = np.frombuffer(piece, np.uint8)
        texts = np.flatnonzero(~_IS_SPACE[chars])  # places are those in the piece, and negative before it
        if len(self._held):
            texts = np.concatenate((self._held - start, texts))
        marks = _NOTHING if self._is_ended else self._own_marks(piece, chars)
        last = np.searchsorted(texts, marks)  # texts[first:last] lie before each mark
        first = np.concatenate(([0], last + 1))
        rest = texts[first[-1] :]
        num_good = self._judge(start + marks, first[:-1] == last, chr(chars[marks[-1]]) if len(marks) else ",")
        if self.fault is not None:
            rest = texts[first[num_good] : last[num_good]]
        elif self._is_ended and len(rest):
            text = piece[int(rest[0]) :].rstrip(_SPACE)[:16]
            self._fail(start + int(rest[0]), f", after its end, there is {text!r}")
            rest = _NOTHING
        self._held = start + rest[[0, -1]] if len(rest) else _NOTHING
        first, last = first[:num_good], last[:num_good]
        return start + texts[first], texts[last - 1] + 1 - texts[first]

    def _judge(self, marks: Int64, is_missing: Bools, closing: str) -> int:
        """The number of marks with an element before them, as each must have; the last may be the array's end."""
        is_wrong = closing not in ",]"
        num_good = len(marks) - is_wrong
        missing = np.flatnonzero(is_missing[:num_good])
        if len(missing) and closing == "]" and self.number + len(marks) == 1:
            num_good = 0  # an empty array
        elif len(missing):
            num_good = int(missing[0])
            self._fail(int(marks[num_good]), f" element {self.number + num_good} is missing")
        elif is_wrong:
            self._fail(int(marks[-1]), f" there is {closing!r} in place of its ']'")
        self._is_ended = self._is_ended or (closing == "]" and self.fault is None)
        self.number += num_good
        return num_good

    def _own_marks(self, piece: bytes, chars: Chars) -> Int64:
        """The positions of the array's own commas; the last one is its end if it is a bracket."""
        if self._is_escaped:
            piece = b"." + piece[1:]
        unescaped = piece.replace(b"\\\\", b"..").replace(b'\\"', b"..")
        self._is_escaped = unescaped.endswith(b"\\")
        quotes = np.flatnonzero(np.frombuffer(unescaped, np.uint8) == _QUOTE)
        marks = np.flatnonzero(_IS_MARK[chars])
        marks = marks[(np.searchsorted(quotes, marks) + self._is_in_string) % 2 == 0]
        self._is_in_string ^= bool(len(quotes) % 2)
        depths = self._depth + np.cumsum(_DEPTH[chars[marks]], dtype=np.int64)
        self._depth = int(depths[-1]) if len(depths) else self._depth
        ends = np.flatnonzero(depths < 0)
        stop = int(ends[0]) + 1 if len(ends) else len(marks)
        marks, depths = marks[:stop], depths[:stop]
        found: Int64 = marks[(depths < 0) | ((depths == 0) & (chars[marks] == _COMMA))]
        return found

    def _fail(self, offset: int, reason: str) -> None:
        """Record a fault; what comes after it is ignored."""
        self.offset = offset
        self.fault = _array_fault(self._path, f"at byte {offset}{reason}")

    def finish(self) -> None:
        """End of the text: record a fault if the array is incomplete."""
        if not (self._is_ended or self.fault is not None):
            where = f"within element {self.number}, which begins at byte {self.begin}"
            where = where if self.begin >= 0 else f"after {self.number} elements"
            self.fault = _array_fault(self._path, f"it ends {where}, without ']'")


def _array_fault(path: str, reason: str) -> SourceError:
    """The error for a file that is not a complete array."""
    return SourceError(f"AD120 {path} is not one whole JSON array: {reason}; repair the file")


def _opening(piece: bytes, offset: int, path: str) -> tuple[int, bool]:
    """The bytes of a piece before the first element, and whether the array's bracket is among them.

    :param offset: of the piece; only white space, or a byte-order mark, comes before it.
    :raises SourceError: if anything other than a bracket comes first.
    """
    mark = _BOM[offset : offset + len(piece)]
    pos = len(mark) if mark and piece.startswith(mark) else 0
    rest = piece[pos:].lstrip(_SPACE)
    if rest and not rest.startswith(b"["):
        raise _array_fault(path, f"it does not begin with '[', but with {rest[:16]!r}")

    return len(piece) - len(rest) + bool(rest), bool(rest)


class ArrayReader(LineReader):
    """Rows are the elements of arrays, or lines: a :class:`~asyncdata.sources.files.BlockReader`.

    :param are_arrays: of each file: whether it is an array.
    """

    def __init__(self, job: Job, are_arrays: list[bool]) -> None:
        super().__init__(job)
        self._are_arrays = are_arrays
        self._scans: dict[int, Elements] = {}

    def read_block(self, block: Block, num_bytes: int) -> BlockRows:
        """The rows of ``block``.

        :raises SourceError: if the file is not one whole array.
        """
        if not self._are_arrays[block.file_id]:
            return super().read_block(block, num_bytes)

        fd, file = self._fd(block.file_id), self._files[block.file_id]
        begins, lengths = self._scan(block.file_id).of_block(fd, block.start, block.stop)
        if len(begins) == 0:
            return BlockRows(b"", array("i"), array("i"), array("i"), 0)

        first, stop = int(begins[0]), min(int(begins[-1] + lengths[-1]), block.stop + self._slack_bytes)
        data = read_row(fd, file, first, min(stop - first, num_bytes))
        is_good = lengths <= self._max_row_bytes
        starts = np.where(is_good & (begins + lengths <= first + len(data)), begins - first, -1)
        lengths = np.where(is_good, lengths, -1)
        return BlockRows(data, _ints(starts), _ints(lengths), _ints(begins - block.start), 0)

    def _scan(self, file_id: int) -> Elements:
        found = self._scans.pop(file_id, None)
        if found is None and len(self._scans) >= _MAX_SCANS:
            del self._scans[next(iter(self._scans))]
        self._scans[file_id] = found or Elements(self._files[file_id])
        return self._scans[file_id]


def _ints(values: Int64) -> array[int]:
    return array("i", values.astype(np.int32).tobytes())


class _Checkpoint(NamedTuple):
    """An element where a scan can start: the position of its first byte, and its number."""

    begin: int
    number: int


class Elements:
    """Locates the elements of one array, from its front to its end.

    For an earlier element, the scan starts again from the last known element before it.
    """

    def __init__(self, file: FileRef) -> None:
        self._file = file
        self._checkpoints: dict[int, _Checkpoint] = {}  # the first element from a byte on, for some bytes
        self._begin_at(_Checkpoint(0, 0))

    def _begin_at(self, place: _Checkpoint) -> None:
        self._scan = ArrayScan(self._file.path, *place)
        self._begins = self._lengths = _NOTHING  # of what is found, and not yet given
        self._given = place.begin

    def of_block(self, fd: int, start: int, stop: int) -> tuple[Int64, Int64]:
        """The first bytes and the lengths of the elements that begin in ``[start, stop)`` of the file.

        :raises SourceError: if the file is not one whole array.
        """
        if start < self._given:
            known = sorted(self._checkpoints)
            before = bisect_right(known, start)
            self._begin_at(self._checkpoints[known[before - 1]] if before else _Checkpoint(0, 0))
        self.read_to(fd, start, stop)
        first, last = np.searchsorted(self._begins, (start, stop)).tolist()
        found = self._begins[first:last], self._lengths[first:last]
        self._begins, self._lengths, self._given = self._begins[last:], self._lengths[last:], stop
        if len(self._begins) or self._scan.begin >= 0:
            begin = int(self._begins[0]) if len(self._begins) else self._scan.begin
            self._checkpoints[stop] = _Checkpoint(begin, self._scan.number - len(self._begins))
        return found

    def read_to(self, fd: int, start: int, stop: int) -> None:
        """Scan until all elements that begin before ``stop`` are whole; those from ``start`` on are kept.

        A fault after that is ignored for now: the result must not depend on how much is read at once.

        :raises SourceError: if they are not.
        """
        scan, num_bytes = self._scan, self._file.num_bytes
        is_last = stop == num_bytes
        while scan.fault is None and scan.offset < num_bytes and (is_last or scan.lacks(stop)):
            piece = read_row(fd, self._file, scan.offset, min(_PIECE_BYTES, num_bytes - scan.offset))
            begins, lengths = scan.feed(piece)
            begins, lengths = np.concatenate((self._begins, begins)), np.concatenate((self._lengths, lengths))
            first = int(np.searchsorted(begins, start))
            self._begins, self._lengths = begins[first:], lengths[first:]
        if scan.offset == num_bytes:
            scan.finish()
        if scan.fault is not None and (is_last or scan.lacks(stop)):
            raise scan.fault
