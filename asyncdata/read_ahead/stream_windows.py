"""Windows of a stream: a thread of the trainer's process reads them into slots, one after the other.

Workers get the rows by reference, as for other windows. Besides a position, a restart needs the stream's state at the
start of a window; it is kept for every window at which a restart could begin.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

import anyio.to_thread
import numpy as np

from asyncdata.checkpoint.snapshot import StreamState
from asyncdata.core.errors import AsyncDataError, SourceChangedError, SourceError, get_logger, safe_cause
from asyncdata.core.messages import Tokenize
from asyncdata.core.threads import finished_before_exit
from asyncdata.core.types import Position, SourceLocation
from asyncdata.read_ahead.calls import Calls
from asyncdata.read_ahead.windows import OpenWindow, Windows, no_such_place
from asyncdata.sources.stream import MAX_WINDOW_ROWS, Int32, Int64, Rows, RowStream, StreamOrder
from asyncdata.workers.changes import Changes, Promise


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
        self, stream: RowStream, order: StreamOrder, epoch: int, state: StreamState | None, check: Callable[[], object]
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
    np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int64), 0
)


_log = get_logger(__name__)


class StreamWindow(OpenWindow):
    """Rows of a stream."""

    def __init__(self, stream: RowStream, slot: int, rows: WindowRows, order: Int64) -> None:
        """The rows are in the slot; ``order`` is that in which they are delivered."""
        self.slot = slot
        self._stream = stream
        columns = ("file_ids", "numbers", "starts", "lengths", "offsets")
        self._rows = rows._replace(**{name: getattr(rows, name)[order] for name in columns})
        self.num_rows, self.is_last, self.is_ready = len(order), rows.is_last, True

    def request(self, first: int, stop: int) -> Tokenize:
        starts, lengths = self._rows.starts[first:stop], self._rows.lengths[first:stop]
        return Tokenize(self.slot, starts.tobytes(), lengths.tobytes())

    def keys(self, first: int, stop: int) -> tuple[Int64, Int64]:
        """The numbers of the files of the rows ``[first, stop)``, and the rows' numbers there."""
        return self._rows.file_ids[first:stop].astype(np.int64), self._rows.numbers[first:stop].astype(np.int64)

    def location(self, row: int) -> SourceLocation:
        return self._stream.location(*self.key(row), int(self._rows.lengths[row]), int(self._rows.offsets[row]))


class _GivenUp(BaseException):
    """The window was given up while it was read."""


class _Fill(Promise[StreamWindow]):
    """A window that is waiting to be read, or is being read.

    :ivar is_given_up: whether a restart or the end of the loader made it obsolete.
    :ivar is_reading: whether the thread has the pass: from its first step until it leaves the pass open.
    """

    def __init__(self, slot: int, epoch: int, number: int) -> None:
        super().__init__()
        self.slot, self.epoch, self.number = slot, epoch, number
        self.is_given_up = self.is_reading = False


class StreamWindows(Windows):
    """Windows of a stream.

    Call all methods in the service's thread, except :meth:`state_at` and :meth:`resume_at`, which any thread may call.
    """

    def __init__(self, stream: RowStream, order: StreamOrder, calls: Calls) -> None:
        self.num_blank = 0
        self._stream = stream
        self._order = order
        self._calls = calls
        self._queue: deque[_Fill] = deque()
        self._running: _Fill | None = None
        self._began = 0.0
        self._asked = Changes()
        self._pass: StreamPass | None = None
        self._lock = threading.Lock()  # on who closes the pass at the end: the thread, or the loop
        self._states: dict[tuple[int, int], StreamState] = {}  # replaced, never changed, as other threads read it
        self._resumed: dict[tuple[int, int], StreamState] = {}

    def restart(self) -> None:
        """Give up all windows; one that is being read keeps its slot until the thread has noticed."""
        if self._running is not None:
            self._running.is_given_up = True
        while self._queue:
            self._calls.slots.done(self._queue.popleft().slot)

    async def opened(self, epoch: int, number: int) -> StreamWindow:
        fill = _Fill(await self._calls.slot(), epoch, number)
        self._calls.slots.use(fill.slot)
        self._queue.append(fill)
        self._asked()
        return await fill

    @property
    def read_s(self) -> float:
        return time.monotonic() - self._began if self._running is not None else 0.0

    # What a snapshot keeps.

    def state_at(self, position: Position) -> StreamState | None:
        """The state of the window, or of the last one before it that is known."""
        known = {**self._states, **self._resumed}  # a snapshot's state takes precedence over what was read
        numbers = [number for epoch, number in known if epoch == position.epoch and number <= position.window]
        return known[position.epoch, max(numbers)] if numbers else None

    def resume_at(self, position: Position, state: StreamState | None) -> None:
        self._resumed = {} if state is None else {(position.epoch, state.window): state}

    def _keep_state(self, epoch: int, state: StreamState | None) -> None:
        """Keep the state of the next window, and of those at which a restart could begin."""
        point = self._feed.restart_position()
        place = point.epoch, point.window
        first = max((known for known in self._states if known <= place), default=place)
        states = {known: value for known, value in self._states.items() if known >= first}
        if state is not None:
            states[epoch, state.window] = state
        self._states = states

    # Reading.

    async def run(self) -> None:
        """A thread reads the windows, one after the other."""
        try:
            while True:
                await self._serve(await self._asked.until(lambda: self._queue.popleft() if self._queue else None))
        finally:
            with self._lock:
                fill = self._running
                if fill is not None:
                    fill.is_given_up = True
                is_reading = fill is not None and fill.is_reading  # then the thread closes its pass
            if not is_reading:
                self._close_pass()

    async def _serve(self, fill: _Fill) -> None:
        self._running, self._began = fill, time.monotonic()
        # Abandoned on cancellation: a user's generator may never return, and close() has a deadline.
        outcome = await anyio.to_thread.run_sync(finished_before_exit, self._read, fill, abandon_on_cancel=True)
        self._running = None
        if not fill.is_given_up:
            if isinstance(outcome, WindowRows):
                self._take(fill, outcome)
            else:
                fill.keep(None, outcome)
        self._calls.slots.done(fill.slot)

    def _take(self, fill: _Fill, rows: WindowRows) -> None:
        if fill.number and len(rows.lengths) == 0:
            place = Position(fill.epoch, fill.number)
            fill.keep(None, no_such_place(place, "all rows of the epoch are before it"))
            return

        self.num_blank += rows.num_blank
        self.is_padded = getattr(self._stream, "is_padded", False)
        self._keep_state(fill.epoch, rows.next_state)
        order = self._order.rows(fill.epoch, fill.number, len(rows.lengths))
        fill.keep(StreamWindow(self._stream, fill.slot, rows, order))

    def _read(self, fill: _Fill) -> WindowRows | AsyncDataError | None:
        """In the thread: the rows of a window, or the error; None for a window that was given up."""
        with self._lock:
            if fill.is_given_up:
                return None

            fill.is_reading = True
        outcome: WindowRows | AsyncDataError | None = None
        try:
            memory = self._calls.executor.memory(fill.slot)
            outcome = self._pass_at(fill.epoch, fill.number).read_window(memory)
        except _GivenUp:
            pass
        except BaseException as error:  # also SystemExit: a user's generator may raise anything
            outcome = _as_ours(error, fill, self._stream.files[0].path)
        with self._lock:
            fill.is_reading = fill.is_given_up or not isinstance(outcome, WindowRows)
        if fill.is_reading:
            self._close_pass()
        return outcome

    def _check(self) -> None:
        """Cancel the pass if the window was given up."""
        if self._running is not None and self._running.is_given_up:
            raise _GivenUp

    def _close_pass(self) -> None:
        current, self._pass = self._pass, None
        try:
            if current is not None:
                current.close()
        except Exception as error:  # of a user's generator; there is no caller to raise it to
            _log.warning("stream.close_failed", reason=repr(error))

    def _pass_at(self, epoch: int, number: int) -> StreamPass:
        """A pass whose next window is number ``number`` of ``epoch``."""
        current, resumed = self._pass, self._resumed.get((epoch, number))
        if current is not None and (current.epoch, current.number) == (epoch, number):
            # The pass may be older than the snapshot, and at another row.
            if resumed is None or current.is_at(resumed):
                return current

        self._close_pass()
        if epoch or number:  # at the very start the files have just been checked
            self._stream.check_unchanged()
        current = self._begin(epoch, self.state_at(Position(epoch, number)))
        while current.number < number and not current.is_at_end:
            current.pass_window()
        if current.num_replayed:
            _log.warning("stream.replayed", epoch=epoch, window=number, num_rows=current.num_replayed)
        return current

    def _begin(self, epoch: int, state: StreamState | None) -> StreamPass:
        """A pass from ``state`` on; or, if the state leads to another row, from the epoch's start."""
        self._pass = StreamPass(self._stream, self._order, epoch, state, self._check)
        if state is None or self._pass.start(state):
            return self._pass

        self._close_pass()
        self._pass = StreamPass(self._stream, self._order, epoch, None, self._check)
        while self._pass.number < state.window and not self._pass.is_at_end:
            self._pass.pass_window()
        if not self._pass.is_at(state):
            raise SourceChangedError(
                f"AD303 {self._stream.files[0].path}: window {state.window} of epoch {epoch} begins with another row "
                "than when the snapshot was taken. Put the data back, or go on with the next epoch by set_epoch()."
            )

        return self._pass


def _as_ours(error: BaseException, fill: _Fill, title: str) -> AsyncDataError:
    if isinstance(error, AsyncDataError):
        return error

    if isinstance(error, OSError):
        ours = SourceError(f"AD304 cannot read {error.filename or title}: {error.strerror or error}")
    else:
        ours = SourceError(f"AD129 the source raised {error!r} in window {fill.number} of epoch {fill.epoch}")
    ours.__cause__ = safe_cause(error)
    ours.__suppress_context__ = True
    return ours
