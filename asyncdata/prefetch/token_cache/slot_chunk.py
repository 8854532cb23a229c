"""A chunk whose samples are in a slot, where a worker put them, and are read there without a copy.

Slots are reused. Before a slot is reused, and before a fork, a chunk that still exists copies its data out. Only chunks
hold views of a slot: what they return are copies. Reads are optimistic: re-check ``_placed`` after reading; if the
chunk was copied out meanwhile, the bytes may be another window's, so read again.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncdata.core.messages import Data, Tokenized
from asyncdata.core.row_codes import NO_SAMPLE, noted_tokens
from asyncdata.delivery.chunk import Chunk
from asyncdata.prefetch.merged_samples import gather, packed
from asyncdata.prefetch.token_cache.segment.gather import cached_rows, names_at
from asyncdata.prefetch.token_cache.segment.layout import RECORD_WORDS, WORDS_PER_COLUMN

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.types import Position, Tokens
    from asyncdata.delivery.chunk import Origin
    from asyncdata.prefetch.merged_samples import Indices
    from asyncdata.prefetch.token_cache.segment.gather import Int32

__all__ = ("CachedRows", "PlacedChunk", "PlacedRows")

_TOKENS = ""
_INT32 = np.dtype(np.int32)
_moving = threading.RLock()
"""Held while a chunk copies. Without it, the second of two calls could copy after the slot has been reused."""


class CachedRows(NamedTuple):
    """Rows of a chunk, all of them cached; arrays of shape (num_rows,).

    :ivar records: offset of each row's record in the slot.
    :ivar num_tokens: a code of ``row_codes``.
    :ivar num_bytes: of all values of the row.
    """

    records: Indices
    num_tokens: Int32
    num_bytes: Int32


class PlacedRows(NamedTuple):
    """Cached rows in a slot. A value is found by its record when it is read: few columns of few rows are.

    :ivar reply: what a worker would have answered, without tokens and columns.
    :ivar places: place of each sample's record in ``words``, int64.
    :ivar num_bytes: bytes of all values.
    :ivar lend: called with each chunk that reads from the slot.
    """

    memory: memoryview
    words: memoryview
    reply: Tokenized
    places: memoryview
    num_bytes: int
    lend: Callable[[PlacedChunk], object]

    @classmethod
    def of(cls, memory: memoryview, rows: CachedRows, lend: Callable[[PlacedChunk], object]) -> PlacedRows:
        """The rows ``rows`` of the slot ``memory``."""
        records, num_tokens, num_bytes = rows
        kept, drops, notes = b"", dict[str, Data](), dict[str, Data]()
        special = np.flatnonzero(num_tokens < 0)
        if len(special):
            found = cached_rows(memory, special, records[special])
            drops, notes = packed(found.drops), packed(found.notes)
            is_kept = num_tokens != NO_SAMPLE
            num_tokens = np.where(num_tokens < NO_SAMPLE, noted_tokens(num_tokens), num_tokens)
            if drops:
                kept = np.flatnonzero(is_kept).astype(np.int32).tobytes()
                records, num_tokens, num_bytes = records[is_kept], num_tokens[is_kept], num_bytes[is_kept]
        reply = Tokenized(
            tokens=b"",
            token_ends=np.cumsum(num_tokens, dtype=np.uint32).tobytes(),
            kept=kept,
            columns={},
            drops=drops,
            errors=[],
            busy_s=0.0,
            notes=notes,
        )
        words = memory[: len(memory) // 4 * 4].cast("i")
        return cls(memory, words, reply, (records >> 2).data, int(num_bytes.sum()), lend)

    def chunk(self, first: Position, num_rows: int, origin: Origin, *, ends_epoch: bool) -> PlacedChunk:
        """The chunk of these rows."""
        chunk = PlacedChunk(self, first, num_rows, origin, ends_epoch=ends_epoch)
        self.lend(chunk)
        return chunk

    def value(self, column: str, sample: int) -> bytes:
        """A copy of a sample's value; empty if there is no such column. The name of the tokens' column is empty."""
        place, words = self.places[sample], self.words
        at = place + RECORD_WORDS
        if column:
            columns = names_at(self.memory, words, place - (words[place] >> 2)).columns
            if column not in columns:
                return b""

            at += WORDS_PER_COLUMN * (1 + columns.index(column))
        start = (place << 2) + words[at]
        return self.memory[start : start + words[at + 1]].tobytes()

    def columns(self) -> dict[str, tuple[bytes, memoryview]]:
        """All values, copied: for the tokens and each column the values end to end, and where each stops (uint32)."""
        records = np.array(self.places, np.int64) << 2
        pieces = cached_rows(self.memory, np.arange(len(records)), records).pieces
        columns = {}
        for name in {_TOKENS}.union(*(piece.sizes for piece in pieces)):
            starts, sizes = np.zeros_like(records), np.zeros_like(records)
            for piece in pieces:
                if name in piece.sizes:  # blocks may differ in their columns
                    starts[piece.rows], sizes[piece.rows] = piece.starts[name], piece.sizes[name]
            ends = np.cumsum(sizes).astype(np.uint32).data
            columns[name] = gather(self.memory, starts, sizes), ends
        return columns


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

        raw = self._placed_value(_TOKENS, sample)
        if raw is None:
            return super().tokens_of(sample)

        tokens = np.frombuffer(raw, _INT32)
        self._last = sample, tokens
        return tokens

    def _raw(self, column: str, sample: int) -> memoryview | None:
        raw = self._placed_value(column, sample)
        return super()._raw(column, sample) if raw is None else memoryview(raw)

    def _placed_value(self, column: str, sample: int) -> bytes | None:
        """A copy of the value in the slot; None if the chunk has been copied out, maybe meanwhile."""
        placed = self._placed
        if placed is None:
            return None

        try:
            raw = placed.value(column, sample)
        except Exception:
            if self._placed is placed:
                raise
            return None  # what was read in the slot was another window's

        return raw if self._placed is placed else None

    def own(self) -> None:
        """Copy the samples out of the slot, and release the view of it."""
        with _moving:
            placed = self._placed
            if placed is None:
                return

            columns = placed.columns()
            self._tokens = np.frombuffer(columns.pop(_TOKENS)[0], np.int32)
            self._columns = {name: (memoryview(data), ends) for name, (data, ends) in columns.items()}
            self._placed = None  # last: until then, samples are read from the slot
