"""The location of every row and its number of tokens, in twelve bytes, in the order of the files.

The index grows from the first block to the last, and is then complete. Its rows are in memory until the index file has
them, which is mapped: the processes of a node then have them once.

It is not thread-safe, except where a method says so: the service's thread builds it, other threads may wait for it.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.errors import AsyncDataError, NoSamplesError, PrefetchTimeoutError, by_reason
from asyncdata.order.order import TorchGenerator
from asyncdata.read_ahead.index_file import rows_of

if TYPE_CHECKING:
    from asyncdata.core.messages import Indexed
    from asyncdata.core.types import SourceLocation
    from asyncdata.order.shuffle import RowShuffle
    from asyncdata.sources.base import Blocks


_NO_OBJECT = 2
_CHUNK = 1 << 16

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
        num_blocks = source.num_blocks
        portions = (range(first, min(first + _CHUNK, num_blocks)) for first in range(0, num_blocks, _CHUNK))
        blocks = ((block.file_id, block.start) for some in portions for block in source.blocks(some))
        self._block_files, self._block_starts = np.fromiter(blocks, np.dtype((np.int64, 2)), num_blocks).T.copy()
        self._block_ends = np.zeros(num_blocks, np.int64)
        self._block_parts = np.zeros(num_blocks, np.int64)
        self._are_arrays = source.are_arrays
        self.spool = spool
        self._num_blocks = 0
        self._shuffle = shuffle
        # The first rows are mapped, the others are in memory. Other threads read both.
        self._rows: tuple[Any, _Grown] = np.empty((0, 3), np.int32), _Grown((3,), np.int32)
        self._no_objects, self._left_out = _LeftOut(), _LeftOut()
        self._part: tuple[int, Any] = (-1, None)
        self._costs: list[tuple[int, Any]] = []  # of the rows from this one on
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
        ends = self.num_found + np.cumsum(counts, dtype=np.int64)
        added = slice(self._num_blocks, self._num_blocks + len(counts))
        self._block_ends[added], self._block_parts[added] = ends, self._num_blocks
        rows = rows_of(found)
        self._rows[1].extend(rows)
        if self._shuffle.looks_at != "none":
            are_none = rows[:, 2] == -_NO_OBJECT
            self._no_objects.extend(self.num_found + np.flatnonzero(are_none))
            are_out = rows[:, 2] < 0 if self._shuffle.only_kept else are_none
            self._left_out.extend(self.num_found + np.flatnonzero(are_out))
        if found.costs:
            self._costs.append((self.num_found, np.frombuffer(found.costs, np.float64)))
        self.num_found += len(rows)
        self._num_blocks += len(counts)
        for reason, number in found.drops.items():
            self._exclude(reason, number)
        for error in found.errors:
            self._exclude(f"bad row {error.code}", 1)

    def adopt(self, rows: np.ndarray[Any, np.dtype[np.int32]]) -> bool:
        """Keep no copy of the first rows, which ``rows`` are if they are equal; return whether none is left in memory.

        :param rows: as by :func:`~asyncdata.read_ahead.index_file.rows_of`, mapped; more than before.
        """
        (kept, in_memory), stop = self._rows, min(len(rows), self.num_found)
        num_more = stop - len(kept)
        if num_more > 0 and np.array_equal(rows[len(kept) : stop], in_memory.array[:num_more]):
            left = _Grown((3,), np.int32)
            left.extend(in_memory.array[num_more:])
            self._rows = rows[:stop], left
        return not len(self._rows[1].array)

    def _found(self, rows: Any) -> Any:
        """What is known of these rows, int32 of shape (num_rows, 3)."""
        kept, in_memory = self._rows
        if not len(in_memory.array):
            return kept[rows]

        is_kept = rows < len(kept)
        found = np.empty((len(rows), 3), np.int32)
        found[is_kept], found[~is_kept] = kept[rows[is_kept]], in_memory.array[rows[~is_kept] - len(kept)]
        return found

    @property
    def _num_objects(self) -> int:
        return self._no_objects.num_before(self.num_found)

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
        first, stop = self._span()
        return stop - first if self._shuffle.part is None else len(self._part_of(stop - first))

    def _span(self) -> tuple[int, int]:
        """The first and the last row with a number, and one more, counted among those that are not left out."""
        first, stop, _ = slice(self._shuffle.first, self._shuffle.stop).indices(self._num_objects)
        first, stop = map(self._left_out.num_before, self._no_objects.row(np.array([first, stop])).tolist())
        return first, max(first, stop)

    def _part_of(self, num_rows: int) -> Any:
        """Which of so many rows are in the part of the split, in ascending order."""
        shuffle = self._shuffle
        if self._part[0] != num_rows:
            chosen = TorchGenerator(shuffle.split_seed).randperm(num_rows)
            num_train = int(num_rows * shuffle.train_ratio)
            rows = np.sort(chosen[:num_train] if shuffle.part == "train" else chosen[num_train:])
            self._part = num_rows, rows.astype(np.min_scalar_type(num_rows))
        return self._part[1]

    def _numbered(self, numbers: Int64) -> Any:
        """The rows of these numbers, int64."""
        first, stop = self._span()
        if self._shuffle.part is not None:
            numbers = self._part_of(stop - first)[numbers].astype(np.int64)
        return self._left_out.row(first + numbers)

    @property
    def num_tokens(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Number of tokens of each numbered row, int32 of shape (num_rows,)."""
        counted = np.empty(self.num_rows, np.int32)
        for first in range(0, len(counted), _CHUNK):
            stop = min(first + _CHUNK, len(counted))
            counted[first:stop] = self.num_tokens_of(np.arange(first, stop))
        return counted

    def num_tokens_of(self, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Number of tokens of the rows of these numbers, int32, of the same shape."""
        found: np.ndarray[Any, np.dtype[np.int32]] = np.maximum(self._found(self._numbered(numbers))[:, 2], 0)
        return found

    @property
    def costs(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """What each numbered row costs, float64 of shape (num_rows,), NaN where the function does not say; empty if it
        says nothing of any.
        """
        if not self._costs:
            return np.empty(0)

        found = np.full(self.num_found, np.nan)
        for first, some in self._costs:
            found[first : first + len(some)] = some
        costs: np.ndarray[Any, np.dtype[np.float64]] = found[self._numbered(np.arange(self.num_rows))]
        return costs

    @property
    def rows_of_files(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """How many numbered rows each file has, int64 of shape (num_files,)."""
        files = self._block_files[: self._num_blocks]
        ends = np.concatenate(([0], self._block_ends[: self._num_blocks]))
        last = ends[np.searchsorted(files, np.arange(self._block_files.max() + 1), side="right")]
        first, stop = self._span()
        below = np.clip([self._left_out.num_before(row) for row in last.tolist()], first, stop) - first
        if self._shuffle.part is not None:
            below = np.searchsorted(self._part_of(stop - first), below)
        return np.diff(below, prepend=0).astype(np.int64, copy=False)

    def places(self, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> Places:
        """The locations of the rows of these numbers."""
        rows = self._numbered(numbers)
        offsets, lengths, _ = self._found(rows).T
        blocks = self._blocks_of(rows)
        copies = (self._block_parts[blocks], offsets.astype(np.int64)) if self.spool else None
        return Places(*self._origins(rows, blocks, offsets), lengths, rows, copies)

    def _blocks_of(self, rows: Any) -> Any:
        return np.searchsorted(self._block_ends[: self._num_blocks], rows, side="right")

    def origins(self, rows: Int64) -> tuple[Any, Any]:
        """The number of each row's original file, and its offset there; int64, of shape (num_rows,)."""
        return self._origins(rows, self._blocks_of(rows), None if self.spool else self._found(rows)[:, 0])

    def _origins(self, rows: Int64, blocks: Any, offsets: Any) -> tuple[Any, Any]:
        if self.spool:  # copied rows are located by their number in the file
            offsets = rows - np.where(blocks > 0, self._block_ends[blocks - 1], 0)
        return self._block_files[blocks], self._block_starts[blocks] + offsets

    def numbered(self, place: SourceLocation, file_id: int, row: int) -> SourceLocation:
        """``place``, the location of a known row, with the row's number if its file is a JSON array."""
        if not (self._are_arrays and self._are_arrays[file_id]):
            return place

        block = int(np.searchsorted(self._block_files, file_id))
        first = int(self._block_ends[block - 1]) if block else 0
        return msgspec.structs.replace(place, row_number=row - first)


class _LeftOut:
    """Rows that are left out, in ascending order, eight bytes each: for each, how many before it are not."""

    def __init__(self) -> None:
        self._before = _Grown((), np.int64)

    def extend(self, rows: Int64) -> None:
        first = len(self._before.array)
        self._before.extend(rows - np.arange(first, first + len(rows)))

    def row(self, numbers: Int64) -> Int64:
        """The rows that have these numbers among those that are not left out."""
        return numbers + np.searchsorted(self._before.array, numbers, side="right")

    def num_before(self, row: int) -> int:
        """How many rows before this one are not left out."""
        before = self._before.array
        return row - bisect_left(range(len(before)), row, key=lambda number: int(before[number]) + number)


class _Grown:
    """An array of items of a shape, which is appended to."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self._data = np.empty((0, *shape), dtype)
        self._size = 0

    def extend(self, values: Any) -> None:
        size = self._size + len(values)
        if size > len(self._data):
            data = np.empty((max(size, len(self._data) * 3 // 2), *self._data.shape[1:]), self._data.dtype)
            data[: self._size] = self.array
            self._data = data
        self._data[self._size : size] = values
        self._size = size

    @property
    def array(self) -> Any:
        """The values appended so far."""
        return self._data[: self._size]
