"""One pass over a stream, cut into windows. Used in the reading thread; independent of the event loop and workers."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from asyncdata.checkpoint.snapshot import StreamState
from asyncdata.core.errors import SourceChangedError, SourceError
from asyncdata.sources.stream import MAX_WINDOW_ROWS, Int32, Int64, Rows, RowStream, StreamOrder


class WindowRows(NamedTuple):
    """The rows of a window as they were read. All arrays have the shape (num_rows,).

    :ivar file_ids: int32, the number of each row's file.
    :ivar numbers: int64, the number of each row in its file.
    :ivar starts: int32, the offset of each row in the slot.
    :ivar lengths: int32, the bytes of each row; -1 for a row that is too long.
    :ivar offsets: int64, the offset of each row in the text of its file; -1 if it has none.
    :ivar is_last: whether this is the epoch's last window.
    :ivar next_state: the state from which the next window can be read without this one; None if it is not known.
    """

    file_ids: Int32
    numbers: Int64
    starts: Int32
    lengths: Int32
    offsets: Int64
    num_blank: int
    is_last: bool
    next_state: StreamState | None


class StreamPass:
    """Reads one epoch from its start, or from a window's state on.

    If the stream gives no states, the state of a window is the number of rows before it.

    :param check: called often; it raises to cancel the pass.
    :ivar number: number of the next window.
    :ivar is_at_end: whether there are no more rows.
    :ivar num_replayed: rows that were read again from the epoch's start, only to skip them.
    """

    def __init__(
        self,
        stream: RowStream,
        order: StreamOrder,
        epoch: int,
        state: StreamState | None,
        check: Callable[[], object],
    ) -> None:
        self.epoch = epoch
        self.number = 0
        self.num_replayed = 0
        self._limit = order.window_bytes
        self._is_shuffled = order.shuffle.enabled
        self._max_row_bytes = stream.max_row_bytes
        self._is_from_start = state is None or state.at is None
        self._check = check
        self._fault: Exception | None = None
        self.is_at_end = False
        self._num_read = 0  # rows before those in `_rows`
        self._first = 0  # the next row of `_rows`
        self._rows = Rows(0, np.empty(0, np.int64), np.empty(0, np.int64), b"", 0, None)
        self._places = np.zeros(1, np.int64)  # the start of each of `_rows` in their data, and the end of the last one
        self._num_blank = 0
        self._source = stream.read(order, epoch, None if state is None else state.at, check)

    def close(self) -> None:
        """Close the files."""
        self._source.close()

    def start(self, state: StreamState) -> bool:
        """Skip to the window of ``state``, with which the pass was made; return whether its first row is the same."""
        left = state.skip
        while self._look() and left:
            num_rows = min(left, len(self._rows.lengths) - self._first)
            self._first += num_rows
            left -= num_rows
        self.number = state.window
        self.num_replayed = state.skip if state.at is None else 0
        return self.is_at(state)

    def is_at(self, state: StreamState) -> bool:
        """Whether the next row is the one of ``state``."""
        return self._look() and self._digest() == state.row

    def _look(self) -> bool:
        """Read on if ``_rows`` is used up; return whether there is a next row, which is then in ``_rows``."""
        while self._first == len(self._rows.lengths) and not self.is_at_end:
            self._check()
            rows = next(self._source, None)
            if rows is None:
                self.is_at_end = True
                break

            self._num_read += self._first
            self._num_blank += rows.num_blank
            self._rows, self._first = rows, 0
            sizes = np.where(rows.lengths <= self._max_row_bytes, rows.lengths + 1, 0)
            self._places = np.concatenate(([0], np.cumsum(sizes)))
        return not self.is_at_end

    def _digest(self) -> str:
        """A digest of the next row."""
        start, stop = self._places[self._first : self._first + 2].tolist()
        return blake2b(self._rows.data[start:stop], digest_size=8).hexdigest()

    def pass_window(self) -> None:
        """Skip the next window."""
        self.num_replayed += len(self.read_window(None).lengths)

    def read_window(self, memory: memoryview | None) -> WindowRows:
        """Read the next window into ``memory`` (None: skip it).

        After a permanent error in the data, the rows read so far form a short window, and the next call raises. An
        error that may not come again, such as one of a network or of a user's function, is raised at once instead: a
        short window would be shuffled differently from the whole window, which is read after a restart.

        :raises SourceError: if there is an error in the data.
        :raises Exception: any other error of the stream.
        """
        parts: list[_Part] = []
        used = count = num_bytes = 0
        while self._has_next(count):
            costs = np.cumsum(self._rows.lengths[self._first :] + 1)
            num_rows = int(np.searchsorted(costs, self._limit - used, side="right"))
            num_rows = min(num_rows, MAX_WINDOW_ROWS - count) or int(count == 0)  # a row may have a window to itself
            if num_rows == 0:
                break

            parts.append(self._take(num_rows, memory, num_bytes))
            used += int(costs[num_rows - 1])
            count += num_rows
            num_bytes += parts[-1].num_bytes
        self.number += 1
        return self._window(parts)

    def _has_next(self, count: int) -> bool:
        """Whether there is a next row. A permanent error counts as the end if the window has ``count`` > 0 rows."""
        if self._fault is not None:
            raise self._fault

        try:
            return self._look()
        except Exception as error:
            is_lasting = isinstance(error, SourceError) and not isinstance(error, SourceChangedError)
            if count == 0 or (self._is_shuffled and not is_lasting):
                raise

            self._fault = error
            return False

    def _take(self, num_rows: int, memory: memoryview | None, place: int) -> _Part:
        """The next rows, copied to offset ``place`` of ``memory``."""
        rows, first, stop = self._rows, self._first, self._first + num_rows
        begin, end = self._places[[first, stop]].tolist()
        if memory is not None:
            memory[place : place + end - begin] = memoryview(rows.data)[begin:end]
        self._first = stop
        lengths = rows.lengths[first:stop]
        offsets = np.full(num_rows, -1, np.int64) if rows.offsets is None else rows.offsets[first:stop]
        return _Part(
            np.full(num_rows, rows.file_id, np.int32),
            rows.numbers[first:stop],
            (self._places[first:stop] - begin + place).astype(np.int32),
            np.where(lengths <= self._max_row_bytes, lengths, -1).astype(np.int32),
            offsets,
            end - begin,
        )

    def _window(self, parts: list[_Part]) -> WindowRows:
        num_blank, self._num_blank = self._num_blank, 0
        parts = parts or [_NO_ROWS]
        return WindowRows(
            file_ids=np.concatenate([part.file_ids for part in parts]),
            numbers=np.concatenate([part.numbers for part in parts]),
            starts=np.concatenate([part.starts for part in parts]),
            lengths=np.concatenate([part.lengths for part in parts]),
            offsets=np.concatenate([part.offsets for part in parts]),
            num_blank=num_blank,
            is_last=self.is_at_end,
            next_state=self._next_state(),
        )

    def _next_state(self) -> StreamState | None:
        if self.is_at_end or self._fault is not None:
            return None

        at, skip = self._rows.state, self._first
        if at is None:
            if not self._is_from_start:
                return None

            skip += self._num_read
        return StreamState(window=self.number, at=at, skip=skip, row=self._digest())


class _Part(NamedTuple):
    """Rows of a window that were read together."""

    file_ids: Int32
    numbers: Int64
    starts: Int32
    lengths: Int32
    offsets: Int64
    num_bytes: int


_NO_ROWS = _Part(
    np.empty(0, np.int32),
    np.empty(0, np.int64),
    np.empty(0, np.int32),
    np.empty(0, np.int32),
    np.empty(0, np.int64),
    0,
)
