"""A worker's reader of the elements of JSON arrays: as for lines, but each array is scanned from its front.

An element belongs to the block that holds its first byte. Where one begins follows from all that comes before it, so a
worker remembers how far it has scanned, and continues from there.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncdata.sources.reader import BlockRows
from asyncdata.sources.text.json_array_stream import SPACE, Marks, array_fault, opening
from asyncdata.sources.text.line_scanner import LineReader, read_row

if TYPE_CHECKING:
    from asyncdata.core.errors import SourceError
    from asyncdata.core.messages import Block, FileRef, Job
    from asyncdata.sources.stream import Int64
    from asyncdata.sources.text.json_array_stream import Chars

__all__ = ("ArrayReader", "Elements")

_PIECE_BYTES = 256 * 1024
_MAX_SCANS = 64
_COMMA, _END = b",]"
_IS_SPACE = np.isin(np.arange(256), np.frombuffer(SPACE, np.uint8))
_NOTHING: Int64 = np.empty(0, np.int64)


class ArrayReader(LineReader):
    """Rows are the elements of arrays, or lines: a :class:`~asyncdata.sources.reader.BlockReader`.

    :param are_arrays: of each file: whether it is an array.
    """

    def __init__(self, job: Job, are_arrays: list[bool]) -> None:
        super().__init__(job)
        self._are_arrays = are_arrays
        self._scans: dict[int, Elements] = {}

    def read_block(self, block: Block, num_bytes: int) -> BlockRows:
        """As the protocol says.

        :raises SourceError: if the file is not one whole array.
        """
        if not self._are_arrays[block.file_id]:
            return super().read_block(block, num_bytes)

        fd, file = self._fd(block.file_id), self._files[block.file_id]
        begins, lengths = self._scan(fd, block.file_id).of_block(fd, block.start, block.stop)
        if len(begins) == 0:
            return BlockRows(b"", array("i"), array("i"), array("i"), 0)

        first, stop = int(begins[0]), min(int(begins[-1] + lengths[-1]), block.stop + self._slack_bytes)
        data = read_row(fd, file, first, min(stop - first, num_bytes))
        is_good = lengths <= self._max_row_bytes
        starts = np.where(is_good & (begins + lengths <= first + len(data)), begins - first, -1)
        lengths = np.where(is_good, lengths, -1)
        return BlockRows(data, _ints(starts), _ints(lengths), _ints(begins - block.start), 0)

    def _scan(self, fd: int, file_id: int) -> Elements:
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
        self._scan = _Scan(self._file.path, *place)
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


class _Scan:
    """The state of the scan after some pieces of an array's text.

    :param offset: the start of the text: that of the file, or of element ``number``.
    :ivar offset: of the next piece.
    :ivar number: the number of the current, incomplete element.
    :ivar begin: its first byte; -1 if it was not read yet.
    :ivar fault: the fault of the array, at :attr:`offset`. No element begins after :attr:`begin`.
    """

    def __init__(self, path: str, offset: int, number: int) -> None:
        self.offset = offset
        self.number = number
        self.begin = -1
        self.fault: SourceError | None = None
        self._stop = -1  # after the last byte of the current element that is not white space
        self._path = path
        self._marks = Marks()
        self._is_begun = offset > 0
        self._is_ended = False
        self._is_comma_before = number > 0  # so that an element must come

    def lacks(self, stop: int) -> bool:
        """Whether an element that begins before ``stop`` may be incomplete."""
        return (self.begin if self.begin >= 0 else self.offset) < stop

    def feed(self, piece: bytes) -> tuple[Int64, Int64]:
        """The first bytes and the lengths of the elements that end in the next piece, before a fault if there is one.

        :raises SourceError: if it does not begin as an array does.
        """
        begins = lengths = _NOTHING
        pos = done = 0
        if not self._is_begun:
            pos, self._is_begun = opening(piece, self.offset, self._path)
        chars = np.frombuffer(piece, np.uint8, offset=pos)
        texts = np.flatnonzero(~_IS_SPACE[chars])
        self.offset += pos
        if self._is_begun and not self._is_ended:
            marks = np.array(self._marks.find(chars), np.int64)
            if len(marks):
                begins, lengths = self._between(chars, texts, marks)
                done = int(marks[-1]) + 1
            if self.fault is None and not self._is_ended:
                self._add(texts[np.searchsorted(texts, done) :])
        if self._is_ended:
            self._refuse_more(chars, texts[np.searchsorted(texts, done) :])
        if self.fault is None:
            self.offset += len(chars)
        return begins, lengths

    def _between(self, chars: Chars, texts: Int64, marks: Int64) -> tuple[Int64, Int64]:
        """The elements before each of the marks."""
        starts = np.concatenate(([0], marks[:-1] + 1))
        first, last = np.searchsorted(texts, starts), np.searchsorted(texts, marks)
        is_there = first < last
        begins = np.where(is_there, self.offset + texts[np.minimum(first, len(texts) - 1)], -1)
        stops = np.where(is_there, self.offset + texts[last - 1] + 1, -1)
        if self.begin >= 0:
            begins[0], stops[0] = self.begin, max(self._stop, int(stops[0]))
        self.begin = self._stop = -1
        num_good = self._judge(chars, marks, begins)
        self.number += num_good
        self._is_comma_before = True
        return begins[:num_good], (stops - begins)[:num_good]

    def _judge(self, chars: Chars, marks: Int64, begins: Int64) -> int:
        """The number of marks with an element before them, as each must have; the last may be the array's end."""
        last = int(chars[marks[-1]])
        is_ended, is_wrong = last != _COMMA, last not in (_COMMA, _END)
        missing = np.flatnonzero(begins[: len(begins) - is_wrong] < 0).tolist()
        is_empty = is_ended and missing == [0] and not self._is_comma_before and len(marks) == 1
        if missing and not is_empty:
            self._set_fault(int(marks[missing[0]]), f"element {self.number + missing[0]} is missing")
            return int(missing[0])

        if is_wrong:
            self._set_fault(int(marks[-1]), f"there is {chr(last)!r} in place of its ']'")
            self.begin = int(begins[-1])
            return len(marks) - 1

        self._is_ended = is_ended
        return 0 if is_empty else len(marks)

    def _set_fault(self, pos: int, reason: str) -> None:
        """Record a fault at ``pos`` of the piece; the rest is ignored."""
        self.offset += pos
        self.fault = array_fault(self._path, f"at byte {self.offset} {reason}")

    def _add(self, texts: Int64) -> None:
        """The text after the last mark belongs to the next element, or to the current one."""
        if len(texts):
            self.begin = self.begin if self.begin >= 0 else self.offset + int(texts[0])
            self._stop = self.offset + int(texts[-1]) + 1

    def _refuse_more(self, chars: Chars, texts: Int64) -> None:
        if len(texts):
            text = chars[texts[0] :].tobytes().rstrip(SPACE)[:16]
            self.offset += int(texts[0])
            self.fault = array_fault(self._path, f"at byte {self.offset}, after its end, there is {text!r}")

    def finish(self) -> None:
        """End of the text: record a fault if the array is incomplete."""
        if not (self._is_ended or self.fault is not None):
            where = f"within element {self.number}, which begins at byte {self.begin}"
            where = where if self.begin >= 0 else f"after {self.number} elements"
            self.fault = array_fault(self._path, f"it ends {where}, without ']'")
