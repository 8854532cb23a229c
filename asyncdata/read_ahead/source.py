"""Reads one source ahead: order -> window -> chunks -> workers -> channel.

One coroutine sends, window after window: what it waits with sends a chunk whenever there is room and a worker. A reply
fills its place in its own callback. So neither costs a tick of the loop, each of which takes the GIL from a busy
trainer. How rows are cut into chunks does not change D.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import msgspec
import numpy as np

from asyncdata.core.errors import AsyncDataError, SnapshotMismatchError
from asyncdata.core.messages import Data, Failed, Reply, RowError, Scanned, Tokenize, Tokenized, is_elsewhere
from asyncdata.core.types import Position
from asyncdata.delivery.bad_rows import BadRowPolicy, MassDrops, NotesLog, located
from asyncdata.delivery.chunk import IS_EXCLUDED, IS_IN_JOURNAL, WAS_SERVED, Chunk, Marks, is_excluded, row_ids
from asyncdata.delivery.items import Failure
from asyncdata.delivery.ledger import Ledger, RowKey, is_key_of, key_in_part
from asyncdata.read_ahead.windows import BlockWindow, Feed, OpenWindow, Windows, leaving_out, no_such_place
from asyncdata.workers.base import Crashed, error_of
from asyncdata.workers.changes import SENT

if TYPE_CHECKING:
    from asyncdata.delivery.channel import Channel, Entry, Exclusions
    from asyncdata.read_ahead.calls import Calls, Later
    from asyncdata.sources.base import Blocks


_NOTHING = Tokenized(tokens=b"", token_ends=b"", kept=b"", columns={}, drops={}, errors=[], busy_s=0.0)
"""The reply for rows that need no work."""
MAX_CHUNK_ROWS = 1024
_MAX_PLACED_ROWS = 4 * MAX_CHUNK_ROWS
_FIRST_ROWS = 32
_LOOKED_FIRST, _LOOKED_EVERY = 8, 1024
"""Rows of a window that are looked at: the first ones, and then one of so many."""
_TARGET_S = 0.05
"""Seconds of work per chunk. Smaller chunks cost more overhead; larger ones cost more when a worker dies, or when the
next row of the order is waited for. Median CPU time per row, all processes, two workers with a Hugging Face tokenizer
on a busy machine: 5 ms 685 us, 10 ms 572, 20 ms 522, 30 ms 520, 50 ms 477, 100 ms 486. A function of 13 us per row
reaches the limit of 1024 rows first: 15.9 us at 5 ms, 15.1 from 20 ms on."""


class Supply(NamedTuple):
    """What one source is read with.

    :ivar name: of a part of a mixture; empty for the only source.
    :ivar bad_rows: what is done with its bad rows.
    :ivar decisions: decide which rows its epochs have; None: all.
    """

    name: str
    windows: Windows
    canaries: Canaries
    calls: Calls
    num_files: int
    bad_rows: BadRowPolicy
    decisions: Exclusions | None


class ReadAhead:
    """Reads ahead from one position, until it is started again from another.

    :param epochs: the number of epochs; None: no end.
    :ivar pacer: the size of chunks; it also has the rows and the time of tokenizing.
    :ivar changed: call it after a change of what it waits for.
    """

    def __init__(self, supply: Supply, coordinator: Feed, epochs: int | None) -> None:
        self._source, self._opener, self.canaries, self._calls, self._num_files, *_ = supply
        self._coordinator, self._epochs, self.changed = coordinator, epochs, self._calls.changed
        self.pacer = ChunkPacer(coordinator.rules.capacity, self._calls.num_workers)
        self._left_out: dict[RowKey, Position | None] = {}
        self._marks: Marks | None = None  # of the first rows of the current window
        self._num_marked = 0
        self._begun: tuple[Ledger, Channel, list[str]] | None = None
        self._scope: anyio.CancelScope | None = None
        self._row = 0
        self._current = (0, 0)
        self._ahead: Later[OpenWindow] | None = None
        self._has_answer = self._is_stopped = False
        self._notes = NotesLog(self._source, shows_row=coordinator.rules.bad_rows.shows_row)
        self._mass_drops, self._seen_files = MassDrops(self._source, self._num_files), set[int]()

    def start(self, ledger: Ledger, expected_canaries: list[str] | None = None) -> None:
        """Read ahead from the ledger's position; drop everything that is in flight.

        :param expected_canaries: digests of a snapshot; nothing is delivered until the canaries have the same.
        """
        self._begun = ledger, self._coordinator.channel, expected_canaries or []
        self._opener.begin(self._coordinator)
        self._calls.restart()
        if self._scope is not None:
            self._scope.cancel()
        self.changed()

    async def run(self) -> None:
        """Read ahead from each start on, until cancelled."""
        while True:
            ledger, self._channel, expected = await self._calls.changes.until(lambda: self._begun)
            self._begun = None
            self._restart(ledger)
            try:
                with anyio.CancelScope() as self._scope:
                    async with anyio.create_task_group() as self._calls.group:
                        self._calls.group.start_soon(self._make_canaries, self._scope)
                        await self._read(ledger.position, expected)
            finally:
                self._calls.release_all()

    def _restart(self, ledger: Ledger) -> None:
        excluded = {} if self._coordinator.rules.leaves_gaps else ledger.excluded
        left_out = {**excluded, **dict.fromkeys(ledger.journal)}
        name = self._source
        self._left_out = {key_in_part(name, key): place for key, place in left_out.items() if is_key_of(name, key)}
        self._opener.leaves_out = bool(self._left_out)
        self._opener.restart()
        self._mass_drops.restart()
        self._has_answer = self._is_stopped = False

    async def _read(self, position: Position, expected: list[str]) -> None:
        """Send all rows from ``position`` on; an error is delivered after them."""
        try:
            await self.canaries.compare(expected)
            epoch, number, row = msgspec.structs.astuple(position)
            ahead = self._opening(epoch, number)
            while ahead is not None:
                self._current, self._row, self._num_marked, self._ahead = (epoch, number), row, 0, None
                window = await ahead
                await self._send_rows(window)
                window.sent()
                self._calls.release(window.slot)
                epoch, number, row = (*_after(self._current, window), 0)
                ahead = self._ahead or self._opening(epoch, number)
        except AsyncDataError as error:
            self._coordinator.fail(self._channel, Failure(error))

    def _opening(self, epoch: int, number: int) -> Later[OpenWindow] | None:
        """A window that is read from now on; None if there is none."""
        is_over = self._epochs is not None and epoch >= self._epochs
        return None if is_over else self._calls.later(self._opener.opened, epoch, number)

    async def _send_rows(self, window: OpenWindow) -> None:
        """Send the rest of the window, and have the next one read meanwhile."""
        is_over = False
        while not is_over:
            while self._row >= window.num_rows and not window.is_ready:
                await self._opener.more(window)
            if self._row > window.num_rows:
                raise no_such_place(Position(*self._current, self._row), f"the window has {window.num_rows} rows")

            if window.is_placed:
                self._read_on(window)  # now: the channel may take all of it at once
            if self._row == window.num_rows and not window.is_last:
                return

            # A window that is placed needs no worker.
            turn = self._calls.changes.until if window.is_placed else self._calls.turn
            is_over = await turn(partial(self._send_next, window))

    def _read_on(self, window: OpenWindow) -> None:
        """Read the next window while this one is tokenized."""
        epoch, number = _after(self._current, window)
        if self._ahead is None and window.is_ready and (number or not self._opener.is_late):
            self._ahead = self._opening(epoch, number)

    def _send_next(self, window: OpenWindow) -> bool | None:
        """Send the next rows, if there is room; after the last known ones, return whether they end the epoch."""
        channel = self._channel
        if channel is not self._coordinator.channel:  # a restart is about to cancel this
            return None

        if not self._is_decided(channel, self._current[0]):
            return None

        capacity = self._coordinator.rules.capacity  # rows that are there need no worker, so their chunks may be large
        most = max(1, min(_MAX_PLACED_ROWS, capacity)) if window.is_placed else self.pacer.num_rows
        size = min(most, window.num_rows - self._row)
        entry = self._coordinator.reserve(channel, size, min_rows=(size + 1) // 2)
        if entry is None:
            return None

        is_over = self._send(window, entry)
        self._read_on(window)
        return SENT if self._row < window.num_rows else is_over

    def _is_decided(self, channel: Channel, epoch: int) -> bool:
        """Whether it is decided which rows ``epoch`` excludes: once a call waits for more than is left of the last."""
        outcomes = channel.outcomes
        if outcomes is None or outcomes.is_decided(epoch):
            return True

        with self._coordinator.lock:
            is_time = not channel.num_rows_in_flight and self._coordinator.is_awaited(channel)
            if is_time:
                outcomes.decide(epoch)
        return is_time

    def _send(self, window: OpenWindow, entry: Entry) -> bool:
        first, stop = self._row, self._row + entry.num_rows
        if self._num_marked < stop:  # its first rows may be sent before the others are known
            self._marks, self._num_marked = self._marked(window), window.num_rows
        ends_epoch = window.is_last and stop >= window.num_rows
        place = Position(*self._current, first)
        part = _RowsInFlight(self._channel, entry, window, place, ends_epoch, self._marks, self._looks(window, stop))
        entry.location = (lambda row: window.location(first + row)) if first < stop else None
        self._row = stop
        self._submit(part)
        return ends_epoch

    async def _make_canaries(self, scope: anyio.CancelScope) -> None:
        """Make them after the first rows; then wait for :meth:`stop`."""
        await self._calls.changes.until(lambda: self._has_answer or self._is_stopped or None)
        if self._has_answer:
            await self.canaries.make()
        await self._calls.changes.until(lambda: self._is_stopped or None)
        scope.cancel()

    def stop(self) -> None:
        """Read no further before the next start, and give back the slots."""
        self._is_stopped = True
        self.changed()

    def resize(self) -> None:
        """The number of workers has changed."""
        self.pacer.resize(self._coordinator.rules.capacity, self._calls.num_workers)
        self.changed()

    def _looks(self, window: OpenWindow, stop: int) -> list[int]:
        """The next rows whose unread keys are asked for: chosen by their places in the order, and one of each file."""
        first = self._row
        looks = {*range(first, min(stop, _LOOKED_FIRST)), *range(first + -first % _LOOKED_EVERY, stop, _LOOKED_EVERY)}
        if 1 < self._num_files > len(self._seen_files):
            files, rows = np.unique(window.keys(first, stop)[0], return_index=True)
            found = dict(zip(files.tolist(), rows.tolist(), strict=True))
            looks |= {first + found[file] for file in found.keys() - self._seen_files}
            self._seen_files |= found.keys()
        return sorted(looks)

    def _marked(self, window: OpenWindow) -> Marks | None:
        """The one mask: which rows of the current window are left out, as far as they are known; None: none is."""
        ids = self._channel.excluded(self._current[0])
        if not (self._left_out or len(ids)):
            return None

        marks = np.zeros(window.num_rows, np.int8)
        for row in window.find(self._left_out.keys()):
            since = self._left_out[window.key(row)]
            is_later = since is not None and Position(*self._current, row) >= since
            marks[row] = IS_IN_JOURNAL if since is None else IS_EXCLUDED if is_later else WAS_SERVED
        if len(ids):
            marks[is_excluded(row_ids(*window.keys(0, len(marks))), ids) & (marks != IS_IN_JOURNAL)] = IS_EXCLUDED
        return marks

    def _submit(self, part: _RowsInFlight, max_losses: int = 2) -> None:
        request = part.request()
        if not isinstance(request, Tokenized):
            asked = self._calls.submit(request, max_losses)
            part.entry.request_id = asked.request_id
            asked.then(partial(self._on_tokenized, part))
            return

        if request.busy_s:  # workers tokenized them with their window
            self.pacer.learn(part.entry.num_rows, request.busy_s, _num_elsewhere(request))
        self._deliver(part, request)
        self.changed()

    def _on_tokenized(self, part: _RowsInFlight, reply: Reply | Crashed) -> None:
        if isinstance(reply, Tokenized):
            self.pacer.learn(part.entry.num_rows, reply.busy_s, _num_elsewhere(reply))
            part.window.answered(reply)
            self._deliver(part, reply)
        elif isinstance(reply, Crashed):
            self._on_crashed(part, reply)
        else:
            self._coordinator.fill(part.channel, part.entry, Failure(error_of(self._located(part, reply))))

    def _located(self, part: _RowsInFlight, reply: Reply) -> Reply:
        """The reply, with the location of the row that made the request fail, if there is one."""
        if not isinstance(reply, Failed) or reply.row < 0:
            return reply

        place = part.window.location(part.position.row + reply.row)
        return located(reply, place, shows_row=self._coordinator.rules.bad_rows.shows_row)

    def _on_crashed(self, part: _RowsInFlight, crash: Crashed) -> None:
        """One of the rows kills workers: if it is known, send the others again; if not, each half, which is cut again
        if it kills one more.
        """
        num_rows, row = part.entry.num_rows, crash.row or 0
        if num_rows > 1 and crash.row is None:
            rest = self._split(part, num_rows // 2)
            self._submit(rest, max_losses=1)
            self._submit(part, max_losses=1)
            return

        if row + 1 < num_rows:
            self._submit(self._split(part, row + 1))
        culprit = self._split(part, row) if row else part
        if row:
            self._submit(part)
        # No worker tokenizes it. If every row is a sample, it is an empty one.
        expected = culprit.window.request(*culprit.bounds).expected
        bad = [RowError(0, crash.code, crash.reason)]
        self._deliver(culprit, msgspec.structs.replace(_NOTHING, errors=bad, expected=expected))

    def _split(self, part: _RowsInFlight, num_rows: int) -> _RowsInFlight:
        """Cut ``part`` after ``num_rows`` rows; the rest is returned."""
        first = part.position
        with self._coordinator.lock:
            entry = part.channel.split(part.entry, num_rows)
        rest = Position(first.epoch, first.window, first.row + num_rows)
        entry.location = lambda row: part.window.location(rest.row + row)
        other = _RowsInFlight(part.channel, entry, part.window, rest, part.ends_epoch, part.marks, part.looks)
        part.ends_epoch = False
        return other

    def _deliver(self, part: _RowsInFlight, reply: Tokenized) -> None:
        chunk = part.chunk(reply, self._source)
        self._notes.see(msgspec.structs.replace(reply, is_padded=True) if self._opener.is_padded else reply, chunk)
        self._mass_drops.see(chunk, chunk.rows_by_reason(), chunk.ours)
        self._coordinator.fill(part.channel, part.entry, chunk)
        self._has_answer = True

    @property
    def unread_keys(self) -> dict[str, int]:
        """Rows that have each unread key, among those that were looked at."""
        return dict(self._notes.unread)

    @property
    def digests(self) -> list[str]:
        """Those of the canaries; empty until they are known."""
        return self.canaries.digests

    @property
    def oldest_in_flight(self) -> Entry | None:
        """The oldest entry for which later ones wait."""
        return self._coordinator.channel.oldest_in_flight

    def numbers(self) -> dict[str, Any]:
        """Numbers for :class:`~asyncdata.Statistics`."""
        return {
            "tokenized_rows_total": self.pacer.total_rows,
            "tokenize_seconds_total": self.pacer.total_work_s,
            "blank_lines_total": self._opener.num_blank,
        }


class _RowsInFlight(msgspec.Struct, eq=False):
    """Rows of a window that are being tokenized.

    :ivar marks: of the window's rows; None: all are delivered. ``looks``: rows to look at.
    """

    channel: Channel
    entry: Entry
    window: OpenWindow
    position: Position
    ends_epoch: bool
    marks: Marks | None
    looks: list[int]

    @property
    def bounds(self) -> tuple[int, int]:
        """The first row, and one more than the last one."""
        return self.position.row, self.position.row + self.entry.num_rows

    def request(self) -> Tokenize | Tokenized:
        """The request to tokenize them, without those that are left out; or the reply, if none is needed."""
        first, stop = self.bounds
        if first == stop:
            return _NOTHING

        placed = self.window.placed(first, stop)
        if placed is not None:
            return placed

        request = self.window.request(first, stop)
        if looks := [row - first for row in self.looks if first <= row < stop]:
            request = msgspec.structs.replace(request, looks=looks)
        if self.marks is None:
            return request

        is_out = self.marks[first:stop] > WAS_SERVED
        if is_out.all():
            return msgspec.structs.replace(_NOTHING, expected=request.expected)

        return leaving_out(request, is_out) if is_out.any() else request

    def chunk(self, reply: Tokenized, source: str) -> Chunk:
        """The chunk of these rows, with the samples of the reply."""
        place = self.position, self.entry.num_rows, self.window
        chunk = Chunk(reply, *place, ends_epoch=self.ends_epoch, source=source)
        first, stop = self.bounds
        if self.marks is not None and (marks := self.marks[first:stop]).any():
            chunk.leave_out(marks)
        return chunk


def _num_elsewhere(reply: Tokenized) -> int:
    """The rows of a reply that other ranks tokenize, or have tokenized."""
    if not reply.expected:
        return reply.num_elsewhere

    return reply.num_elsewhere + int(np.count_nonzero(is_elsewhere(np.frombuffer(reply.expected, np.int32))))


def chunk_limit(capacity: int, num_workers: int) -> int:
    """The largest number of rows of a chunk such that the channel holds two chunks for every worker."""
    return max(1, min(MAX_CHUNK_ROWS, capacity // (2 * num_workers)))


class ChunkPacer:
    """Chooses the size of chunks by the time per row, which it learns from the workers' replies.

    :param capacity: samples that the channel holds; see :func:`chunk_limit`.
    :ivar num_rows: rows of the next chunk.
    :ivar total_rows: rows that workers have tokenized.
    :ivar total_work_s: seconds that they needed for them, as they report.
    """

    def __init__(self, capacity: int, num_workers: int) -> None:
        self._limit = chunk_limit(capacity, num_workers)
        self._row_s: float | None = None
        self.total_rows, self.total_work_s = 0, 0.0
        self.num_rows = min(_FIRST_ROWS, self._limit)

    def resize(self, capacity: int, num_workers: int) -> None:
        """Use a new capacity of the channel, or a new number of workers."""
        self._limit = chunk_limit(capacity, num_workers)
        self.num_rows = min(self.num_rows, self._limit)

    def learn(self, num_rows: int, busy_s: float, num_elsewhere: int = 0) -> None:
        """A worker needed ``busy_s`` seconds for ``num_rows`` rows, of which other ranks tokenize ``num_elsewhere``."""
        if num_rows < 1:
            return

        self.total_rows += num_rows - num_elsewhere
        self.total_work_s += busy_s
        row_s = busy_s / num_rows
        self._row_s = row_s if self._row_s is None else 0.8 * self._row_s + 0.2 * row_s
        wanted = int(_TARGET_S / self._row_s) if self._row_s > 0 else self._limit
        self.num_rows = max(1, min(self._limit, wanted, 2 * self.num_rows))


def _after(place: tuple[int, int], window: OpenWindow) -> tuple[int, int]:
    """Epoch and number of the window after ``window``, which is the one at ``place``."""
    return (place[0] + 1, 0) if window.is_last else (place[0], place[1] + 1)


_MAX_BLOCKS = 8


class Canaries:
    """The first rows of some blocks, and the digests of their tokens. A stream has no blocks, so it has no canaries.

    :param max_blocks: the blocks that a slot holds.
    :ivar digests: one per row; empty until they are known.
    """

    def __init__(self, source: Blocks, calls: Calls, stride: int, max_blocks: int) -> None:
        self.digests: list[str] = []
        self._source, self._calls, self._stride = source, calls, stride
        self._num_blocks = min(_MAX_BLOCKS, max_blocks, source.num_blocks)

    async def make(self) -> None:
        """Tokenize the rows, unless that is done. If it fails, it is tried again at the next start."""
        if self._num_blocks > 0 and not self.digests:
            with suppress(AsyncDataError):
                self.digests = await self._tokenized()

    async def compare(self, expected: list[str]) -> None:
        """Tokenize the rows, unless their digests are known to be ``expected``.

        :raises SnapshotMismatchError: if they are others.
        :raises AsyncDataError: if the rows cannot be tokenized.
        """
        if self._num_blocks == 0 or not expected or expected == self.digests:
            return

        self.digests = await self._tokenized()
        if self.digests != expected:
            raise _mismatch(expected, self.digests)

    async def _tokenized(self) -> list[str]:
        """The digests of the rows' tokens."""
        slot = await self._calls.slot()
        try:
            num_blocks = self._source.num_blocks
            blocks = self._source.blocks(sorted({i * num_blocks // self._num_blocks for i in range(self._num_blocks)}))
            window = BlockWindow(self._source, blocks, slot, self._stride, partial(np.arange, dtype=np.int64))
            (scan,) = window.scans()
            found = await self._calls.ask(scan, Scanned)
            window.add(0, found)
            counts = np.frombuffer(found.counts, np.int32)
            firsts = (np.cumsum(counts) - counts)[counts > 0]
            if len(firsts) == 0:
                return []

            return _digests(len(firsts), await self._calls.ask(window.request_of(firsts), Tokenized))
        finally:
            self._calls.release(slot)


def _mismatch(expected: list[str], digests: list[str]) -> SnapshotMismatchError:
    num_different = sum(a != b for a, b in zip(digests, expected, strict=False))
    return SnapshotMismatchError(
        "AD603 the tokenize function gives other tokens than when the snapshot was taken: "
        f"{num_different or 'some'} of {len(expected)} fixed rows differ. Install the versions of that time, or "
        'continue with allow_changed={"tokenize_fn"}.',
        {"canaries": (expected, digests)},
    )


def _digests(num_rows: int, reply: Tokenized) -> list[str]:
    """A digest of each row's tokens; a row that yields no sample has the digest of no tokens."""
    kept = np.frombuffer(reply.kept, np.int32).tolist() if reply.kept else range(num_rows)
    ends = np.frombuffer(reply.token_ends, np.uint32).tolist()
    tokens: list[Data] = [b""] * num_rows
    for row, start, end in zip(kept, [0, *ends], ends, strict=False):
        tokens[row] = reply.tokens[4 * start : 4 * end]
    return [hashlib.blake2b(data, digest_size=8).hexdigest() for data in tokens]
