"""The rows of a window whose scans were answered with samples: they are put into the window's order here.

The values of all samples are end to end in one buffer, with a start and a size for each row and column. A chunk copies
its own. A scan may be answered without samples, as one of its rows was too much for a worker: then the chunks with such
rows are requested like those of any window.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.messages import Column, Data, RowError, Tokenized, Unread

if TYPE_CHECKING:
    from collections.abc import Iterator


_SUMS = "\0token_sums"
"""The name of a column that no tokenize function can give."""

_LEAST_BYTES = 1 << 16
_SHORT_BYTES = 96
"""Mean length of values below which numpy gathers them faster than slices are joined."""

_TEXT, _SAMPLE, _NO_SAMPLE = 0, 1, 2
_NO_VALUES = Column(b"", b"")
Kinds = np.ndarray[Any, np.dtype[np.int8]]
Int64 = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


class _Part(NamedTuple):
    """The rows of a scan.

    :ivar kinds: of each row: only its text is known, it is a sample, or it yields none.
    :ivar is_elsewhere: whether another rank tokenized them.
    :ivar starts: column (``""``: tokens) -> where each row's value begins in the buffer; ``sizes`` its bytes.
    :ivar drops: reason -> rows; ``notes``: the same.
    """

    kinds: Kinds
    is_elsewhere: bool
    starts: dict[str, Int64]
    sizes: dict[str, Int64]
    drops: dict[str, Data]
    notes: dict[str, Data]
    errors: list[RowError]
    unread: dict[str, Unread]


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
        self._busy_s, self._is_padded = 0.0, False
        self._kinds: Kinds = np.empty(0, np.int8)
        self._are_elsewhere: Bools = np.empty(0, np.bool_)
        self._starts: dict[str, Int64] = {}
        self._sizes: dict[str, Int64] = {}
        self._drops: dict[str, Any] = {}
        self._notes: dict[str, Any] = {}
        self._errors: dict[int, RowError] = {}
        self._unread: list[tuple[int, str, int, str | None]] = []

    def add(self, part: int, num_rows: int, samples: Tokenized | None, *, is_elsewhere: bool) -> None:
        """Copy the samples of scan number ``part``; None: its rows have text only.

        :param is_elsewhere: whether another rank tokenized them.
        """
        if samples is None:
            self._parts[part] = _Part(np.full(num_rows, _TEXT, np.int8), is_elsewhere, {}, {}, {}, {}, [], {})
            return

        self._busy_s += 0.0 if is_elsewhere else samples.busy_s
        self._is_padded |= samples.is_padded
        kept = np.frombuffer(samples.kept, np.int32) if samples.kept else np.arange(len(samples.token_ends) // 4)
        kinds, starts, sizes = np.full(num_rows, _NO_SAMPLE, np.int8), {}, {}
        kinds[kept] = _SAMPLE
        for name, data, ends in _columns_of(samples):
            starts[name], sizes[name] = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
            sizes[name][kept] = of_kept = np.diff(ends, prepend=0)
            starts[name][kept] = self._end + ends - of_kept
            stop = self._end + len(data)
            if stop > len(self._data):
                self._data += bytes(max(len(self._data), stop - len(self._data)))
            self._data[self._end : stop] = data
            self._end = stop
        told = samples.drops, samples.notes, samples.errors, samples.unread
        self._parts[part] = _Part(kinds, is_elsewhere, starts, sizes, *told)

    def arrange(self, order: Int64) -> None:
        """All scans are there: put their rows into this order."""
        parts = [self._parts.pop(number) for number in sorted(self._parts)]
        firsts = np.cumsum([0, *(len(part.kinds) for part in parts)])[:-1].tolist()
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        self._kinds = _joined([part.kinds for part in parts], np.int8)[order]
        self._are_elsewhere = _joined([np.full(len(part.kinds), part.is_elsewhere) for part in parts], np.bool_)[order]
        for name in sorted({name for part in parts for name in part.sizes}):
            nothing = [np.zeros(len(part.kinds), np.int64) for part in parts]
            for found, of in ((self._starts, [p.starts for p in parts]), (self._sizes, [p.sizes for p in parts])):
                columns = [one.get(name, zeros) for one, zeros in zip(of, nothing, strict=True)]
                found[name] = _joined(columns, np.int64)[order]
        for first, part in zip(firsts, parts, strict=True):
            _mark(self._drops, part.drops, first, places)
            _mark(self._notes, part.notes, first, places)
            self._errors |= {int(places[first + error.row]): error for error in part.errors}
            for key, (number, row, text) in part.unread.items():
                self._unread.append((int(places[first + row]), key, number, text))

    @property
    def are_all(self) -> bool:
        """Whether no row needs a worker."""
        return len(self._kinds) > 0 and bool((self._kinds != _TEXT).all())

    def placed(self, first: int, stop: int) -> Tokenized | None:
        """The rows ``[first, stop)``, if all of them are there; None if a worker must tokenize some."""
        kinds = self._kinds[first:stop]
        if (kinds == _TEXT).any():
            return None

        rows = np.flatnonzero(kinds == _SAMPLE)
        columns = {name: self._column(name, first + rows) for name in self._sizes}
        tokens, sums = columns.pop("", _NO_VALUES), columns.pop(_SUMS, _NO_VALUES)
        num_elsewhere = int(np.count_nonzero(self._are_elsewhere[first:stop]))
        num_ours = max(1, int(np.count_nonzero(~self._are_elsewhere)))
        return Tokenized(
            tokens=tokens.data,
            token_ends=(np.frombuffer(tokens.ends, np.uint32) // 4).astype(np.uint32).tobytes(),
            kept=b"" if len(rows) == stop - first else rows.astype(np.int32).tobytes(),
            # One without a value says nothing, unless it is declared.
            columns={name: column for name, column in columns.items() if name.startswith("@") or column.data},
            drops=_rows_of(self._drops, first, stop),
            errors=[
                msgspec.structs.replace(self._errors[row], row=row - first)
                for row in range(first, stop)
                if row in self._errors
            ],
            busy_s=self._busy_s * (stop - first - num_elsewhere) / num_ours,
            notes=_rows_of(self._notes, first, stop),
            token_sums=sums.data,
            num_elsewhere=num_elsewhere,
            is_padded=self._is_padded,
            unread={key: (number, row - first, text) for row, key, number, text in self._unread if first <= row < stop},
        )

    def _column(self, name: str, rows: Int64) -> Column:
        """A column's values of these rows, end to end."""
        starts, sizes = self._starts[name][rows], self._sizes[name][rows]
        num_bytes, data = int(sizes.sum()), memoryview(self._data)
        if num_bytes >= _SHORT_BYTES * len(sizes):
            values = [data[start:stop] for start, stop in zip(starts.tolist(), (starts + sizes).tolist(), strict=True)]
            return Column(b"".join(values), np.cumsum(sizes).astype(np.uint32).tobytes())

        kind: Any = np.int32 if len(data) < 1 << 31 else np.int64  # a fifth of the time
        places, ends = np.arange(num_bytes, dtype=kind), np.cumsum(sizes)
        places += np.repeat((starts - ends + sizes).astype(kind), sizes)
        return Column(np.frombuffer(data, np.uint8).take(places).tobytes(), ends.astype(np.uint32).tobytes())


def _joined(parts: list[Any], dtype: Any) -> Any:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _mark(marks: dict[str, Any], rows_by_name: dict[str, Data], first: int, places: Int64) -> None:
    for name, rows in rows_by_name.items():
        counts = marks.setdefault(name, np.zeros(len(places), np.int32))
        np.add.at(counts, places[first + np.frombuffer(rows, np.int32)], 1)  # a row may have a note several times


def _rows_of(marks: dict[str, Any], first: int, stop: int) -> dict[str, Data]:
    """The marked rows of each name, from ``first`` on, as a reply has them; names without one are left out."""
    found = {
        name: np.repeat(np.arange(stop - first, dtype=np.int32), counts[first:stop]).tobytes()
        for name, counts in marks.items()
    }
    return {name: rows for name, rows in found.items() if rows}


def _columns_of(samples: Tokenized) -> Iterator[tuple[str, Data, Int64]]:
    """The columns of a reply, the tokens and their checksums among them: name, values end to end, where each stops."""
    yield "", samples.tokens, np.frombuffer(samples.token_ends, np.uint32).astype(np.int64) * 4
    if samples.token_sums:
        yield _SUMS, samples.token_sums, np.arange(4, len(samples.token_sums) + 4, 4)

    for name, column in samples.columns.items():
        yield name, column.data, np.frombuffer(column.ends, np.uint32).astype(np.int64)
