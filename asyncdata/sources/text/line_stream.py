"""Splits a text that arrives in pieces into rows: one row per line."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from asyncdata.sources.stream import Int64

__all__ = ("TextRows", "split_lines")

_BOM = b"\xef\xbb\xbf"
_NEWLINE = 10
_MAY_BE_BLANK = np.isin(np.arange(256), np.frombuffer(b"\n \t\r\v\f", np.uint8))


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
    mark: list[bytes] = []
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
                mark = [_BOM] if offset == 0 and b"".join(held).startswith(_BOM) else []
            held = list(mark)  # the row begins after it
            num_lost = num_bytes - len(_BOM) * len(mark)
    if num_bytes:
        yield _rows(b"".join(held) + b"\n", offset, number, num_lost, max_row_bytes)


def _rows(text: bytes, offset: int, number: int, num_lost: int, max_row_bytes: int) -> TextRows:
    """The rows of whole lines. ``num_lost`` bytes of the first line are not in ``text``."""
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
    for line in np.flatnonzero(_MAY_BE_BLANK[chars[starts]] & is_held).tolist():
        is_row[line] = bool(text[starts[line] : ends[line]].strip())
    data = text
    if not (is_row & is_held).all():
        lines = np.flatnonzero(is_row & is_held)
        spans = zip(starts[lines].tolist(), ends[lines].tolist(), strict=True)
        data = b"".join(text[start : end + 1] for start, end in spans)
    num_blank = len(ends) - int(is_row.sum())
    numbers = number + np.flatnonzero(is_row)
    return TextRows(offset, number, numbers, lengths[is_row], data, num_blank, offsets[is_row])
