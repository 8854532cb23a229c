"""Writes one request's samples as packed columns."""

from __future__ import annotations

from array import array
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from asyncdata.core.messages import Column, Data, RowError, Tokenized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from asyncdata.tokenization.rows import RowFault


Buffer = bytes | memoryview

_COLUMNS = ("prompt", "prompt_text", "label", "metadata", "extra", "spans", "media", "row", "cost")


class ColumnWriter:
    """Collects one request's samples as packed columns.

    :param progress: called with the index of a row in the request before a user's function gets it.
    :param numbers: the index in the request of each row that is written; None if they are the same.
    :param only_counts: keep nothing of a sample but how many tokens it has, and its cost.
    """

    def __init__(
        self,
        progress: Callable[[int], None] = lambda _: None,
        numbers: Sequence[int] | None = None,
        *,
        only_counts: bool = False,
    ) -> None:
        self._progress = progress
        self._numbers = numbers
        self._only_counts = only_counts
        self._tokens = _Pieces()
        self._kept = array("i")
        self._columns: dict[str, _Pieces] = {}
        self._drops: dict[str, array[int]] = {}
        self._notes: dict[str, array[int]] = {}
        self._errors: list[RowError] = []

    def has_kept(self, row: int) -> bool:
        """Whether row ``row``, the last one that was written, was kept."""
        return bool(self._kept) and self._kept[-1] == self._number(row)

    def keep(self, row: int, tokens: Iterable[int], **columns: Buffer) -> None:
        """Keep row ``row`` as a sample of ``tokens``; each column's value is JSON text.

        ``prompt_text`` may be given instead of ``prompt``: the text itself, in UTF-8.

        :raises OverflowError: for a token id outside int32.
        :raises TypeError: for a token that is not an int, or a column that a sample does not have.
        """
        ids = tokens if isinstance(tokens, array) else array("i", tokens)
        if self._only_counts:
            columns = {name: value for name, value in columns.items() if name == "cost"}
        self._tokens.append(b"" if self._only_counts else ids, len(ids))
        for name, value in columns.items():
            self._column(name).append(value, len(value))
        self._kept.append(self._number(row))
        if len(columns) < len(self._columns):
            self._fill_columns()

    def keep_all(
        self, rows: Sequence[int], tokens: Buffer, ends: Sequence[int], columns: Mapping[str, Sequence[Buffer | str]]
    ) -> None:
        """As :meth:`keep` for each of ``rows``, in one call.

        :param tokens: their concatenated tokens, int32.
        :param ends: the end of each row's tokens.
        :param columns: ``{name: values}`` with one value for each row; an empty value means no value. Values are bytes
            or strings.
        """
        self._tokens.append_all(b"" if self._only_counts else tokens, ends)
        for name, values in () if self._only_counts else columns.items():
            data, lengths = _end_to_end(values)
            if data:
                self._column(name).append_all(data, accumulate(lengths))
        self._kept.extend(rows if self._numbers is None else [self._numbers[row] for row in rows])
        self._fill_columns()

    def declare(self, names: Iterable[str]) -> None:
        """Have these columns, even if no sample has a value of them."""
        for name in names:
            self._column(name)

    def _column(self, name: str) -> _Pieces:
        if name not in self._columns:
            if name not in _COLUMNS and not name.startswith("@"):  # those begin the keys of declared columns
                raise TypeError(f"a sample has no column {name!r}; there are {', '.join(_COLUMNS)}")

            self._columns[name] = _Pieces()
            self._columns[name].fill(len(self._kept))
        return self._columns[name]

    def _fill_columns(self) -> None:
        """Add empty values for samples without a value of a column."""
        for column in self._columns.values():
            column.fill(len(self._kept))

    def progress(self, row: int | None) -> None:
        """Report that only row ``row`` is being processed; None: several rows.

        If the worker hangs or dies, that row is to blame; without a row, it is searched.
        """
        self._progress(-1 if row is None else self._number(row))

    def _number(self, row: int) -> int:
        return row if self._numbers is None else self._numbers[row]

    def drop(self, row: int, reason: str) -> None:
        """Row ``row`` intentionally gives no sample; counted under ``reason``."""
        self._drops.setdefault(reason, array("i")).append(self._number(row))

    def note(self, row: int, name: str) -> None:
        """Row ``row`` is kept, and statistics count it under ``name``."""
        self._notes.setdefault(name, array("i")).append(self._number(row))

    def fail(self, row: int, fault: RowFault) -> None:
        """Row ``row`` is bad: the policy of ``BadRows`` decides what that means."""
        self.fail_at(self._number(row), fault)

    def fail_at(self, number: int, fault: RowFault) -> None:
        """As :meth:`fail`, by the index of the row in the request."""
        self._errors.append(RowError(number, fault.code, fault.reason, fault.excerpt, fault.traceback))

    def extend(self, other: ColumnWriter) -> ColumnWriter:
        """Itself, with the rows of ``other`` after its own."""
        self._tokens.extend(other._tokens)
        for name, column in other._columns.items():
            self._column(name).extend(column)
        self._kept.extend(other._kept)
        self._fill_columns()
        for reason, rows in other._drops.items():
            self._drops.setdefault(reason, array("i")).extend(rows)
        for name, rows in other._notes.items():
            self._notes.setdefault(name, array("i")).extend(rows)
        self._errors.extend(other._errors)
        return self

    def keep_rows(self, rows: Sequence[Buffer]) -> None:
        """Keep the rows of samples with media beside them.

        :param rows: of the request.
        """
        media = self._columns.get("media")
        if media is None:
            return

        samples = zip(self._kept, chain((0,), media.ends), media.ends, strict=False)
        texts = [bytes(rows[row]) if start < end else b"" for row, start, end in samples]
        self._columns["row"] = _Pieces()
        self._columns["row"].append_all(b"".join(texts), accumulate(map(len, texts)))

    def finish(self, num_rows: int, busy_s: float) -> Tokenized:
        """The reply for a request of ``num_rows`` rows."""
        return Tokenized(
            tokens=self._tokens.joined(),
            token_ends=self._tokens.ends.tobytes(),
            kept=b"" if len(self._kept) == num_rows else self._kept.tobytes(),
            columns={name: Column(column.joined(), column.ends.tobytes()) for name, column in self._columns.items()},
            drops=_packed(self._drops),
            errors=sorted(self._errors, key=lambda error: error.row),
            busy_s=busy_s,
            notes=_packed(self._notes),
        )


class _Pieces:
    """Concatenated values; a value that arrives in one piece is never copied.

    :ivar ends: the end of each value, uint32.
    """

    __slots__ = ("_pieces", "ends")

    def __init__(self) -> None:
        self._pieces: list[Buffer | array[int]] = []
        self.ends = array("I")

    @property
    def _end(self) -> int:
        return self.ends[-1] if self.ends else 0

    def append(self, value: Buffer | array[int], length: int) -> None:
        """One more value."""
        ends = self.ends
        self._pieces.append(value)
        ends.append(ends[-1] + length if ends else length)

    def append_all(self, values: Buffer, ends: Iterable[int]) -> None:
        """Append concatenated values; ``ends`` are relative to their beginning."""
        base = self._end
        self._pieces.append(values)
        self.ends.extend([base + end for end in ends] if base else ends)

    def extend(self, other: _Pieces) -> None:
        """All values of another."""
        base = self._end
        self._pieces += other._pieces
        self.ends.extend(base + end for end in other.ends)

    def fill(self, num_values: int) -> None:
        """Add empty values until there are ``num_values``."""
        if len(self.ends) < num_values:
            self.ends.extend([self._end] * (num_values - len(self.ends)))

    def joined(self) -> Buffer:
        """The concatenated values."""
        if len(self._pieces) == 1 and not isinstance(self._pieces[0], array):
            return self._pieces[0]

        return b"".join(self._pieces)


def _end_to_end(values: Sequence[Any]) -> tuple[bytes, Iterable[int]]:
    """The values, and their lengths in bytes."""
    if values and isinstance(values[0], str):
        text = "".join(values)
        if text.isascii():
            return text.encode(), map(len, values)

        values = list(map(str.encode, values))
    return b"".join(values), map(len, values)


def _packed(rows_by_name: dict[str, array[int]]) -> dict[str, Data]:
    """The sorted rows of each name."""
    return {name: array("i", sorted(rows)).tobytes() for name, rows in rows_by_name.items()}
