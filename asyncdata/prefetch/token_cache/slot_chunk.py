"""A chunk whose samples are in a slot, where a worker put them, and are read there without a copy.

Slots are reused. Before a slot is reused, and before a fork, a chunk that still exists copies its data out. Only chunks
hold views of a slot: what they return are copies. Reads are optimistic: re-check ``_placed`` after reading; if the
chunk was copied out meanwhile, the bytes may be another window's, so read again.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncdata.core.messages import Tokenized
from asyncdata.delivery.chunk import Chunk
from asyncdata.prefetch.token_cache.segment.gather import cached_rows, gather, packed

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.types import Position, Tokens
    from asyncdata.delivery.chunk import Origin
    from asyncdata.prefetch.token_cache.segment.gather import Indices, Piece

__all__ = ("PlacedChunk", "PlacedRows")

_TOKENS = ""
_INT32 = np.dtype(np.int32)
_moving = threading.RLock()
"""Held while a chunk copies. Without it, the second of two calls could copy after the slot has been reused."""


class _Values(NamedTuple):
    """A column in a slot: the offset of each sample's value, int64, and its bytes, int64.

    Both are also there as memoryviews, from which reading a single number is faster.
    """

    starts: Indices
    sizes: Indices
    starts_view: memoryview
    sizes_view: memoryview

    @classmethod
    def of(cls, starts: Indices, sizes: Indices) -> _Values:
        """The column with these offsets and sizes."""
        return cls(starts, sizes, starts.data, sizes.data)

    def ends(self) -> Any:
        """End offset of each value if all are laid end to end: uint32."""
        return np.cumsum(self.sizes).astype(np.uint32)


class PlacedRows(NamedTuple):
    """Cached rows in a slot.

    :ivar reply: what a worker would have answered, without tokens and columns.
    :ivar columns: the samples' columns, by name; the name of the tokens' column is empty.
    :ivar lend: called with each chunk that reads from the slot.
    """

    memory: memoryview
    reply: Tokenized
    columns: dict[str, _Values]
    lend: Callable[[PlacedChunk], object]

    @classmethod
    def of(cls, memory: memoryview, records: Indices, lend: Callable[[PlacedChunk], object]) -> PlacedRows:
        """The rows whose records are at these offsets of the slot."""
        found = cached_rows(memory, np.arange(len(records)), records)
        rows, columns = _together([piece for piece in found.pieces if len(piece.rows)])
        reply = Tokenized(
            tokens=b"",
            token_ends=(columns[_TOKENS].ends() >> 2).tobytes(),
            kept=b"" if len(rows) == len(records) else rows.astype(np.int32).tobytes(),
            columns={},
            drops=packed(found.drops),
            errors=[],
            busy_s=0.0,
            notes=packed(found.notes),
        )
        return cls(memory, reply, columns, lend)

    def chunk(self, first: Position, num_rows: int, origin: Origin, *, ends_epoch: bool) -> PlacedChunk:
        """The chunk of these rows."""
        chunk = PlacedChunk(self, first, num_rows, origin, ends_epoch=ends_epoch)
        self.lend(chunk)
        return chunk

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return sum(int(values.sizes.sum()) for values in self.columns.values())

    def value(self, column: str, sample: int) -> bytes:
        """A copy of a sample's value; empty if there is no such column."""
        values = self.columns.get(column)
        if values is None:
            return b""

        start = values.starts_view[sample]
        return self.memory[start : start + values.sizes_view[sample]].tobytes()

    def copy(self, column: str) -> bytes:
        """All values of a column, end to end."""
        values = self.columns[column]
        return gather(self.memory, values.starts, values.sizes)


def _together(pieces: list[Piece]) -> tuple[Indices, dict[str, _Values]]:
    """The rows that are samples, in ascending order, and their columns. Blocks may differ in their columns."""
    if len(pieces) == 1:
        (piece,) = pieces
        return piece.rows, {name: _Values.of(piece.starts[name], sizes) for name, sizes in piece.sizes.items()}

    rows = np.concatenate([np.empty(0, np.int64), *(piece.rows for piece in pieces)])
    columns = {name: (np.zeros_like(rows), np.zeros_like(rows)) for name in _names(pieces)}
    first = 0
    for piece in pieces:
        places = slice(first, first + len(piece.rows))
        for name, sizes in piece.sizes.items():
            columns[name][0][places], columns[name][1][places] = piece.starts[name], sizes
        first += len(piece.rows)
    order = np.argsort(rows)
    return rows[order], {name: _Values.of(starts[order], sizes[order]) for name, (starts, sizes) in columns.items()}


def _names(pieces: list[Piece]) -> set[str]:
    return {_TOKENS}.union(*(piece.sizes for piece in pieces))


class PlacedChunk(Chunk):
    """A chunk whose samples are in a slot, until :meth:`own` copies them out."""

    __slots__ = ("__weakref__", "_last", "_placed")

    def __init__(self, placed: PlacedRows, first: Position, num_rows: int, origin: Origin, *, ends_epoch: bool) -> None:
        super().__init__(placed.reply, first, num_rows, origin, ends_epoch=ends_epoch)
        self.num_bytes = placed.num_bytes
        self._placed: PlacedRows | None = placed
        self._last: tuple[int, Tokens | None] = (-1, None)

    def tokens_of(self, sample: int) -> Tokens:
        """Read-only int32 array of shape (num_tokens,). While the tokens are in a slot, it is a copy per group."""
        last, tokens = self._last
        if last == sample and tokens is not None:
            return tokens

        placed = self._placed
        if placed is not None:
            tokens = np.frombuffer(placed.value(_TOKENS, sample), _INT32)
            if self._placed is placed:
                self._last = sample, tokens
                return tokens

        return super().tokens_of(sample)

    def _raw(self, column: str, sample: int) -> memoryview | None:
        placed = self._placed
        if placed is not None:
            raw = memoryview(placed.value(column, sample))
            if self._placed is placed:
                return raw

        return super()._raw(column, sample)

    def own(self) -> None:
        """Copy the samples out of the slot, and release the view of it."""
        with _moving:
            placed = self._placed
            if placed is None:
                return

            self._tokens = np.frombuffer(placed.copy(_TOKENS), np.int32)
            self._columns = {
                name: (memoryview(placed.copy(name)), memoryview(values.ends()))
                for name, values in placed.columns.items()
                if name != _TOKENS
            }
            self._placed = None  # last: until then, samples are read from the slot
