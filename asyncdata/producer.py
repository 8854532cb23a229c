"""Keeps the workers busy with the rows that come next: order -> window -> chunks -> executor -> channel.

A machine of events, all in the service's thread, none of which waits: a reply came, a slot is free, there is room in
the channel. Each ends in :meth:`Producer.pump`, which sends what can be sent. Chunks are invisible in D.
"""

from __future__ import annotations

import contextlib
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from asyncdata.canaries import Canaries
from asyncdata.channel import Channel, Entry, Failure
from asyncdata.columns import Chunk
from asyncdata.errors import AsyncDataError
from asyncdata.executors.base import Crashed, error_of
from asyncdata.pacing import ChunkPacer
from asyncdata.types import Position
from asyncdata.window import ChunkOrigin, Window
from asyncdata.wire import RowError, Scanned, Tokenized

if TYPE_CHECKING:
    from asyncdata.coordinator import Coordinator
    from asyncdata.executors.base import Executor
    from asyncdata.ledger import Ledger
    from asyncdata.order import Order
    from asyncdata.sources.base import FileBlocks
    from asyncdata.wire import Reply, Scan

__all__ = ("Producer",)

_MAX_SCANS = 5


class _Part:
    """Rows ``[first, first + entry.num_rows)`` of a window, on their way."""

    __slots__ = ("channel", "ends_epoch", "entry", "position", "window")

    def __init__(self, channel: Channel, entry: Entry, window: Window, position: Position, ends_epoch: bool) -> None:
        self.channel = channel
        self.entry = entry
        self.window = window
        self.position = position
        self.ends_epoch = ends_epoch

    def chunk(self, reply: Tokenized) -> Chunk:
        """What the reply makes of the rows."""
        origin = ChunkOrigin(self.window, self.position.row)
        return Chunk(reply, self.position, self.entry.num_rows, origin, ends_epoch=self.ends_epoch)


class Producer:
    """Reads ahead from one position, until it is started anew from another.

    :param stride: bytes of a slot that one block takes.
    :param epochs: how many epochs there are; None for no end.
    """

    def __init__(
        self,
        source: FileBlocks,
        order: Order,
        executor: Executor,
        coordinator: Coordinator,
        *,
        stride: int,
        epochs: int | None,
    ) -> None:
        self.canaries = Canaries(source, executor, stride, order.max_window_blocks)
        self._source = source
        self._order = order
        self._executor = executor
        self._coordinator = coordinator
        self._stride = stride
        self._epochs = epochs
        self._pacer = ChunkPacer(coordinator.rules.capacity, executor.num_workers)
        self._windows: deque[Window] = deque()
        self._channel = coordinator.channel
        self._journal: frozenset[tuple[int, int]] = frozenset()
        self._skips: list[int] = []
        self._row = 0
        self._current = self._upcoming = (0, 0)
        self._is_finished = True
        self._is_pumping = False
        self._num_blank = 0
        executor.slots.on_free = self.pump

    def start(self, ledger: Ledger, expected_canaries: list[str] | None = None) -> None:
        """Read ahead from the ledger's position; whatever was on its way before is forgotten.

        :param expected_canaries: nothing is delivered until they are found to be the same.
        """
        self._is_finished = True  # while slots are freed, which would pump
        self._executor.forget()
        while self._windows:
            self._executor.slots.release(self._windows.popleft().slot)
        position = ledger.position
        self._channel = self._coordinator.channel
        self._journal = ledger.journal
        self._current = self._upcoming = (position.epoch, position.window)
        self._row = position.row
        self.canaries.restart(expected_canaries, self.pump, self._fail)
        self._is_finished = False
        self.pump()

    def pump(self) -> None:
        """Send what can be sent."""
        if self._is_finished or self._is_pumping:
            return

        if self.canaries.is_blocking:
            self.canaries.make()
            return

        self._is_pumping = True  # what is sent may free a slot, which pumps
        try:
            if not self._windows:
                self._open_window()
            while self._send_chunk():
                pass
            if len(self._windows) == 1 and self._row:
                with contextlib.suppress(AsyncDataError):  # it comes again when it is that window's turn
                    self._open_window()  # the next one is read while this one is tokenized
        except AsyncDataError as error:
            self._fail(error)
        finally:
            self._is_pumping = False

    def _open_window(self) -> None:
        epoch, number = self._upcoming
        if self._epochs is not None and epoch >= self._epochs:
            return

        if number == 0 and epoch > 0:
            self._source.check_unchanged()
        slot = self._executor.slots.hold()
        if slot is None:
            return

        blocks = self._source.blocks(self._order.blocks(epoch, number))
        window = Window(self._source, blocks, slot, self._stride, partial(self._order.rows, epoch, number))
        self._windows.append(window)
        is_last = number + 1 == self._order.num_windows
        self._upcoming = (epoch + 1, 0) if is_last else (epoch, number + 1)
        for part, scan in enumerate(window.scans()):
            self._executor.submit(scan, partial(self._on_scanned, window, part, scan, _MAX_SCANS))

    def _on_scanned(self, window: Window, part: int, scan: Scan, num_tries: int, reply: Reply | Crashed) -> None:
        if isinstance(reply, Crashed) and num_tries > 1:  # no row is to blame: workers are being killed from outside
            self._executor.submit(scan, partial(self._on_scanned, window, part, scan, num_tries - 1))
            return

        if not isinstance(reply, Scanned):
            window.fault = error_of(reply)
        elif window.add(part, reply):
            self._num_blank += window.num_blank
            if window is self._windows[0]:
                self._skips = window.find(self._journal)
        self.pump()

    def _send_chunk(self) -> bool:
        """Send the next rows; whether there is more to try."""
        if self._windows and self._windows[0].fault is not None:
            raise self._windows[0].fault

        if not self._windows or not self._windows[0].is_scanned or self._executor.num_wanted <= 0:
            return False

        window = self._windows[0]
        num_left = window.num_rows - self._row
        if num_left <= 0 and not self._is_last_window:
            self._next_window()
            return True

        size = min(self._pacer.num_rows, max(num_left, 0))
        entry = self._coordinator.reserve(self._channel, size, min_rows=(size + 1) // 2)
        if entry is None:
            return False

        self._send(window, entry)
        return True

    @property
    def _is_last_window(self) -> bool:
        return self._current[1] + 1 == self._order.num_windows

    def _send(self, window: Window, entry: Entry) -> None:
        skip = next((row for row in self._skips if row >= self._row), None)
        if skip is not None and skip < self._row + entry.num_rows:
            self._trim(entry, max(1, skip - self._row))
        first, stop = self._row, self._row + entry.num_rows
        ends_epoch = self._is_last_window and stop >= window.num_rows
        part = _Part(self._channel, entry, window, Position(*self._current, first), ends_epoch)
        entry.location = partial(window.location, first) if first < stop else None
        self._row = stop
        if first == stop:
            self._deliver(part, _NOTHING)
        elif first == skip:
            self._deliver(part, _JOURNALED)
        else:
            self._submit(part)
        if ends_epoch or (stop == window.num_rows and not self._is_last_window):
            self._next_window()

    def _trim(self, entry: Entry, num_rows: int) -> None:
        """Give back the rows behind a row that must not be sent."""
        if num_rows < entry.num_rows:
            self._coordinator.shorten(self._channel, entry, num_rows)

    def _next_window(self) -> None:
        """All rows of the window are sent. Its slot is free once they are answered."""
        epoch, number = self._current
        self._current = (epoch + 1, 0) if self._is_last_window else (epoch, number + 1)
        self._row = 0
        window = self._windows.popleft()
        self._skips = self._windows[0].find(self._journal) if self._windows and self._windows[0].is_scanned else []
        self._executor.slots.release(window.slot)
        if not self._windows:
            self._open_window()

    def _submit(self, part: _Part, strikes: int = 0) -> None:
        first = part.position.row
        request = part.window.request(first, first + part.entry.num_rows)
        self._executor.submit(request, partial(self._on_tokenized, part), strikes)

    def _on_tokenized(self, part: _Part, reply: Reply | Crashed) -> None:
        if isinstance(reply, Tokenized):
            self._pacer.learn(part.entry.num_rows, reply.busy_s)
            self._deliver(part, reply)
            self.canaries.make()
        elif isinstance(reply, Crashed):
            self._on_crashed(part, reply)
        else:
            self._coordinator.fill(part.channel, part.entry, Failure(error_of(reply)))
        self.pump()

    def _on_crashed(self, part: _Part, crash: Crashed) -> None:
        if part.entry.num_rows == 1:
            self._deliver(part, _only_error(RowError(0, crash.code, crash.reason)))
        elif crash.row is None:
            self._bisect(part)
        else:
            self._cut_out(part, crash, crash.row)

    def _bisect(self, part: _Part) -> None:
        """One of the rows brings down workers: look for it in each half. One more death and a half is cut again."""
        behind = self._split(part, part.entry.num_rows // 2)
        self._submit(behind, strikes=1)
        self._submit(part, strikes=1)

    def _cut_out(self, part: _Part, crash: Crashed, row: int) -> None:
        """The row that brings down workers is known: what is before it and behind it is sent again."""
        if row + 1 < part.entry.num_rows:
            self._submit(self._split(part, row + 1))
        culprit = self._split(part, row) if row else part
        if row:
            self._submit(part)
        self._deliver(culprit, _only_error(RowError(0, crash.code, crash.reason)))

    def _split(self, part: _Part, num_rows: int) -> _Part:
        """Cut ``part`` after ``num_rows`` rows; the rest is returned."""
        first = part.position
        entry = self._coordinator.split(part.channel, part.entry, num_rows)
        rest = Position(first.epoch, first.window, first.row + num_rows)
        entry.location = partial(part.window.location, rest.row)
        behind = _Part(part.channel, entry, part.window, rest, part.ends_epoch)
        part.ends_epoch = False
        return behind

    def _deliver(self, part: _Part, reply: Tokenized) -> None:
        self._coordinator.fill(part.channel, part.entry, part.chunk(reply))

    def _fail(self, error: AsyncDataError) -> None:
        """Nothing can be read beyond here."""
        self._is_finished = True
        self._coordinator.fail(self._channel, Failure(error))

    @property
    def num_blank(self) -> int:
        """Blank lines passed over so far, in what was read ahead."""
        return self._num_blank


def _only_error(error: RowError) -> Tokenized:
    return Tokenized(tokens=b"", token_ends=b"", kept=b"", columns={}, drops={}, errors=[error], busy_s=0.0)


_NOTHING = Tokenized(tokens=b"", token_ends=b"", kept=b"", columns={}, drops={}, errors=[], busy_s=0.0)
_JOURNALED = Tokenized(
    tokens=b"", token_ends=b"", kept=b"", columns={}, drops={"journal": bytes(4)}, errors=[], busy_s=0.0
)
