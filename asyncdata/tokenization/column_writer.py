"""Writes one request's samples as packed columns. And ranges of characters in a text, and the ranges of tokens that
they cover: pure functions, without a tokenizer.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from asyncdata.core.messages import Column, Data, RowError, Tokenized

if TYPE_CHECKING:
    from asyncdata.tokenization.rows import RowFault


NOT_TRAINED = -100
"""The label of a token that is not trained: what losses ignore by default."""

Span = tuple[int, int]
"""``[start, stop)``, of characters or of tokens. Lists of spans are rising and disjoint."""


class Offsets(NamedTuple):
    """The characters of each token of a text: ``[starts[i], stops[i])``. Neither the starts nor the stops ever fall."""

    starts: Sequence[int]
    stops: Sequence[int]

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Offsets:
        """From the characters of each token."""
        return cls([start for start, _ in spans], [stop for _, stop in spans])


def token_spans(offsets: Offsets, blocks: Iterable[Span]) -> list[Span]:
    """The tokens that lie in the blocks.

    A token belongs to a block if no character of it lies outside. So one that straddles a border belongs to none, and
    every part of a character that is split over several tokens belongs to the block of the character. A token of no
    characters belongs where the next one does.

    :param blocks: ranges of characters, rising and disjoint.
    """
    spans = [_inside(offsets, start, stop) for start, stop in blocks]
    return join((first, last) for first, last in spans if first < last)


def trained_tokens(offsets: Offsets, blocks: Iterable[Span], text: str) -> tuple[list[Span], list[int]]:
    """The tokens that are trained of the blocks of a text, and those that are not, though they hold a part of one.

    They are the tokens that lie in the blocks, and one more kind: a token that holds a block's first character with
    nothing but white space in front of it, as a reply's first word and the space before it are one token of many
    tokenizers. A model that is asked for the reply writes that token. Any other token that straddles a border is
    not trained: the model could not have written just its part.

    :param blocks: as for :func:`token_spans`.
    :param text: the text that both are ranges of.
    """
    starts, stops = offsets
    spans, straddling = [], set[int]()
    for start, stop in blocks:
        first = bisect_left(starts, start)
        last = bisect_left(starts, stop, first)
        if first >= last or stops[last - 1] > stop or (first and stops[first - 1] > start):  # a token straddles
            first, last, partly = _uneven(offsets, (start, stop), text)
            straddling.update(partly)
        if first < last:
            spans.append((first, last))
            if straddling:
                straddling.difference_update(range(first, last))
    return join(spans), sorted(straddling)


def _uneven(offsets: Offsets, block: Span, text: str) -> tuple[int, int, list[int]]:
    """The tokens that are trained of a block, as their first and the one after their last, and those that straddle."""
    starts, stops = offsets
    start, stop = block
    first, last = _inside(offsets, start, stop)
    last = max(first, last)
    while first and start < stops[first - 1] <= stop and text[starts[first - 1] : start].isspace():
        first -= 1
    return first, last, _partly_inside(offsets, block, (first, last)) if start < stop else []


def _inside(offsets: Offsets, start: int, stop: int) -> Span:
    """The tokens of which no character lies outside of a block; it may be empty."""
    starts, stops = offsets
    first = bisect_left(starts, start)
    return first, min(bisect_left(starts, stop), bisect_right(stops, stop))


def _partly_inside(offsets: Offsets, block: Span, tokens: Span) -> list[int]:
    """The tokens beside ``tokens``, which are a block's, that have a character of the block."""
    (start, stop), (first, last) = block, tokens
    starts, stops = offsets
    found = []
    while first and stops[first - 1] > start:
        first -= 1
        found.append(first)
    while last < len(starts) and starts[last] < stop:
        found.append(last)
        last += 1
    return found


def join(spans: Iterable[Span]) -> list[Span]:
    """The same with no two that touch, and none that is empty."""
    joined: list[Span] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return joined


def clip(spans: Iterable[Span], start: int, stop: int) -> list[Span]:
    """What of the spans lies in ``[start, stop)``, counted from ``start``."""
    cut = ((max(first, start) - start, min(last, stop) - start) for first, last in spans)
    return [(first, last) for first, last in cut if first < last]


def trained_runs(labels: Sequence[int]) -> list[Span]:
    """Where the labels are of trained tokens."""
    spans, start = [], 0
    for is_trained, run in groupby(labels, key=NOT_TRAINED.__ne__):
        stop = start + sum(1 for _ in run)
        if is_trained:
            spans.append((start, stop))
        start = stop
    return spans


def encode_spans(spans: Sequence[Span]) -> bytes:
    """The spans as JSON: what a sample's ``spans`` column holds."""
    return msgspec.json.encode(spans)


def common_prefix(one: str, other: str) -> int:
    """How many characters the two begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix(one: str, other: str) -> int:
    """How many characters the two end with alike."""
    return common_prefix(one[::-1], other[::-1])


# The columns

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
