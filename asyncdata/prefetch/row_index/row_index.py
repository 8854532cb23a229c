"""The location of every row, in nine bytes, and its number of tokens, in the order of the files.

The index grows from the first block to the last, and is then complete.

It is not thread-safe, except where a method says so: the service's thread builds it, other threads may wait for it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.errors import NoSamplesError, PrefetchTimeoutError, by_reason
from asyncdata.order.permutation import TorchGenerator

if TYPE_CHECKING:
    from asyncdata.core.errors import AsyncDataError
    from asyncdata.core.messages import Indexed
    from asyncdata.core.types import SourceLocation
    from asyncdata.order.shuffle import RowShuffle
    from asyncdata.sources.base import Blocks

__all__ = ("Places", "RowIndex")

_NO_OBJECT = 2
_GOOD = 0

Int64 = np.ndarray[Any, np.dtype[np.int64]]


class Places(NamedTuple):
    """The locations of some rows; each array has shape (num_rows,).

    :ivar file_ids: int64, the number of the row's file.
    :ivar offsets: int64, the byte offset in the file.
    :ivar lengths: int32, bytes.
    :ivar rows: int64, the row's number among all rows found.
    :ivar copies: if the rows were copied: the number of the file of each copy, and the byte offset there; int64.
    """

    file_ids: Int64
    offsets: Int64
    lengths: np.ndarray[Any, np.dtype[np.int32]]
    rows: Int64
    copies: tuple[Int64, Int64] | None = None

    def followed_by(self, more: Places) -> Places:
        """These rows, and then ``more``."""
        before, after = [*self[:4], *(self.copies or ())], [*more[:4], *(more.copies or ())]
        columns: list[Any] = [np.concatenate(pair) for pair in zip(before, after, strict=True)]
        file_ids, offsets, lengths, rows, *copies = columns
        return Places(file_ids, offsets, lengths, rows, (copies[0], copies[1]) if copies else None)


class RowIndex:
    """The rows of ``source``, and which of them ``shuffle`` numbers.

    :param spool: the folder that rows are copied to; an empty string if they are read from their files.
    :ivar num_found: rows found so far, numbered or not.
    :ivar excluded: rows found so far that have no number, by reason.
    :ivar is_complete: whether all rows are found.
    :ivar fault: the error because of which it will never be complete.
    :ivar num_mended: rows that were read from their file again, because their copy was damaged.
    """

    def __init__(self, source: Blocks, shuffle: RowShuffle, spool: str = "") -> None:
        blocks = source.blocks(range(source.num_blocks))
        self._block_files = np.array([block.file_id for block in blocks], np.int64)
        self._block_starts = np.array([block.start for block in blocks], np.int64)
        self._block_ends = np.zeros(len(blocks), np.int64)
        self._block_parts = np.zeros(len(blocks), np.int64)
        self._are_arrays = source.are_arrays
        self.spool = spool
        self._num_blocks = self._num_objects = 0
        self._shuffle = shuffle
        self._offsets, self._lengths = _Grown(np.int32), _Grown(np.int32)
        self._marks = _Grown(np.uint8)
        self._num_tokens = _Grown(np.int32)
        self._numbers: tuple[int, Any] = (0, np.empty(0, np.int64))
        self._grows = shuffle.grows and shuffle.looks_at != "none"
        self._grown_numbers = _Grown(np.int64)
        self._changed = threading.Condition()
        self.num_found = 0
        self.excluded: dict[str, int] = {}
        self.is_complete = False
        self.fault: AsyncDataError | None = None
        self.num_mended = 0

    @property
    def num_blocks(self) -> int:
        """Blocks whose rows are known."""
        return self._num_blocks

    def append(self, found: Indexed) -> None:
        """Add the rows of the next blocks."""
        counts = np.frombuffer(found.counts, np.int32)
        offsets = np.frombuffer(found.offsets, np.int32)
        ends = self.num_found + np.cumsum(counts, dtype=np.int64)
        added = slice(self._num_blocks, self._num_blocks + len(counts))
        self._block_ends[added], self._block_parts[added] = ends, self._num_blocks
        self._offsets.extend(offsets)
        self._lengths.extend(np.frombuffer(found.lengths, np.int32))
        marks = np.frombuffer(found.marks, np.uint8) if found.marks else np.zeros(len(offsets), np.uint8)
        self._marks.extend(marks)
        self._num_tokens.extend(np.frombuffer(found.num_tokens, np.int32))
        if self._grows:
            self._grown_numbers.extend(self.num_found + _looked_at(marks, self._shuffle, self._num_objects))
        self._num_objects += int(np.count_nonzero(marks != _NO_OBJECT))
        self.num_found += len(offsets)
        self._num_blocks += len(counts)
        for reason, number in found.drops.items():
            self._exclude(reason, number)
        for error in found.errors:
            self._exclude(f"bad row {error.code}", 1)

    @property
    def is_settled(self) -> bool:
        """Whether it is known that no further row will have a number."""
        first, stop = self._shuffle.first or 0, self._shuffle.stop
        if self._shuffle.part is not None:
            return False

        return stop is not None and min(first, stop) >= 0 and self._num_objects >= stop

    def _exclude(self, reason: str, number: int) -> None:
        self.excluded[reason] = self.excluded.get(reason, 0) + number

    def complete(self) -> None:
        """Mark the index as complete."""
        with self._changed:
            self.is_complete = True
            self._changed.notify_all()

    def fail(self, error: AsyncDataError) -> None:
        """Mark the index as failed."""
        with self._changed:
            self.fault = error
            self._changed.notify_all()

    @property
    def are_all_excluded(self) -> bool:
        """Whether rows were found, and each of them was excluded because of its content."""
        return 0 < self.num_found <= sum(self.excluded.values())

    def no_samples(self) -> NoSamplesError:
        """The error for an index that is complete, and in which no row has a number."""
        return NoSamplesError(f"AD401 {self.num_found} rows read, 0 kept: {by_reason(self.excluded)}")

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it is complete or has failed; return whether that came in time. From any thread."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_complete or self.fault is not None, timeout_s)

    def rows_when_complete(self, timeout_s: float | None) -> int:
        """Wait until it is complete; return :attr:`num_rows`. From any thread.

        :raises PrefetchTimeoutError: if it is not complete in time.
        :raises AsyncDataError: if it has failed.
        """
        if not self.wait(timeout_s):
            raise PrefetchTimeoutError(
                f"the row index is not complete after {timeout_s:g} s: {self.num_found} rows are found so far", {}
            )

        if self.fault is not None:
            raise self.fault

        return self.num_rows

    @property
    def num_rows(self) -> int:
        """Rows that have a number; final when it is complete."""
        return len(self._numbered())

    def _numbered(self) -> Any:
        """The rows that have a number, int64 in ascending order; a range if all have one."""
        shuffle = self._shuffle
        if shuffle.looks_at == "none" and shuffle.part is None:
            return range(self.num_found)

        if self._grows:  # asked for again and again while the index is made
            return self._grown_numbers.array

        if self._numbers[0] != self.num_found:
            is_each = shuffle.looks_at == "none"
            rows = np.arange(self.num_found) if is_each else _looked_at(self._marks.array, shuffle)
            self._numbers = self.num_found, rows if shuffle.part is None else _part_of(rows, shuffle)
        return self._numbers[1]

    @property
    def num_tokens(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Number of tokens of each numbered row, int32 of shape (num_rows,); empty if tokens were not counted."""
        counted: np.ndarray[Any, np.dtype[np.int32]] = self._num_tokens.array
        return counted[self._numbered()] if len(counted) else counted

    def num_tokens_of(self, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Number of tokens of the rows of these numbers, int32, of the same shape."""
        numbered = self._numbered()
        counted: np.ndarray[Any, np.dtype[np.int32]] = self._num_tokens.array
        found: np.ndarray[Any, np.dtype[np.int32]] = counted[
            numbers if isinstance(numbered, range) else numbered[numbers]
        ]
        return found

    @property
    def rows_of_files(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """How many numbered rows each file has, int64 of shape (num_files,)."""
        files = self._block_files[: self._num_blocks]
        ends = np.concatenate(([0], self._block_ends[: self._num_blocks]))
        last = ends[np.searchsorted(files, np.arange(self._block_files.max() + 1), side="right")]
        numbered = self._numbered()
        below = last if isinstance(numbered, range) else np.searchsorted(numbered, last)
        return np.diff(below, prepend=0).astype(np.int64, copy=False)

    def places(self, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> Places:
        """The locations of the rows of these numbers."""
        numbered = self._numbered()
        rows = numbers if isinstance(numbered, range) else numbered[numbers]
        lengths, copies = self._lengths.array[rows], None
        if self.spool:
            copies = self._block_parts[self._blocks_of(rows)], self._offsets.array[rows].astype(np.int64)
        return Places(*self.origins(rows), lengths, rows, copies)

    def _blocks_of(self, rows: Any) -> Any:
        return np.searchsorted(self._block_ends[: self._num_blocks], rows, side="right")

    def origins(self, rows: Int64) -> tuple[Any, Any]:
        """The number of each row's original file, and its offset there; int64, of shape (num_rows,)."""
        blocks = self._blocks_of(rows)
        if self.spool:  # copied rows are located by their number in the file
            offsets = rows - np.where(blocks > 0, self._block_ends[blocks - 1], 0)
        else:
            offsets = self._offsets.array[rows]
        return self._block_files[blocks], self._block_starts[blocks] + offsets

    def numbered(self, place: SourceLocation, file_id: int, row: int) -> SourceLocation:
        """``place``, the location of a known row, with the row's number if its file is a JSON array."""
        if not (self._are_arrays and self._are_arrays[file_id]):
            return place

        block = int(np.searchsorted(self._block_files, file_id))
        first = int(self._block_ends[block - 1]) if block else 0
        return msgspec.structs.replace(place, row_number=row - first)


def _looked_at(marks: Any, shuffle: RowShuffle, num_before: int = 0) -> Any:
    """The rows that get a number, by the marks that the workers set when they checked the rows.

    :param num_before: JSON objects before these rows; 0 unless the order grows.
    """
    bounds: list[int | None] = [shuffle.first, shuffle.stop]
    if num_before:
        bounds = [bound and max(0, bound - num_before) for bound in bounds]
    rows = np.flatnonzero(marks != _NO_OBJECT)[slice(*bounds)]
    return rows[marks[rows] == _GOOD] if shuffle.only_kept else rows


def _part_of(rows: Any, shuffle: RowShuffle) -> Any:
    """The rows of one part of the split, in ascending order."""
    chosen = TorchGenerator(shuffle.split_seed).randperm(len(rows))
    num_train = int(len(rows) * shuffle.train_ratio)
    return rows[np.sort(chosen[:num_train] if shuffle.part == "train" else chosen[num_train:])]


class _Grown:
    """An array that is appended to."""

    def __init__(self, dtype: Any) -> None:
        self._data = np.empty(1024, dtype)
        self._size = 0

    def extend(self, values: Any) -> None:
        size = self._size + len(values)
        if size > len(self._data):
            data = np.empty(max(size, len(self._data) * 3 // 2), self._data.dtype)
            data[: self._size] = self.array
            self._data = data
        self._data[self._size : size] = values
        self._size = size

    @property
    def array(self) -> Any:
        """The values appended so far."""
        return self._data[: self._size]
