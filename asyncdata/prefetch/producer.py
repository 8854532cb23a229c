"""Sends the next rows to the workers: order -> window -> chunks -> executor -> channel.

All code here runs in the service's thread, driven by events, and never waits. There is one rule: every event that
changes a condition of :meth:`Producer.pump` ends with a call of it, even if it seems that no more can be sent.

- A request has ended (whether or not its reply is used), a slot is free, or the workers have changed: the executor
  calls it (:meth:`~asyncdata.workers.base.Executor.watch`).
- A window became ready other than by a reply: the windows' ``on_ready`` leads to it.
- There is room in the channel: the coordinator's ``on_room`` leads to it.
- Another rank of the node has tokenized a chunk, or has ended: ``Sharing.on_change`` leads to it.

So no other code needs to call it, and waiting for one event cannot miss another. How rows are cut into chunks does not
change D.
"""

from __future__ import annotations

import contextlib
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from asyncdata.core.cache_messages import RowsRefused
from asyncdata.core.errors import AsyncDataError
from asyncdata.core.messages import Failed, RowError, Tokenized
from asyncdata.core.types import Position
from asyncdata.delivery.bad_rows import located
from asyncdata.delivery.channel import Entry, Failure
from asyncdata.delivery.event_limits import NotesLog
from asyncdata.delivery.mass_drops import MassDrops, rows_by_reason
from asyncdata.prefetch.chunk_size import MAX_CHUNK_ROWS, ChunkPacer
from asyncdata.prefetch.node_share.sharing import Offer
from asyncdata.prefetch.rows_in_flight import NOTHING, RowsInFlight, num_elsewhere
from asyncdata.prefetch.windows.base import ChunkOrigin, no_such_place
from asyncdata.workers.base import Crashed, error_of

if TYPE_CHECKING:
    from asyncdata.core.messages import Reply
    from asyncdata.delivery.chunk import Chunk
    from asyncdata.delivery.coordinator import Coordinator
    from asyncdata.delivery.ledger import Ledger
    from asyncdata.delivery.part_feed import PartFeed
    from asyncdata.prefetch.canaries import Canaries
    from asyncdata.prefetch.node_share.sharing import Sharing
    from asyncdata.prefetch.windows.base import OpenWindow, Windows
    from asyncdata.workers.base import Executor

__all__ = ("Producer",)

_MAX_PLACED_ROWS = 4 * MAX_CHUNK_ROWS


class Producer:
    """Reads ahead from one position, until it is started again from another.

    :param epochs: the number of epochs; None: no end.
    :param sharing: shares chunks with the other ranks of the node; None: all are tokenized here.
    :param num_files: files of the source; ``source``: its name, if it is a part of a mixture.
    :ivar pacer: the size of chunks; it also has the rows and the time of tokenizing.
    :ivar lacks_room: whether a worker got no chunk because the channel had no room.
    """

    def __init__(
        self,
        windows: Windows,
        canaries: Canaries,
        executor: Executor,
        coordinator: Coordinator | PartFeed,
        *,
        epochs: int | None,
        sharing: Sharing | None = None,
        num_files: int = 1,
        source: str = "",
    ) -> None:
        self.canaries = canaries
        self._opener = windows
        self._executor = executor
        self._coordinator = coordinator
        self._epochs = epochs
        self.pacer = ChunkPacer(coordinator.rules.capacity, executor.num_workers)
        self._windows: deque[OpenWindow] = deque()
        self._channel = coordinator.channel
        self._journal: frozenset[tuple[int, int]] = frozenset()
        self._skips: list[int] | None = None  # rows of the current window that the journal names; None: not known yet
        self._row = 0
        self._current = (0, 0)
        self._is_finished = True
        self._is_pumping = self._is_pump_due = False
        self.lacks_room = False
        self._notes, self._mass_drops = NotesLog(), MassDrops(source, num_files)
        executor.watch(self.pump)
        self._sharing = sharing
        if sharing is not None:
            sharing.on_change = self.pump

    def start(self, ledger: Ledger, expected_canaries: list[str] | None = None) -> None:
        """Read ahead from the ledger's position; drop everything that is in flight.

        :param expected_canaries: digests of a snapshot; nothing is delivered until the canaries have the same.
        """
        self._is_finished = True  # freeing slots would pump
        self._executor.forget()
        if self._sharing is not None:
            self._sharing.forget()
        while self._windows:
            self._executor.slots.release(self._windows.popleft().slot)
        self._opener.restart()
        self._mass_drops.restart()
        position = ledger.position
        self._channel = self._coordinator.channel
        self._journal = ledger.journal
        self._current = (position.epoch, position.window)
        self._row = position.row
        self._skips = None
        self.canaries.restart(expected_canaries, self._fail)
        self._is_finished = False
        self.pump()

    def pump(self) -> None:
        """Send all rows that can be sent now; possibly none."""
        self._is_pump_due = True
        if self._is_pumping:  # sending may free a slot, which pumps
            return

        self._is_pumping = True
        try:
            while self._is_pump_due and not self._is_finished:
                self._is_pump_due = False
                self._send_all()
        except AsyncDataError as error:
            self._fail(error)
        finally:
            self._is_pumping = False

    def _send_all(self) -> None:
        if self.canaries.is_blocking:
            self.canaries.make()
            return

        if not self._windows:
            self._open_window()
        while self._send_chunk():
            if self._windows and self._windows[0].is_placed:
                # Now, and not only after the loop: the workers are idle, as this window is cached, and the channel may
                # take all of it at once. Then there would be no other chance to open the next window in time.
                self._open_next()
        self._open_next()

    def resize(self) -> None:
        """The number of workers, or the capacity of the channel, has changed."""
        self.pacer.resize(self._coordinator.rules.capacity, self._executor.num_workers)
        self.pump()

    def _open_next(self) -> None:
        """Read the next window while this one is tokenized; if workers tokenize this one, after its first rows."""
        if len(self._windows) != 1 or not self._windows[0].is_ready:
            return

        if self._row or self._windows[0].is_placed:
            with contextlib.suppress(AsyncDataError):  # it is raised again when that window is the current one
                self._open_window()

    def _open_window(self) -> None:
        epoch, number = _after(self._current, self._windows[0]) if self._windows else self._current
        if self._epochs is not None and epoch >= self._epochs:
            return

        window = self._opener.open(epoch, number)
        if window is not None:
            self._windows.append(window)

    def _send_chunk(self) -> bool:
        """Send the next rows; return whether to try again."""
        if self._windows and self._windows[0].fault is not None:
            raise self._windows[0].fault

        if not self._windows or self._executor.num_wanted <= 0:
            return False

        window = self._windows[0]
        num_left = window.num_rows - self._row
        # The ranks of a node cut the same chunks, but do not all know as many rows of a window that grows.
        if not window.is_ready and (num_left <= 0 or self._sharing is not None):
            return False

        if num_left < 0:
            raise no_such_place(Position(*self._current, self._row), f"the window has {window.num_rows} rows")

        if num_left <= 0 and not window.is_last:
            self._next_window()
            return True

        agreed = self._agreed_rows()
        most = agreed or (self._most_placed if window.is_placed else self.pacer.num_rows)
        size = min(most, max(num_left, 0))
        entry = self._coordinator.reserve(self._channel, size, min_rows=size if agreed else (size + 1) // 2)
        self.lacks_room = entry is None
        if entry is None:
            return False

        self._send(window, entry)
        return True

    def _agreed_rows(self) -> int | None:
        """Rows of the next chunk, if the ranks of the node cut the same ones."""
        if self._sharing is None:
            return None

        place, capacity = (*self._current, self._row), self._coordinator.rules.capacity
        return self._sharing.num_rows_at(place, self.pacer.num_rows, capacity, self._executor.num_workers)

    @property
    def _most_placed(self) -> int:
        """The largest chunk of rows that are cached: these need no worker, so the chunk may be large."""
        return max(1, min(_MAX_PLACED_ROWS, self._coordinator.rules.capacity))

    def _send(self, window: OpenWindow, entry: Entry) -> None:
        skips = window.find(self._journal) if self._skips is None else self._skips
        self._skips = skips if window.is_ready else None
        skip = next((row for row in skips if row >= self._row), None)
        if skip is not None and skip < self._row + entry.num_rows:
            self._trim(entry, max(1, skip - self._row))
        first, stop = self._row, self._row + entry.num_rows
        ends_epoch = window.is_last and stop >= window.num_rows
        part = RowsInFlight(self._channel, entry, window, Position(*self._current, first), ends_epoch)
        entry.location = partial(window.location, first) if first < stop else None
        self._row = stop
        if first == stop:
            self._deliver(part, NOTHING)
        elif first == skip:
            self._deliver_without(part, _JOURNALED)
        elif not self._place(part):
            self._offer(part)
        if ends_epoch or (stop == window.num_rows and window.is_ready and not window.is_last):
            self._next_window()

    def _trim(self, entry: Entry, num_rows: int) -> None:
        """Give back the places of the rows from number ``num_rows`` of the entry on."""
        if num_rows < entry.num_rows:
            self._coordinator.shorten(self._channel, entry, num_rows)

    def _next_window(self) -> None:
        """All rows of the window are sent: go to the next. The slot is free once all replies are there."""
        window = self._windows.popleft()
        self._current = _after(self._current, window)
        self._row = 0
        self._skips = None
        self._executor.slots.release(window.slot)
        if not self._windows:
            self._open_window()

    def _place(self, part: RowsInFlight) -> bool:
        """Fill the channel with the rows if all of them are cached; return whether they are."""
        first, num_rows = part.position.row, part.entry.num_rows
        placed = part.window.placed(first, first + num_rows)
        if placed is None:
            return False

        part.window.answered(first, num_rows, placed.reply)
        self._notes.see(placed.reply.notes)
        if placed.reply.busy_s:  # a worker tokenized them with their window
            self.pacer.learn(num_rows, placed.reply.busy_s)
        origin = ChunkOrigin(part.window, first)
        chunk = placed.chunk(part.position, num_rows, origin, ends_epoch=part.ends_epoch)
        self._fill(part, chunk)
        self.canaries.make()
        return True

    def _offer(self, part: RowsInFlight) -> None:
        """Have the rows tokenized here, or by another rank of the node."""
        if self._sharing is None:
            self._submit(part)
            return

        place = (*self._current, part.position.row)
        submit, deliver = partial(self._submit_claimed, part), partial(self._on_shared, part)
        self._sharing.offer(Offer(part.name, place, part.entry.num_rows, part.window.slot, submit, deliver))

    def _submit_claimed(self, part: RowsInFlight, claim: str) -> None:
        part.claim = claim
        self._submit(part)

    def _on_shared(self, part: RowsInFlight, reply: Tokenized | Crashed) -> None:
        if isinstance(reply, Crashed):
            self._on_crashed(part, reply)
        else:
            self._deliver(part, reply)

    def _submit(self, part: RowsInFlight, max_losses: int = 2) -> None:
        if self._place(part):  # a piece of what was split may be without the rows that are not there yet
            return

        request = part.request()
        if isinstance(request, Tokenized):
            self._deliver(part, request)
        else:
            self._executor.submit(request, partial(self._on_tokenized, part), max_losses)

    def _on_tokenized(self, part: RowsInFlight, reply: Reply | Crashed) -> None:
        if part.claim and self._sharing is not None:
            self._sharing.answered(part.claim, reply)
            part.claim = ""
        if isinstance(reply, Tokenized):
            self.pacer.learn(part.entry.num_rows, reply.busy_s, num_elsewhere(reply))
            self._deliver(part, part.window.completed(part.position.row, part.entry.num_rows, reply))
            self.canaries.make()
        elif isinstance(reply, Crashed):
            self._on_crashed(part, reply)
        elif isinstance(reply, RowsRefused):
            part.window.refused(part.position.row, part.entry.num_rows, reply)
            self._submit(part)
        else:
            self._coordinator.fill(part.channel, part.entry, Failure(error_of(self._located(part, reply))))

    def _located(self, part: RowsInFlight, reply: Reply) -> Reply:
        """The reply, with the location of the row that made the request fail, if there is one."""
        if not isinstance(reply, Failed) or reply.row < 0:
            return reply

        place = part.window.location(part.position.row + reply.row)
        return located(reply, place, shows_row=self._coordinator.rules.shows_rows)

    def _on_crashed(self, part: RowsInFlight, crash: Crashed) -> None:
        if part.entry.num_rows == 1:
            self._deliver_without(part, _only_error(RowError(0, crash.code, crash.reason)))
        elif crash.row is None:
            self._bisect(part)
        else:
            self._cut_out(part, crash, crash.row)

    def _bisect(self, part: RowsInFlight) -> None:
        """One of the rows kills workers: send each half again. If a half kills one more worker, it is cut again."""
        rest = self._split(part, part.entry.num_rows // 2)
        self._submit(rest, max_losses=1)
        self._submit(part, max_losses=1)

    def _cut_out(self, part: RowsInFlight, crash: Crashed, row: int) -> None:
        """The row that kills workers is known: send the rows before it and after it again."""
        if row + 1 < part.entry.num_rows:
            self._submit(self._split(part, row + 1))
        culprit = self._split(part, row) if row else part
        if row:
            self._submit(part)
        self._deliver_without(culprit, _only_error(RowError(0, crash.code, crash.reason)))

    def _split(self, part: RowsInFlight, num_rows: int) -> RowsInFlight:
        """Cut ``part`` after ``num_rows`` rows; the rest is returned."""
        first = part.position
        entry = self._coordinator.split(part.channel, part.entry, num_rows)
        rest = Position(first.epoch, first.window, first.row + num_rows)
        entry.location = partial(part.window.location, rest.row)
        other = RowsInFlight(part.channel, entry, part.window, rest, part.ends_epoch)
        part.ends_epoch = False
        return other

    def _deliver(self, part: RowsInFlight, reply: Tokenized) -> None:
        part.window.answered(part.position.row, part.entry.num_rows, reply)
        self._notes.see(reply.notes)
        self._fill(part, part.chunk(reply))

    def _fill(self, part: RowsInFlight, chunk: Chunk) -> None:
        window, first, num_rows = part.window, part.position.row, chunk.num_rows
        drops, files = rows_by_reason(chunk), lambda: window.keys(first, first + num_rows)[0]
        self._mass_drops.see(num_rows, drops, files, chunk.row_location, chunk.ours)
        self._coordinator.fill(part.channel, part.entry, chunk)

    def _deliver_without(self, part: RowsInFlight, reply: Tokenized) -> None:
        """Deliver a row that no worker tokenizes, as bad or dropped. If every row is a sample, it is an empty one."""
        first = part.position.row
        expected = part.window.request(first, first + part.entry.num_rows).expected
        self._deliver(part, msgspec.structs.replace(reply, expected=expected))

    def _fail(self, error: AsyncDataError) -> None:
        """End the read-ahead with an error."""
        self._is_finished = True
        self._coordinator.fail(self._channel, Failure(error))

    @property
    def num_blank(self) -> int:
        """Blank lines passed over so far, in what was read ahead."""
        return self._opener.num_blank


def _after(place: tuple[int, int], window: OpenWindow) -> tuple[int, int]:
    """Epoch and number of the window after ``window``, which is the one at ``place``."""
    return (place[0] + 1, 0) if window.is_last else (place[0], place[1] + 1)


def _only_error(error: RowError) -> Tokenized:
    return Tokenized(tokens=b"", token_ends=b"", kept=b"", columns={}, drops={}, errors=[error], busy_s=0.0)


_JOURNALED = Tokenized(
    tokens=b"", token_ends=b"", kept=b"", columns={}, drops={"journal": bytes(4)}, errors=[], busy_s=0.0
)
