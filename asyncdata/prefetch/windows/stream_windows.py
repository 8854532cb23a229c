"""Windows of a stream: a thread of the trainer's process reads them into slots, one after the other.

Workers get the rows by reference, as for other windows. Besides a position, a restart needs the stream's state at the
start of a window; it is kept for every window at which a restart could begin.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import numpy as np

from asyncdata.core.callbacks import no_op
from asyncdata.core.errors import AsyncDataError, SourceChangedError, SourceError, safe_cause
from asyncdata.core.log import get_logger
from asyncdata.core.messages import Tokenize
from asyncdata.core.row_codes import TOO_LONG
from asyncdata.core.types import Position
from asyncdata.prefetch.windows.base import Int64, no_such_place
from asyncdata.prefetch.windows.cached_rows import RowsOfWindow
from asyncdata.prefetch.windows.stream_reader import StreamPass, WindowRows

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from asyncdata.checkpoint.snapshot import StreamState
    from asyncdata.core.cache_messages import RowsRefused
    from asyncdata.core.messages import Tokenized
    from asyncdata.core.types import SourceLocation
    from asyncdata.prefetch.windows.base import CachedRows
    from asyncdata.sources.stream import RowStream, StreamOrder
    from asyncdata.workers.base import Executor

__all__ = ("StreamWindow", "StreamWindows")

_log = get_logger(__name__)


class StreamWindow:
    """Rows of a stream; see :class:`~asyncdata.prefetch.windows.base.OpenWindow`."""

    def __init__(self, stream: RowStream, slot: int, cache: CachedRows | None = None) -> None:
        self._cache = cache
        self._cached: RowsOfWindow | None = None
        self.is_recorded = cache is not None
        self.slot = slot
        self.is_last = False
        self.num_rows = 0
        self.is_placed = False
        self.fault: AsyncDataError | None = None
        self._stream = stream
        self._rows: WindowRows | None = None

    def fill(self, rows: WindowRows, order: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Set the rows, which are in the slot, and the order in which they are delivered."""
        columns = ("file_ids", "numbers", "starts", "lengths", "offsets")
        self._rows = rows._replace(**{name: getattr(rows, name)[order] for name in columns})
        self.num_rows, self.is_last = len(order), rows.is_last
        if self._cache is not None:
            numbers = self._cache.numbers(self._rows.file_ids.astype(np.int64), self._rows.numbers)
            self._cached = RowsOfWindow(self._cache, numbers)

    @property
    def is_ready(self) -> bool:
        """Whether its rows are known."""
        return self._rows is not None

    @property
    def _known(self) -> WindowRows:
        if self._rows is None:
            raise RuntimeError("the window is not ready")

        return self._rows

    def request(self, first: int, stop: int) -> Tokenize:
        """What a worker needs to tokenize the rows ``[first, stop)``."""
        starts, lengths = self._known.starts[first:stop], self._known.lengths[first:stop]
        if self._cached is None:
            return Tokenize(self.slot, starts.tobytes(), lengths.tobytes())

        found = self._cached.choose(first, starts, lengths != TOO_LONG)
        return Tokenize(
            self.slot,
            found.starts.tobytes(),
            lengths.tobytes(),
            num_cached=found.num_cached,
            spill=found.spill,
            cached=found.cached,
        )

    def placed(self, first: int, stop: int) -> None:
        """None: a worker must tokenize the rows."""

    def key(self, row: int) -> tuple[int, int]:
        """The number of the row's file, and the row's number there."""
        return int(self._known.file_ids[row]), int(self._known.numbers[row])

    def keys(self, first: int, stop: int) -> tuple[Int64, Int64]:
        """The numbers of the files of the rows ``[first, stop)``, and the rows' numbers there."""
        return self._known.file_ids[first:stop].astype(np.int64), self._known.numbers[first:stop].astype(np.int64)

    def answered(self, first: int, num_rows: int, reply: Tokenized) -> None:
        """As the protocol says."""
        if self._cached is not None:
            self._cached.answered(first, num_rows, reply, is_last=self.is_last)

    def completed(self, first: int, num_rows: int, reply: Tokenized) -> Tokenized:
        """As the protocol says: no samples were there."""
        return reply

    def refused(self, first: int, num_rows: int, refusal: RowsRefused) -> None:
        """As the protocol says."""
        if self._cached is not None:
            self._cached.refused(first, num_rows, refusal)

    def location(self, row: int) -> SourceLocation:
        """The row's location."""
        return self._stream.location(*self.key(row), int(self._known.lengths[row]), int(self._known.offsets[row]))

    def find(self, keys: Set[tuple[int, int]]) -> list[int]:
        """The rows of the window that ``keys`` name, in ascending order."""
        file_ids, numbers = self._known.file_ids, self._known.numbers
        return sorted({int(row) for key in keys for row in np.flatnonzero((file_ids == key[0]) & (numbers == key[1]))})


class _GivenUp(BaseException):
    """The window was given up while it was read."""


class _Fill:
    """A window that is waiting to be read, or is being read.

    :ivar is_given_up: whether a restart or the end of the loader made it obsolete.
    :ivar is_reading: whether the thread has the pass: from its first step until it leaves the pass open.
    """

    def __init__(self, window: StreamWindow, epoch: int, number: int) -> None:
        self.window = window
        self.epoch = epoch
        self.number = number
        self.is_given_up = self.is_reading = False


class StreamWindows:
    """Windows of a stream; see :class:`~asyncdata.prefetch.windows.base.Windows`.

    Call all methods in the service's thread, except :meth:`state_at` and :meth:`resume_at`, which any thread may call.

    :param restart_point: returns the first position that a restart would need now; without it, the states of all
        windows are kept.
    :param on_ready: called, in the service's thread, when a window is read, or has a fault.
    :param cache: the token cache, if there is one.
    """

    def __init__(
        self,
        stream: RowStream,
        order: StreamOrder,
        executor: Executor,
        *,
        restart_point: Callable[[], Position] = Position,
        on_ready: Callable[[], object] = no_op,
        cache: CachedRows | None = None,
    ) -> None:
        self.num_blank = 0
        self._cache = cache
        self._stream = stream
        self._order = order
        self._executor = executor
        self._restart_point = restart_point
        self._on_ready = on_ready
        self._queue: deque[_Fill] = deque()
        self._running: _Fill | None = None
        self._began = 0.0
        self._wake = anyio.Event()
        self._pass: StreamPass | None = None
        self._lock = threading.Lock()  # on who closes the pass at the end: the thread, or the loop
        self._states: dict[tuple[int, int], StreamState] = {}  # replaced, never changed, as other threads read it
        self._resumed: dict[tuple[int, int], StreamState] = {}

    def rows_after(self, position: Position) -> None:
        """As the protocol says: None, as the length of a stream is not known."""

    def restart(self) -> None:
        """As the protocol says; a window that is being read keeps its slot until the thread has noticed."""
        if self._running is not None:
            self._running.is_given_up = True
        while self._queue:
            self._executor.slots.done(self._queue.popleft().window.slot)
        if self._cache is not None:
            self._cache.restart()

    def open(self, epoch: int, number: int) -> StreamWindow | None:
        """As the protocol says."""
        if self._cache is not None and not self._cache.is_ready(epoch, number):
            return None

        slot = self._executor.slots.hold()
        if slot is None:
            return None

        self._executor.slots.use(slot)
        window = StreamWindow(self._stream, slot, self._cache)
        self._queue.append(_Fill(window, epoch, number))
        self._wake.set()
        return window

    @property
    def read_s(self) -> float:
        """As the protocol says."""
        return time.monotonic() - self._began if self._running is not None else 0.0

    # What a snapshot keeps.

    def state_at(self, position: Position) -> StreamState | None:
        """As the protocol says: the state of the window, or of the last one before it that is known."""
        known = {**self._states, **self._resumed}  # a snapshot's state takes precedence over what was read
        numbers = [number for epoch, number in known if epoch == position.epoch and number <= position.window]
        return known[position.epoch, max(numbers)] if numbers else None

    def resume_at(self, position: Position, state: StreamState | None) -> None:
        """As the protocol says."""
        self._resumed = {} if state is None else {(position.epoch, state.window): state}

    def _keep_state(self, epoch: int, state: StreamState | None) -> None:
        """Keep the state of the next window, and of those at which a restart could begin."""
        point = self._restart_point()
        place = point.epoch, point.window
        first = max((known for known in self._states if known <= place), default=place)
        states = {known: value for known, value in self._states.items() if known >= first}
        if state is not None:
            states[epoch, state.window] = state
        self._states = states

    # Reading.

    async def finish(self) -> None:
        """As the protocol says: in the token cache."""
        if self._cache is not None:
            await self._cache.finish()

    async def run(self) -> None:
        """As the protocol says: a thread reads the windows, one after the other; the token cache writes in another."""
        if self._cache is None:
            await self._read_windows()
            return

        async with anyio.create_task_group() as group:
            group.start_soon(self._cache.run)
            await self._read_windows()

    async def _read_windows(self) -> None:
        try:
            while True:
                await self._wake.wait()
                while self._queue:
                    await self._serve(self._queue.popleft())
                self._wake = anyio.Event()
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
        outcome = await anyio.to_thread.run_sync(self._read, fill, abandon_on_cancel=True)
        self._running = None
        if not fill.is_given_up:
            if isinstance(outcome, WindowRows) and fill.number and len(outcome.lengths) == 0:
                place = Position(fill.epoch, fill.number)
                fill.window.fault = no_such_place(place, "all rows of the epoch are before it")
            elif isinstance(outcome, WindowRows):
                self.num_blank += outcome.num_blank
                fill.window.fill(outcome, self._order.rows(fill.epoch, fill.number, len(outcome.lengths)))
                self._keep_state(fill.epoch, outcome.next_state)
            else:
                fill.window.fault = outcome
            self._on_ready()
        self._executor.slots.done(fill.window.slot)

    def _read(self, fill: _Fill) -> WindowRows | AsyncDataError | None:
        """In the thread: the rows of a window, or the error; None for a window that was given up."""
        with self._lock:
            if fill.is_given_up:
                return None

            fill.is_reading = True
        outcome: WindowRows | AsyncDataError | None = None
        try:
            memory = self._executor.memory(fill.window.slot)
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
