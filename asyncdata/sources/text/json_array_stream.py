"""Splits a text that arrives in pieces into rows: the elements of one JSON array, unchanged.

An element is what stands between two commas of the array. Only quotes, brackets and commas are looked at, many at once,
so that elements reach the worker undecoded; whether one is JSON is for the worker to judge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from asyncdata.core.errors import SourceError
from asyncdata.sources.text.line_stream import TextRows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from asyncdata.sources.stream import Int64

__all__ = ("SPACE", "Chars", "Marks", "array_fault", "opening", "split_array")

_BOM = b"\xef\xbb\xbf"
SPACE = b" \t\r\n"
"""The white space of JSON."""

_QUOTE, _BACKSLASH, _COMMA, _END = b'"\\,]'
_DEPTH = np.zeros(256, np.int8)
_DEPTH[list(b"[{")], _DEPTH[list(b"]}")] = 1, -1
_IS_MARK = np.isin(np.arange(256), np.frombuffer(b"[]{},", np.uint8))

Chars = np.ndarray[Any, np.dtype[np.uint8]]


def split_array(pieces: Iterable[bytes], offset: int, number: int, max_row_bytes: int, path: str) -> Iterator[TextRows]:
    """The elements of an array from the text's start on (``offset`` 0), or from element ``number`` on, at ``offset``.

    White space around an element is left out, a byte-order mark at the start of the text is too. Of an element longer
    than ``max_row_bytes`` no more is held than that and a piece.

    :param pieces: the text from ``offset`` on.
    :param path: the file's name in errors.
    :raises SourceError: if the text is not a complete array, after the elements before that.
    """
    array = _Array(offset, number, max_row_bytes, path)
    for piece in pieces:
        fault = None
        try:
            array.feed(piece)
        except SourceError as error:
            fault = error
        if array.lengths:
            yield array.take()
        if fault is not None:
            raise fault

    array.finish()


def array_fault(path: str, reason: str) -> SourceError:
    """The error for a file that is not a complete array."""
    return SourceError(f"AD120 {path} is not one whole JSON array: {reason}; repair the file")


def opening(piece: bytes, offset: int, path: str) -> tuple[int, bool]:
    """The bytes of a piece before the first element, and whether the array's bracket is among them.

    :param offset: of the piece; only white space, or a byte-order mark, comes before it.
    :raises SourceError: if anything other than a bracket comes first.
    """
    mark = _BOM[offset : offset + len(piece)]
    pos = len(mark) if mark and piece.startswith(mark) else 0
    rest = piece[pos:].lstrip(SPACE)
    if rest and not rest.startswith(b"["):
        raise array_fault(path, f"it does not begin with '[', but with {rest[:16]!r}")

    return len(piece) - len(rest) + bool(rest), bool(rest)


class Marks:
    """Finds the commas and the end of the array in consecutive pieces."""

    def __init__(self) -> None:
        self._is_in_string = False
        self._is_escaped = False  # the first byte of the next piece
        self._depth = 0

    def find(self, piece: bytes | Chars) -> list[int]:
        """The positions of the array's own commas; the last one is its end if it is a bracket."""
        chars = np.frombuffer(piece, np.uint8)
        quotes = self._quotes(chars)
        marks = np.flatnonzero(_IS_MARK[chars])
        marks = marks[(np.searchsorted(quotes, marks) + self._is_in_string) % 2 == 0]
        self._is_in_string ^= bool(len(quotes) % 2)
        depths = self._depth + np.cumsum(_DEPTH[chars[marks]], dtype=np.int64)
        if len(depths):
            self._depth = int(depths[-1])
        ends = np.flatnonzero(depths < 0)[:1]
        is_own = (depths == 0) & (chars[marks] == _COMMA)
        is_own[ends[0] if len(ends) else len(marks) :] = False
        is_own[ends] = True
        found: list[int] = marks[is_own].tolist()
        return found

    def _quotes(self, chars: Chars) -> Int64:
        """Where strings begin and end."""
        backslashes = np.flatnonzero(chars == _BACKSLASH)
        quotes = np.flatnonzero(chars == _QUOTE)
        if len(backslashes) == 0 and not self._is_escaped:
            return quotes

        is_escaped = np.zeros(len(chars) + 1, np.bool_)
        is_escaped[0] = self._is_escaped
        backslashes = backslashes[~is_escaped[backslashes]]
        firsts = np.flatnonzero(np.diff(backslashes, prepend=-2) != 1)  # of backslashes side by side
        counts = np.diff(firsts, append=len(backslashes))
        is_escaped[backslashes[firsts[counts % 2 == 1]] + counts[counts % 2 == 1]] = True
        self._is_escaped = bool(is_escaped[-1])
        return quotes[~is_escaped[quotes]]


class _Array:
    """The state after some pieces.

    :ivar lengths: the lengths of the elements that were found but not taken yet.
    """

    def __init__(self, offset: int, number: int, max_row_bytes: int, path: str) -> None:
        self.lengths: list[int] = []
        self._data: list[bytes] = []
        self._begins: list[int] = []
        self._first = (offset, number)  # where the elements begin that are not taken, and the number of their first
        self._offset = offset  # of the next piece
        self._number = number
        self._max_row_bytes = max_row_bytes
        self._path = path
        self._marks = Marks()
        self._is_begun = offset > 0
        self._is_ended = False
        self._is_last_open = number > 0  # a comma stands before the element, so that it must be there
        self._begin = self._stop = -1  # of the present element, as far as it is known
        self._held: list[bytes] = []  # what it has in earlier pieces

    def feed(self, piece: bytes) -> None:
        """Find what ends in ``piece``.

        :raises SourceError: if it does not continue the array.
        """
        pos = 0
        if not self._is_begun:
            pos, self._is_begun = opening(piece, self._offset, self._path)
        if self._is_begun and not self._is_ended:
            rest = piece[pos:]
            self._offset += pos
            pos = 0
            for mark in self._marks.find(rest):
                self._add(rest[pos:mark], pos)
                self._found(mark, rest[mark])
                pos = mark + 1
            piece = rest
        if self._is_ended:
            self._refuse_more(piece[pos:], pos)
        elif self._is_begun:
            self._add(piece[pos:], pos)
        self._offset += len(piece)

    def _add(self, text: bytes, pos: int) -> None:
        """``text``, at ``pos`` of the piece, belongs to the current element."""
        if self._begin < 0:
            bare = text.lstrip(SPACE)
            pos += len(text) - len(bare)
            text = bare
        bare = text.rstrip(SPACE)
        if bare:
            self._begin = self._begin if self._begin >= 0 else self._offset + pos
            self._stop = self._offset + pos + len(bare)
        if self._stop - self._begin > self._max_row_bytes:
            self._held = []
        elif text:
            self._held.append(text)

    def _found(self, mark: int, char: int) -> None:
        """The current element ends before the comma, or the end of the array, at ``mark``."""
        self._is_ended = char != _COMMA
        if self._is_ended and char != _END:
            raise self._fault(f"at byte {self._offset + mark} there is {chr(char)!r} in place of its ']'")

        if self._begin >= 0:
            self._keep()
        elif self._is_last_open or not self._is_ended:
            raise self._fault(f"at byte {self._offset + mark} element {self._number} is missing")

        self._is_last_open = True

    def _keep(self) -> None:
        length = self._stop - self._begin
        if not self.lengths:
            self._first = (self._begin, self._number)
        if length <= self._max_row_bytes:
            self._data += (b"".join(self._held)[:length], b"\n")
        self.lengths.append(length)
        self._begins.append(self._begin)
        self._number += 1
        self._held, self._begin, self._stop = [], -1, -1

    def _refuse_more(self, text: bytes, pos: int) -> None:
        bare = text.lstrip(SPACE)
        if bare:
            place = self._offset + pos + len(text) - len(bare)
            raise self._fault(f"at byte {place}, after its end, there is {bare[:16]!r}")

    def take(self) -> TextRows:
        """The elements found so far."""
        offset, number = self._first
        lengths, data = np.array(self.lengths, np.int64), b"".join(self._data)
        offsets = np.array(self._begins, np.int64)
        self.lengths, self._data, self._begins = [], [], []
        return TextRows(offset, number, number + np.arange(len(lengths)), lengths, data, 0, offsets)

    def finish(self) -> None:
        """End of the text.

        :raises SourceError: if the array is incomplete.
        """
        if not self._is_ended:
            where = f"within element {self._number}, which begins at byte {self._begin}"
            raise self._fault(f"it ends {where if self._begin >= 0 else f'after {self._number} elements'}, without ']'")

    def _fault(self, reason: str) -> SourceError:
        return array_fault(self._path, reason)
