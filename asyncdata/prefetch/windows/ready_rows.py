"""The rows of a window whose scans were answered with samples: they are put into the window's order here.

The values of all samples are end to end in one buffer, with a start and a size for each row and column. A chunk copies
its own: long values are joined from slices of the buffer; short ones are gathered by numpy, as a slice would cost more
than the bytes. A scan may be answered without samples, as one of its rows was too much for a worker: its rows have text
only, and the chunks with them are requested and then completed.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.messages import Column, Tokenized
from asyncdata.core.row_codes import IS_KNOWN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncdata.core.messages import Data, RowError, Tokenize
    from asyncdata.prefetch.windows.base import Int64

__all__ = ("ReadyRows",)

_SUMS = "\0token_sums"
"""The name of a column that no tokenize function can give."""

_LEAST_BYTES = 1 << 16
_SHORT_BYTES = 96
"""Below this mean length numpy is faster than slices."""

_TEXT, _SAMPLE, _NO_SAMPLE = 0, 1, 2
Kinds = np.ndarray[Any, np.dtype[np.int8]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


class _Part(NamedTuple):
    """The rows of a scan.

    :ivar kinds: of each row: only its text is known, it is a sample, or it yields none.
    :ivar is_elsewhere: whether another rank tokenized them.
    :ivar starts: column -> where each row's value begins in the buffer; ``sizes`` its bytes.
    :ivar drops: reason -> rows; ``notes``: the same.
    """

    kinds: Kinds
    is_elsewhere: bool
    starts: dict[str, Int64]
    sizes: dict[str, Int64]
    drops: dict[str, Data]
    notes: dict[str, Data]
    errors: list[RowError]


class _Piece(NamedTuple):
    """Samples in one buffer.

    :ivar rows: of the request, int64.
    :ivar starts: column (``""``: tokens) -> where each sample's value begins in the buffer, int64.
    :ivar sizes: column -> bytes of each value, int64.
    """

    buffer: memoryview
    rows: Int64
    starts: dict[str, Int64]
    sizes: dict[str, Int64]


class _Values(NamedTuple):
    """A column of a reply (``""``: its tokens).

    :ivar data: the values of all samples, end to end.
    :ivar starts: where each sample's value begins in it, int64.
    :ivar sizes: bytes of each value, int64.
    """

    name: str
    data: Data
    starts: Int64
    sizes: Int64


class ReadyRows:
    """The samples of one window.

    :param buffers: those that no window uses. This one takes one of them, as new memory costs more than a copy, and
        gives its own back when nothing refers to it any more.
    """

    def __init__(self, buffers: list[bytearray]) -> None:
        self._data = buffers.pop() if buffers else bytearray(_LEAST_BYTES)
        weakref.finalize(self, buffers.append, self._data).atexit = False
        self._end = 0
        self._parts: dict[int, _Part] = {}
        self._busy_s = 0.0
        self._kinds: Kinds = np.empty(0, np.int8)
        self._are_elsewhere: Bools = np.empty(0, np.bool_)
        self._starts: dict[str, Int64] = {}
        self._sizes: dict[str, Int64] = {}
        self._drops: dict[str, Any] = {}
        self._notes: dict[str, Any] = {}
        self._errors: dict[int, RowError] = {}

    def add(self, part: int, num_rows: int, samples: Tokenized | None, *, is_elsewhere: bool) -> None:
        """Copy the samples of scan number ``part``; None: its rows have text only.

        :param is_elsewhere: whether another rank tokenized them.
        """
        if samples is None:
            self._parts[part] = _Part(np.full(num_rows, _TEXT, np.int8), is_elsewhere, {}, {}, {}, {}, [])
            return

        self._busy_s += 0.0 if is_elsewhere else samples.busy_s
        kept = _kept_rows(samples)
        kinds, starts, sizes = np.full(num_rows, _NO_SAMPLE, np.int8), {}, {}
        kinds[kept] = _SAMPLE
        for values in _values_of(_with_sums(samples)):
            starts[values.name], sizes[values.name] = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
            starts[values.name][kept], sizes[values.name][kept] = self._end + values.starts, values.sizes
            stop = self._end + len(values.data)
            if stop > len(self._data):
                self._data += bytes(max(len(self._data), stop - len(self._data)))
            self._data[self._end : stop] = values.data
            self._end = stop
        self._parts[part] = _Part(kinds, is_elsewhere, starts, sizes, samples.drops, samples.notes, samples.errors)

    def arrange(self, order: Int64) -> None:
        """All scans are there: put their rows into this order."""
        parts = [self._parts.pop(number) for number in sorted(self._parts)]
        firsts = np.cumsum([0, *(len(part.kinds) for part in parts)])[:-1].tolist()
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        self._kinds = _joined([part.kinds for part in parts], np.int8)[order]
        self._are_elsewhere = _joined([np.full(len(part.kinds), part.is_elsewhere) for part in parts], np.bool_)[order]
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
    def _num_ours(self) -> int:
        """Rows that this rank tokenized with their window, or will; at least 1."""
        return max(1, int(np.count_nonzero(~self._are_elsewhere)))

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
        errors = [
            msgspec.structs.replace(self._errors[first + row], row=row)
            for row in np.flatnonzero(kinds == _NO_SAMPLE).tolist()
            if first + row in self._errors
        ]
        pieces = [_Piece(memoryview(self._data), rows, starts, sizes)] if len(rows) else []
        num_elsewhere = int(np.count_nonzero(self._are_elsewhere[first:stop]))
        busy_s = self._busy_s * (num_rows - num_elsewhere) / self._num_ours
        if fresh is not None:
            pieces += _pieces_of(_with_sums(fresh))
            drops, notes, busy_s = _merged(drops, fresh.drops), _merged(notes, fresh.notes), fresh.busy_s
            errors = sorted([*errors, *fresh.errors], key=_row)
        rows = _joined([piece.rows for piece in pieces], np.int64)
        order = np.argsort(rows, kind="stable") if np.any(rows[1:] < rows[:-1]) else None
        columns = {name: Column(*_column(pieces, name, order)) for name in _names_of(pieces)}
        tokens, sums = columns.pop("", _NO_VALUES), columns.pop(_SUMS, _NO_VALUES)
        return Tokenized(
            tokens=tokens.data,
            token_ends=(np.frombuffer(tokens.ends, np.uint32) // 4).astype(np.uint32).tobytes(),
            kept=b"" if len(rows) == num_rows else np.sort(rows).astype(np.int32).tobytes(),
            columns=columns,
            drops=drops,
            errors=errors,
            busy_s=busy_s,
            notes=notes,
            token_sums=sums.data,
            num_elsewhere=num_elsewhere,
        )


_NO_VALUES = Column(b"", b"")
_row: Callable[[RowError], int] = lambda error: error.row  # noqa: E731


def _joined(parts: list[Any], dtype: Any) -> Any:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _mark(marks: dict[str, Any], rows_by_name: dict[str, Data], first: int, places: Int64) -> None:
    for name, rows in rows_by_name.items():
        is_marked = marks.setdefault(name, np.zeros(len(places), np.bool_))
        is_marked[places[first + np.frombuffer(rows, np.int32)]] = True


def _rows_of(marks: dict[str, Any], first: int, kinds: Kinds) -> dict[str, Data]:
    """The marked rows of each name, from ``first`` on, as a reply has them; names without one are left out."""
    found = {
        name: np.flatnonzero(is_marked[first : first + len(kinds)] & (kinds != _TEXT)).astype(np.int32).tobytes()
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


def _names_of(pieces: list[_Piece]) -> Iterator[str]:
    """The columns that have a value, or are declared, and the tokens."""
    yield ""

    names = sorted({name for piece in pieces for name in piece.sizes} - {""})
    for name in names:
        if name.startswith("@") or any(name in piece.sizes and piece.sizes[name].any() for piece in pieces):
            yield name


def _pieces_of(reply: Tokenized) -> Iterator[_Piece]:
    """The samples of a reply."""
    if not reply.token_ends:
        return

    base, buffers, starts, sizes = 0, [], {}, {}
    for values in _values_of(reply):
        starts[values.name], sizes[values.name] = base + values.starts, values.sizes
        base += len(values.data)
        buffers.append(values.data)
    yield _Piece(memoryview(b"".join(buffers)), _kept_rows(reply), starts, sizes)


def _kept_rows(reply: Tokenized) -> Int64:
    """The rows of the request that have a sample."""
    kept = np.frombuffer(reply.kept, np.int32) if reply.kept else np.arange(len(reply.token_ends) // 4)
    return kept.astype(np.int64)


def _values_of(reply: Tokenized) -> Iterator[_Values]:
    """The columns of a reply, the tokens first."""
    yield _values("", reply.tokens, np.frombuffer(reply.token_ends, np.uint32).astype(np.int64) * 4)

    for name, column in reply.columns.items():
        yield _values(name, column.data, np.frombuffer(column.ends, np.uint32).astype(np.int64))


def _values(name: str, data: Data, ends: Int64) -> _Values:
    starts = np.zeros_like(ends)  # np.diff(prepend=) takes ten times as long for few values
    starts[1:] = ends[:-1]
    return _Values(name, data, starts, ends - starts)


def _column(pieces: list[_Piece], name: str, order: Int64 | None) -> tuple[bytes, bytes]:
    """A column's values end to end, and where each stops (uint32)."""
    if not pieces:
        return b"", b""

    nothing = [np.zeros(len(piece.rows), np.int64) for piece in pieces]
    starts = [piece.starts.get(name, zeros) for piece, zeros in zip(pieces, nothing, strict=True)]
    sizes = [piece.sizes.get(name, zeros) for piece, zeros in zip(pieces, nothing, strict=True)]
    if len(pieces) == 1 and order is None:
        return _gather(pieces[0].buffer, starts[0], sizes[0]), _ends(sizes[0])

    values = [
        piece.buffer[start : start + size]
        for piece, some_starts, some_sizes in zip(pieces, starts, sizes, strict=True)
        for start, size in zip(some_starts.tolist(), some_sizes.tolist(), strict=True)
    ]
    all_sizes = np.concatenate(sizes)
    if order is not None:
        values, all_sizes = [values[number] for number in order.tolist()], all_sizes[order]
    return b"".join(values), _ends(all_sizes)


def _gather(buffer: memoryview, starts: Int64, sizes: Int64) -> bytes:
    """The slices of ``buffer`` with these offsets and sizes, end to end."""
    num_bytes = int(sizes.sum())
    if num_bytes >= _SHORT_BYTES * len(sizes):
        stops = (starts + sizes).tolist()
        return b"".join([buffer[start:stop] for start, stop in zip(starts.tolist(), stops, strict=True)])

    kind: Any = np.int32 if len(buffer) < 1 << 31 else np.int64  # a fifth of the time
    places = np.arange(num_bytes, dtype=kind)
    places += np.repeat((starts - np.cumsum(sizes) + sizes).astype(kind), sizes)
    return np.frombuffer(buffer, np.uint8).take(places).tobytes()


def _ends(sizes: Int64) -> bytes:
    return np.cumsum(sizes).astype(np.uint32).tobytes()


def _merged(some: dict[str, Data], others: dict[str, Data]) -> dict[str, Data]:
    """Each name's rows of both, in ascending order."""
    merged = dict(some)
    for name, rows in others.items():
        both = np.frombuffer(b"".join([merged.get(name, b""), rows]), np.int32)
        merged[name] = np.sort(both).tobytes()
    return merged
