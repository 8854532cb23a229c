"""A chunk of a mixture: samples of several parts, in the order of the schedule. It refers to the parts' own chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import numpy as np

from asyncdata.core.types import Position
from asyncdata.delivery.stream_digest import sums_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from asyncdata.core.messages import RowError
    from asyncdata.core.types import SourceLocation, Tokens
    from asyncdata.delivery.bad_row_policy import BadRowPolicy
    from asyncdata.delivery.chunk import Drop, Note
    from asyncdata.delivery.mixture import MergeRecord
    from asyncdata.delivery.remaining_chunk import AnyChunk

__all__ = ("MergedChunk", "MergedRows", "journal_of")

_FILE_BITS = 24
_BYTES_PER_SAMPLE = 64

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class MergedRows(NamedTuple):
    """What a merged chunk consists of.

    :ivar chunks: chunks of the parts.
    :ivar names: the name of the part of each of ``chunks``.
    :ivar chunk_of: for each sample, the number of its chunk: int64 of shape (num_samples,).
    :ivar sample_of: its number in that chunk.
    :ivar rows: its row in the merged chunk.
    :ivar num_tokens: its tokens.
    :ivar errors: bad rows, numbered as rows of the merged chunk, with their chunks and their rows there.
    """

    chunks: Sequence[AnyChunk]
    names: Sequence[str]
    chunk_of: Numbers
    sample_of: Numbers
    rows: Numbers
    num_tokens: Numbers
    num_rows: int
    drops: list[Drop]
    notes: list[Note]
    errors: list[tuple[RowError, int, int]]


class MergedChunk:
    """Rows of a mixture; to deliveries and samples, it is what a :class:`~asyncdata.delivery.chunk.Chunk` is.

    A row is a row of one part. The rows without a sample come directly before the part's next sample.

    :ivar record: from which parts the rows come.
    :ivar policies: what is done with a bad row, by its number.
    :ivar token_ends: for each sample, the tokens of the chunk up to its end: int64.
    """

    __slots__ = (
        "_chunk_of",
        "_chunks",
        "_errors",
        "_names",
        "_rows",
        "_sample_of",
        "drops",
        "ends_epoch",
        "errors",
        "first",
        "notes",
        "num_bytes",
        "num_rows",
        "num_samples",
        "policies",
        "record",
        "sums",
        "token_ends",
    )

    def __init__(
        self,
        merged: MergedRows,
        first: Position,
        record: MergeRecord,
        policies: Mapping[int, BadRowPolicy],
        *,
        ends_epoch: bool,
        with_token_sums: bool = False,
    ) -> None:
        self.first = first
        self.num_rows = merged.num_rows
        self.num_samples = len(merged.rows)
        self.ends_epoch = ends_epoch
        self.drops, self.notes = merged.drops, merged.notes
        self.errors = [error for error, _, _ in merged.errors]
        self.record, self.policies = record, policies
        self.num_bytes = 4 * int(merged.num_tokens.sum()) + _BYTES_PER_SAMPLE * self.num_samples
        self._errors = {error.row: (chunk, row) for error, chunk, row in merged.errors}
        self._chunks, self._names = merged.chunks, merged.names
        self._chunk_of: list[int] = merged.chunk_of.tolist()
        self._sample_of: list[int] = merged.sample_of.tolist()
        self._rows = merged.rows
        self.token_ends = np.cumsum(merged.num_tokens)
        sums = np.array([self._token_sum(n) for n in range(self.num_samples)], np.uint32) if with_token_sums else None
        place = (first.epoch, first.window, first.row)
        self.sums = sums_of(place, self.token_ends.astype(np.uint64), merged.rows.astype(np.int32), sums)

    def _token_sum(self, sample: int) -> int:
        return crc32(self.tokens_of(sample).tobytes())

    def row_of(self, sample: int) -> int:
        """The row of sample ``sample``, counted from the chunk's first row."""
        return int(self._rows[sample])

    def rows_of(self, start: int, stop: int) -> Numbers:
        """The rows of the samples ``[start, stop)``, counted from the chunk's first row."""
        return self._rows[start:stop]

    def samples_by_source(self) -> dict[str, Numbers]:
        """The samples of each part."""
        numbers: dict[str, list[int]] = {}
        for sample, chunk in enumerate(self._chunk_of):
            numbers.setdefault(self._names[chunk], []).append(sample)
        return {name: np.array(samples, np.int64) for name, samples in numbers.items()}

    def samples_before(self, row: int) -> int:
        """How many samples come from rows before ``row``."""
        return int(np.searchsorted(self._rows, row))

    def num_tokens(self, start: int, stop: int) -> int:
        """Number of tokens of the samples ``[start, stop)``."""
        if start == stop:
            return 0

        return int(self.token_ends[stop - 1]) - (int(self.token_ends[start - 1]) if start else 0)

    def tokens_of(self, sample: int) -> Tokens:
        """The sample's tokens: a read-only int32 view of shape (num_tokens,)."""
        return self._chunks[self._chunk_of[sample]].tokens_of(self._sample_of[sample])

    def value(self, column: str, sample: int) -> Any:
        """A column's JSON value, decoded at each call; None if there is none."""
        return self._chunks[self._chunk_of[sample]].value(column, self._sample_of[sample])

    def source_name(self, sample: int) -> str:
        """The name of the part of sample ``sample``."""
        return self._names[self._chunk_of[sample]]

    def source_epoch(self, sample: int) -> int:
        """That part's own epoch."""
        return self._chunks[self._chunk_of[sample]].first.epoch

    def position(self, sample: int) -> Position:
        """The place in D of sample ``sample``."""
        return Position(self.first.epoch, self.first.window, self.first.row + int(self._rows[sample]))

    def location(self, sample: int) -> SourceLocation:
        """The location of the row of sample ``sample``."""
        return self._chunks[self._chunk_of[sample]].location(self._sample_of[sample])

    def row_location(self, row: int) -> SourceLocation:
        """The location of row ``row``, counted from the chunk's first row: a bad row, or a sample's."""
        if row in self._errors:
            chunk, its_row = self._errors[row]
            return self._chunks[chunk].row_location(its_row)

        return self.location(self.samples_before(row))

    def row_source(self, row: int) -> str:
        """The part of a bad row."""
        return self._names[self._errors[row][0]]

    def dropped_row(self, drop: Drop, at: int) -> tuple[str, SourceLocation]:
        """The part of row number ``at`` of a drop, and the row's location."""
        assert drop.own_rows is not None
        return self._names[drop.chunk], self._chunks[drop.chunk].row_location(int(drop.own_rows[at]))

    def row_key(self, row: int) -> tuple[int, int]:
        """The number of a bad row's file, and its byte offset there. The number names the part, too."""
        chunk, its_row = self._errors[row]
        file_id, offset = self._chunks[chunk].row_key(its_row)
        return _tag(self._names[chunk]) << _FILE_BITS | file_id, offset


def _tag(name: str) -> int:
    return crc32(name.encode())


def journal_of(name: str, journal: Iterable[tuple[int, int]]) -> frozenset[tuple[int, int]]:
    """The rows of one part in the journal of a mixture, as the part itself names them."""
    tag, files = _tag(name), (1 << _FILE_BITS) - 1
    return frozenset((key & files, offset) for key, offset in journal if key >> _FILE_BITS == tag)
