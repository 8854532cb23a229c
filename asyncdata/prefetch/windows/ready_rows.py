"""The rows of a window whose scans were answered with samples: they are put into the window's order here.

The values of all samples are end to end in one buffer, with a start and a size for each row and column. A chunk copies
its own. A scan may be answered without samples, as one of its rows was too much for a worker: its rows have text only,
and the chunks with them are requested and then completed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.messages import Column
from asyncdata.core.row_codes import EXCLUDED_REASON, cached_start
from asyncdata.delivery.chunk import Chunk
from asyncdata.prefetch.merged_samples import Found, Indices, Piece, kept_rows, merge, values_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.messages import Data, RowError, Tokenize, Tokenized
    from asyncdata.core.types import Position
    from asyncdata.delivery.chunk import Origin

__all__ = ("ReadyRows",)

_SUMS = "\0token_sums"
"""The name of a column that no tokenize function can give."""

_TEXT, _SAMPLE, _NO_SAMPLE = 0, 1, 2
Kinds = np.ndarray[Any, np.dtype[np.int8]]


class _Part(NamedTuple):
    """The rows of a scan.

    :ivar kinds: of each row: only its text is known, it is a sample, or it yields none.
    :ivar starts: column -> where each row's value begins in the buffer; ``sizes`` its bytes.
    :ivar drops: reason -> rows; ``notes``: the same.
    """

    kinds: Kinds
    starts: dict[str, Indices]
    sizes: dict[str, Indices]
    drops: dict[str, Data]
    notes: dict[str, Data]
    errors: list[RowError]


class ReadyChunk(NamedTuple):
    """Rows that need no worker any more; see :class:`~asyncdata.prefetch.windows.base.Placed`."""

    reply: Tokenized

    def chunk(self, first: Position, num_rows: int, origin: Origin, *, ends_epoch: bool) -> Chunk:
        """The chunk of these rows."""
        return Chunk(self.reply, first, num_rows, origin, ends_epoch=ends_epoch)


class ReadyRows:
    """The samples of one window."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._parts: dict[int, _Part] = {}
        self._busy_s = 0.0
        self._kinds: Kinds = np.empty(0, np.int8)
        self._starts: dict[str, Indices] = {}
        self._sizes: dict[str, Indices] = {}
        self._drops: dict[str, Any] = {}
        self._notes: dict[str, Any] = {}
        self._errors: dict[int, RowError] = {}

    def add(self, part: int, num_rows: int, samples: Tokenized | None) -> None:
        """Copy the samples of scan number ``part``; None: its rows have text only."""
        if samples is None:
            self._parts[part] = _Part(np.full(num_rows, _TEXT, np.int8), {}, {}, {}, {}, [])
            return

        self._busy_s += samples.busy_s
        kept = kept_rows(samples)
        kinds, starts, sizes = np.full(num_rows, _NO_SAMPLE, np.int8), {}, {}
        kinds[kept] = _SAMPLE
        for values in values_of(_with_sums(samples)):
            starts[values.name], sizes[values.name] = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
            starts[values.name][kept], sizes[values.name][kept] = len(self._data) + values.starts, values.sizes
            self._data += values.data
        self._parts[part] = _Part(kinds, starts, sizes, samples.drops, samples.notes, samples.errors)

    def arrange(self, order: Indices) -> None:
        """All scans are there: put their rows into this order."""
        parts = [self._parts.pop(number) for number in sorted(self._parts)]
        firsts = np.cumsum([0, *(len(part.kinds) for part in parts)])[:-1].tolist()
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        self._kinds = _joined([part.kinds for part in parts], np.int8)[order]
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
    def are_all(self) -> bool:
        """Whether no row needs a worker."""
        return len(self._kinds) > 0 and bool((self._kinds != _TEXT).all())

    def placed(self, first: int, stop: int) -> ReadyChunk | None:
        """The rows ``[first, stop)``, if all of them are there; None if a worker must tokenize some."""
        if not (self._kinds[first:stop] != _TEXT).all():
            return None

        return ReadyChunk(self.reply(first, stop - first, None))

    def left_out(self, request: Tokenize, first: int) -> Tokenize:
        """The request for rows from ``first`` on, without those that are there."""
        starts = np.frombuffer(request.starts, np.int32)
        is_here = self._kinds[first : first + len(starts)] != _TEXT
        starts = np.where(is_here, np.int32(cached_start(0)), starts)
        overflow = [item for item in request.overflow if not is_here[item.row]]
        num_here = int(np.count_nonzero(is_here))
        return msgspec.structs.replace(request, starts=starts.tobytes(), overflow=overflow, num_cached=num_here)

    def reply(self, first: int, num_rows: int, fresh: Tokenized | None) -> Tokenized:
        """The reply for rows from ``first`` on.

        :param fresh: the reply for those that were not there; it may also leave out others as excluded.
        """
        stop, kinds = first + num_rows, self._kinds[first : first + num_rows]
        if fresh is not None and EXCLUDED_REASON in fresh.drops:
            kinds = kinds.copy()
            kinds[np.frombuffer(fresh.drops[EXCLUDED_REASON], np.int32)] = _TEXT
        rows = np.flatnonzero(kinds == _SAMPLE)
        starts = {name: values[first:stop][rows] for name, values in self._starts.items()}
        sizes = {name: values[first:stop][rows] for name, values in self._sizes.items()}
        drops, notes = _rows_of(self._drops, first, kinds), _rows_of(self._notes, first, kinds)
        found = Found([Piece(memoryview(self._data), rows, starts, sizes)], drops, notes)
        busy_s = self._busy_s * num_rows / len(self._kinds) if fresh is None else fresh.busy_s
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
