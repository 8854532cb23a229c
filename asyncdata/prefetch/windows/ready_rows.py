"""The rows of a window whose scans were answered with samples: they are put into the window's order here.

The values of all samples are end to end in one buffer, with a start and a size for each row and column. A chunk copies
its own. A scan may be answered without samples, as one of its rows was too much for a worker: its rows have text only,
and the chunks with them are requested and then completed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.callbacks import no_op
from asyncdata.core.messages import Column
from asyncdata.core.row_codes import IS_KNOWN
from asyncdata.prefetch.merged_samples import Found, Indices, Piece, kept_rows, merge, values_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.messages import Data, RowError, Tokenize, Tokenized

__all__ = ("ReadyRows",)

_SUMS = "\0token_sums"
"""The name of a column that no tokenize function can give."""

_LEAST_BYTES = 1 << 16
_UNUSED = 3
"""References to a buffer of the list: of the list, of the loop over it, and of the count of references."""

_TEXT, _SAMPLE, _NO_SAMPLE = 0, 1, 2
Kinds = np.ndarray[Any, np.dtype[np.int8]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


class _Part(NamedTuple):
    """The rows of a scan.

    :ivar kinds: of each row: only its text is known, it is a sample, or it yields none.
    :ivar are_cached: whether each row was in the token cache.
    :ivar starts: column -> where each row's value begins in the buffer; ``sizes`` its bytes.
    :ivar drops: reason -> rows; ``notes``: the same.
    """

    kinds: Kinds
    are_cached: Bools
    starts: dict[str, Indices]
    sizes: dict[str, Indices]
    drops: dict[str, Data]
    notes: dict[str, Data]
    errors: list[RowError]


class ReadyRows:
    """The samples of one window.

    :param buffers: of all windows; one that no other uses is used again: new memory costs more than a copy.
    :param count_cached: called with the number of rows that are delivered and were in the token cache.
    """

    def __init__(self, buffers: list[bytearray], count_cached: Callable[[int], object] = no_op) -> None:
        self._count_cached = count_cached
        free = (buffer for buffer in buffers if sys.getrefcount(buffer) == _UNUSED)
        self._data = next(free, None) or bytearray(_LEAST_BYTES)
        if not any(buffer is self._data for buffer in buffers):
            buffers.append(self._data)
        self._end = 0
        self._parts: dict[int, _Part] = {}
        self._busy_s = 0.0
        self._kinds: Kinds = np.empty(0, np.int8)
        self._are_cached: Bools = np.empty(0, np.bool_)
        self._starts: dict[str, Indices] = {}
        self._sizes: dict[str, Indices] = {}
        self._drops: dict[str, Any] = {}
        self._notes: dict[str, Any] = {}
        self._errors: dict[int, RowError] = {}

    def add(self, part: int, are_cached: Bools, samples: Tokenized | None) -> None:
        """Copy the samples of scan number ``part``; None: its rows have text only.

        :param are_cached: of each row, whether it was in the token cache.
        """
        num_rows = len(are_cached)
        if samples is None:
            self._parts[part] = _Part(np.full(num_rows, _TEXT, np.int8), are_cached, {}, {}, {}, {}, [])
            return

        self._busy_s += 0.0 if are_cached.all() else samples.busy_s
        kept = kept_rows(samples)
        kinds, starts, sizes = np.full(num_rows, _NO_SAMPLE, np.int8), {}, {}
        kinds[kept] = _SAMPLE
        for values in values_of(_with_sums(samples)):
            starts[values.name], sizes[values.name] = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
            starts[values.name][kept], sizes[values.name][kept] = self._end + values.starts, values.sizes
            stop = self._end + len(values.data)
            if stop > len(self._data):
                self._data += bytes(max(len(self._data), stop - len(self._data)))
            self._data[self._end : stop] = values.data
            self._end = stop
        self._parts[part] = _Part(kinds, are_cached, starts, sizes, samples.drops, samples.notes, samples.errors)

    def arrange(self, order: Indices) -> None:
        """All scans are there: put their rows into this order."""
        parts = [self._parts.pop(number) for number in sorted(self._parts)]
        firsts = np.cumsum([0, *(len(part.kinds) for part in parts)])[:-1].tolist()
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        self._kinds = _joined([part.kinds for part in parts], np.int8)[order]
        self._are_cached = _joined([part.are_cached for part in parts], np.bool_)[order]
        for name in {name for part in parts for name in part.sizes}:
            nothing = [np.zeros(len(part.kinds), np.int64) for part in parts]
            for found, of in ((self._starts, [p.starts for p in parts]), (self._sizes, [p.sizes for p in parts])):
                columns = [one.get(name, zeros) for one, zeros in zip(of, nothing, strict=True)]
                found[name] = _joined(columns, np.int64)[order]
        for first, part in zip(firsts, parts, strict=True):
            _mark(self._drops, part.drops, first, places)
            _mark(self._notes, part.notes, first, places)
            self._errors |= {int(places[first + error.row]): error for error in part.errors}

    @property
    def _num_fresh(self) -> int:
        """Rows that were tokenized with their window, or will be; at least 1."""
        return max(1, int(np.count_nonzero(~self._are_cached)))

    @property
    def are_all(self) -> bool:
        """Whether no row needs a worker."""
        return len(self._kinds) > 0 and bool((self._kinds != _TEXT).all())

    def placed(self, first: int, stop: int) -> Tokenized | None:
        """The rows ``[first, stop)``, if all of them are there; None if a worker must tokenize some."""
        return self.reply(first, stop - first, None) if (self._kinds[first:stop] != _TEXT).all() else None

    def left_out(self, request: Tokenize, first: int) -> Tokenize:
        """The request for rows from ``first`` on, without those that are there."""
        starts = np.frombuffer(request.starts, np.int32)
        is_here = self._kinds[first : first + len(starts)] != _TEXT
        starts = np.where(is_here, np.int32(IS_KNOWN), starts)
        overflow = [item for item in request.overflow if not is_here[item.row]]
        return msgspec.structs.replace(request, starts=starts.tobytes(), overflow=overflow)

    def reply(self, first: int, num_rows: int, fresh: Tokenized | None) -> Tokenized:
        """The reply for rows from ``first`` on.

        :param fresh: the reply for those that were not there.
        """
        stop, kinds = first + num_rows, self._kinds[first : first + num_rows]
        rows = np.flatnonzero(kinds == _SAMPLE)
        starts = {name: values[first:stop][rows] for name, values in self._starts.items()}
        sizes = {name: values[first:stop][rows] for name, values in self._sizes.items()}
        drops, notes = _rows_of(self._drops, first, kinds), _rows_of(self._notes, first, kinds)
        found = Found([Piece(memoryview(self._data), rows, starts, sizes)], drops, notes)
        num_cached = int(np.count_nonzero(self._are_cached[first:stop]))
        self._count_cached(num_cached)
        busy_s = self._busy_s * (num_rows - num_cached) / self._num_fresh if fresh is None else fresh.busy_s
        reply = merge(found, None if fresh is None else _with_sums(fresh), num_rows, busy_s)
        errors = [
            msgspec.structs.replace(self._errors[first + row], row=row)
            for row in np.flatnonzero(kinds == _NO_SAMPLE).tolist()
            if first + row in self._errors
        ]
        sums = reply.columns.pop(_SUMS, None)
        return msgspec.structs.replace(
            reply,
            errors=sorted([*errors, *reply.errors], key=_row),
            token_sums=b"" if sums is None else sums.data,
            num_cached=num_cached,
        )


_row: Callable[[RowError], int] = lambda error: error.row  # noqa: E731


def _joined(parts: list[Any], dtype: Any) -> Any:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _mark(marks: dict[str, Any], rows_by_name: dict[str, Data], first: int, places: Indices) -> None:
    for name, rows in rows_by_name.items():
        is_marked = marks.setdefault(name, np.zeros(len(places), np.bool_))
        is_marked[places[first + np.frombuffer(rows, np.int32)]] = True


def _rows_of(marks: dict[str, Any], first: int, kinds: Kinds) -> dict[str, list[int]]:
    """The marked rows of each name, from ``first`` on; names without one are left out."""
    found = {
        name: np.flatnonzero(is_marked[first : first + len(kinds)] & (kinds != _TEXT)).tolist()
        for name, is_marked in marks.items()
    }
    return {name: rows for name, rows in found.items() if rows}


def _with_sums(samples: Tokenized) -> Tokenized:
    """The checksums of its tokens as a column."""
    if not samples.token_sums:
        return samples

    ends = np.arange(4, len(samples.token_sums) + 4, 4).astype(np.uint32).tobytes()
    column = Column(samples.token_sums, ends)
    return msgspec.structs.replace(samples, columns={**samples.columns, _SUMS: column})
