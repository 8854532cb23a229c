"""A chunk: the samples of consecutive positions, as the packed columns in which a worker sent them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np

from asyncdata.types import Position, SourceLocation, Tokens

if TYPE_CHECKING:
    from asyncdata.wire import RowError, Tokenized

__all__ = ("Chunk", "Drop", "Origin")


class Origin(Protocol):
    """Knows where the rows of a chunk came from."""

    def location(self, row: int) -> SourceLocation:
        """The location of the chunk's row ``row``, counted from 0."""
        ...

    def key(self, row: int) -> tuple[int, int]:
        """The number of its file, and its byte offset there."""
        ...


class Drop(NamedTuple):
    """Rows of a chunk that yield no sample, and why. ``rows`` is int32, rising."""

    reason: str
    rows: np.ndarray[Any, np.dtype[np.int32]]


class Chunk:
    """Rows ``[first.row, first.row + num_rows)`` of one window, tokenized.

    :ivar num_samples: rows that were kept; the chunk's samples are counted from 0 to here.
    :ivar drops: rows that yield no sample, by reason.
    :ivar errors: bad rows, in their order.
    :ivar ends_epoch: whether no row of the epoch follows.
    :ivar num_bytes: memory the columns take.
    """

    __slots__ = (
        "_columns",
        "_kept",
        "_origin",
        "_token_ends",
        "_tokens",
        "drops",
        "ends_epoch",
        "errors",
        "first",
        "num_bytes",
        "num_rows",
        "num_samples",
    )

    def __init__(self, reply: Tokenized, first: Position, num_rows: int, origin: Origin, *, ends_epoch: bool) -> None:
        self.first = first
        self.num_rows = num_rows
        self.ends_epoch = ends_epoch
        self.errors: list[RowError] = reply.errors
        self.drops = [Drop(reason, np.frombuffer(rows, np.int32)) for reason, rows in reply.drops.items()]
        self._origin = origin
        self._tokens: Tokens = np.frombuffer(reply.tokens, np.int32)
        self._token_ends = np.frombuffer(reply.token_ends, np.uint32)
        self._kept = np.frombuffer(reply.kept, np.int32) if reply.kept else None
        self._columns = {
            name: (column.data, np.frombuffer(column.ends, np.uint32)) for name, column in reply.columns.items()
        }
        self.num_samples = len(self._token_ends)
        self.num_bytes = len(reply.tokens) + sum(len(column.data) for column in reply.columns.values())

    def row_of(self, sample: int) -> int:
        """The row, counted from the chunk's first, that became sample ``sample``."""
        return sample if self._kept is None else int(self._kept[sample])

    def samples_before(self, row: int) -> int:
        """How many samples come from rows before ``row``."""
        return min(row, self.num_samples) if self._kept is None else int(np.searchsorted(self._kept, row))

    def num_tokens(self, start: int, stop: int) -> int:
        """Tokens of the samples ``[start, stop)``."""
        if start == stop:
            return 0

        return int(self._token_ends[stop - 1]) - (int(self._token_ends[start - 1]) if start else 0)

    def tokens_of(self, sample: int) -> Tokens:
        """Read-only int32 view of shape (num_tokens,)."""
        ends = self._token_ends
        return self._tokens[(ends[sample - 1] if sample else 0) : ends[sample]]

    def value(self, column: str, sample: int) -> Any:
        """A column's JSON value, decoded afresh so that the caller may change it; None where there is none."""
        if column not in self._columns:
            return None

        data, ends = self._columns[column]
        raw = data[(int(ends[sample - 1]) if sample else 0) : int(ends[sample])]
        return _decode(raw) if raw else None

    def position(self, sample: int) -> Position:
        """The place in D of sample ``sample``."""
        return Position(self.first.epoch, self.first.window, self.first.row + self.row_of(sample))

    def location(self, sample: int) -> SourceLocation:
        """Where the row of sample ``sample`` lies."""
        return self._origin.location(self.row_of(sample))

    def row_location(self, row: int) -> SourceLocation:
        """Where row ``row``, counted from the chunk's first, lies."""
        return self._origin.location(row)

    def row_key(self, row: int) -> tuple[int, int]:
        """The number of row ``row``'s file, and its byte offset there."""
        return self._origin.key(row)


def _decode(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:  # NaN and lone surrogates, which the reader accepts as slime's does
        return json.loads(raw)
