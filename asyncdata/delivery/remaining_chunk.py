"""A chunk of a mixture's part without the samples of rows that the part's epoch excludes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from asyncdata.core.types import SourceLocation, Tokens
    from asyncdata.delivery.chunk import Chunk
    from asyncdata.delivery.outcomes.policy import Ids

__all__ = ("AnyChunk", "RemainingChunk", "without")


class RemainingChunk:
    """The samples of ``chunk`` that are not excluded, numbered from 0; see :class:`~asyncdata.delivery.chunk.Chunk`."""

    __slots__ = ("_chunk", "_samples", "drops", "ends_epoch", "errors", "first", "notes", "num_bytes", "num_rows")

    def __init__(self, chunk: Chunk, excluded: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self._chunk = chunk
        self._samples = np.delete(np.arange(chunk.num_samples), excluded)
        self.first, self.num_rows, self.num_bytes = chunk.first, chunk.num_rows, chunk.num_bytes
        self.ends_epoch = chunk.ends_epoch
        self.drops, self.notes, self.errors = chunk.drops, chunk.notes, chunk.errors

    @property
    def num_samples(self) -> int:
        """Samples that are left."""
        return len(self._samples)

    def rows_of(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """The rows of the samples ``[start, stop)``, counted from the chunk's first row."""
        rows: np.ndarray[Any, Any] = self._chunk.rows_of(0, self._chunk.num_samples)[self._samples[start:stop]]
        return rows

    def lengths_of(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Number of tokens of each of the samples ``[start, stop)``: int64."""
        lengths: np.ndarray[Any, Any] = self._chunk.lengths_of(0, self._chunk.num_samples)[self._samples[start:stop]]
        return lengths

    def row_of(self, sample: int) -> int:
        """The row of sample ``sample``, counted from the chunk's first row."""
        return self._chunk.row_of(int(self._samples[sample]))

    def tokens_of(self, sample: int) -> Tokens:
        """The sample's tokens: a read-only int32 view of shape (num_tokens,)."""
        return self._chunk.tokens_of(int(self._samples[sample]))

    def value(self, column: str, sample: int) -> Any:
        """A column's JSON value, decoded at each call; None if there is none."""
        return self._chunk.value(column, int(self._samples[sample]))

    def location(self, sample: int) -> SourceLocation:
        """The location of the row of sample ``sample``."""
        return self._chunk.location(int(self._samples[sample]))

    def row_location(self, row: int) -> SourceLocation:
        """The location of row ``row``, counted from the chunk's first row."""
        return self._chunk.row_location(row)

    def row_key(self, row: int) -> tuple[int, int]:
        """The number of row ``row``'s file, and its offset there."""
        return self._chunk.row_key(row)


if TYPE_CHECKING:
    AnyChunk = Chunk | RemainingChunk


def without(chunk: Chunk, ids: Ids) -> AnyChunk:
    """The chunk without the samples of these rows (ascending), which count as dropped."""
    chunk.exclude(ids)
    excluded = chunk.excluded
    return chunk if excluded is None or not len(excluded) else RemainingChunk(chunk, excluded)
