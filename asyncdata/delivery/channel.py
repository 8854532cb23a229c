"""The channel: bounded, ordered read-ahead. A cache, not an owner: what it loses is made again from the ledger.

Work is entered in the order of D and filled in any order. The filled prefix is cut into *segments*, numbered from 0,
which a delivery walks. Nothing here waits or locks; the coordinator does both.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from asyncdata.core.errors import AsyncDataError  # noqa: TC001
from asyncdata.core.messages import RowError  # noqa: TC001
from asyncdata.delivery.chunk import Chunk  # noqa: TC001 - msgspec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Set

    from asyncdata.core.types import Position, SourceLocation

__all__ = ("Bad", "Channel", "ChunkEnd", "Done", "Entry", "Failure", "Run", "Segment")


class Run(msgspec.Struct, frozen=True, eq=False):
    """Samples ``[start, stop)`` of a chunk, none of them special."""

    chunk: Chunk
    start: int
    stop: int


class Done(msgspec.Struct, frozen=True, eq=False):
    """A sample that was acknowledged before a restart: it is counted, not delivered."""

    chunk: Chunk
    sample: int


class Bad(msgspec.Struct, frozen=True, eq=False):
    """A bad row, at its turn."""

    chunk: Chunk
    error: RowError


class ChunkEnd(msgspec.Struct, frozen=True, eq=False):
    """All rows of the chunk have had their turn."""

    chunk: Chunk


class Failure(msgspec.Struct, frozen=True, eq=False):
    """What stopped the stream here; nothing follows."""

    error: AsyncDataError


Segment = Run | Done | Bad | ChunkEnd | Failure


class Entry:
    """A place in the order for ``num_rows`` rows that are being tokenized.

    :ivar location: tells where the first of them lies, for a diagnosis.
    """

    __slots__ = ("content", "location", "num_rows")

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.location: Callable[[], SourceLocation] | None = None
        self.content: Chunk | Failure | None = None


class Channel:
    """Read-ahead from one position on; a restart makes a new one.

    :param capacity: samples that may be ready or in flight.
    :param max_bytes: bytes that may be ready.
    :param max_bad_rows: bad rows that may be passed over; one more ends the stream. None: as many as come.
    :param epoch_groups: samples that the present epoch had before this channel's first row.
    :param acked: positions that were acknowledged before a restart.
    :ivar demand: samples that a waiting request needs; they are made even beyond the capacity.
    :ivar num_produced: samples ever made ready.
    :ivar is_stopped: whether a segment is there that nothing can follow.
    :ivar ended_epoch: the last epoch whose end is among the segments; -1 for none.
    """

    def __init__(
        self,
        *,
        capacity: int,
        max_bytes: int,
        max_bad_rows: int | None = None,
        epoch_groups: int = 0,
        acked: Set[Position] = frozenset(),
    ) -> None:
        self.capacity = capacity
        self.max_bytes = max_bytes
        self.demand = 0
        self.num_produced = 0
        self.is_stopped = False
        self.ended_epoch = -1
        self.num_rows_in_flight = 0
        self.num_ready_bytes = 0
        self._max_bad_rows = max_bad_rows
        self._num_bad_rows = 0
        self._acked = acked
        self._epoch_groups = epoch_groups
        self._entries: deque[Entry] = deque()
        self._segments: deque[Segment] = deque()
        self._num_segments = 0  # ever appended, which only the service's thread does: no interrupt falls between

    def room(self, taken: int) -> int:
        """Rows that may be entered now, when ``taken`` samples have been taken."""
        if self.is_stopped or (self.num_ready_bytes >= self.max_bytes and self.num_produced - taken > self.demand):
            return 0

        return max(0, -self.excess(taken))

    def excess(self, taken: int) -> int:
        """Samples that are ready or in flight beyond what there is place for; below 0, the rows that may be entered."""
        return self.num_rows_in_flight + self.num_produced - taken - max(self.capacity, self.demand)

    def enter(self, num_rows: int) -> Entry:
        """The next place in the order."""
        entry = Entry(num_rows)
        self._entries.append(entry)
        self.num_rows_in_flight += num_rows
        return entry

    def shorten(self, entry: Entry, num_rows: int) -> None:
        """``entry``, the last one entered, takes only ``num_rows`` rows."""
        self.num_rows_in_flight -= entry.num_rows - num_rows
        entry.num_rows = num_rows

    def split(self, entry: Entry, num_rows: int) -> Entry:
        """Cut an entry after ``num_rows`` rows; what is returned comes right behind it."""
        behind = Entry(entry.num_rows - num_rows)
        entry.num_rows = num_rows
        self._entries.insert(self._entries.index(entry) + 1, behind)
        return behind

    def fill(self, entry: Entry, content: Chunk | Failure) -> None:
        """The rows of ``entry`` are done; the filled prefix becomes segments."""
        entry.content = content
        while self._entries and self._entries[0].content is not None:
            first = self._entries.popleft()
            self.num_rows_in_flight -= first.num_rows
            self._append(first.content)

    def fail(self, error: AsyncDataError) -> None:
        """Everything already in the order is delivered first, then ``error``."""
        self.fill(self.enter(0), Failure(error))

    def _append(self, content: Chunk | Failure | None) -> None:
        if isinstance(content, Failure):
            self._segments.append(content)
            self._num_segments += 1
            self.is_stopped = True
        elif content is not None:
            for segment in _segments_of(content, self._acked):
                self._segments.append(segment)
                self._num_segments += 1
                self._account(segment)
            self.num_ready_bytes += content.num_bytes

    def _account(self, segment: Segment) -> None:
        if self.is_stopped:
            return

        if isinstance(segment, Run):
            self.num_produced += segment.stop - segment.start
            self._epoch_groups += segment.stop - segment.start
        elif isinstance(segment, Done):
            self._epoch_groups += 1
        elif isinstance(segment, Bad):
            self._num_bad_rows += 1
            self.is_stopped = self._max_bad_rows is not None and self._num_bad_rows > self._max_bad_rows
        elif isinstance(segment, ChunkEnd) and segment.chunk.ends_epoch:
            self.ended_epoch = segment.chunk.first.epoch
            self.is_stopped = self._epoch_groups == 0  # an epoch without a sample would be followed by more of them
            self._epoch_groups = 0

    @property
    def _first_segment(self) -> int:
        """Worked out, as an interrupt between forgetting a segment and counting it would lose the next one."""
        return self._num_segments - len(self._segments)

    def segments(self, head: int) -> Iterator[Segment]:
        """The ready segments from number ``head`` on; those before it are forgotten."""
        while self._first_segment < head:
            segment = self._segments.popleft()
            if isinstance(segment, ChunkEnd):
                self.num_ready_bytes -= segment.chunk.num_bytes
        return iter(self._segments)

    def segment(self, number: int) -> Segment | None:
        """The segment of that number, if it is ready and not forgotten."""
        index = number - self._first_segment
        return self._segments[index] if 0 <= index < len(self._segments) else None

    def remembers(self, head: int) -> bool:
        """Whether :meth:`segments` can still go back to number ``head``."""
        return self._first_segment <= head

    @property
    def oldest_in_flight(self) -> Entry | None:
        """The entry that holds up the order, if any."""
        return self._entries[0] if self._entries else None


def _segments_of(chunk: Chunk, acked: Set[Position]) -> Iterator[Segment]:
    """The chunk's samples and bad rows in their order, and its end."""
    marks: list[tuple[int, Segment]] = [(chunk.samples_before(error.row), Bad(chunk, error)) for error in chunk.errors]
    if acked:
        marks += [(i, Done(chunk, i)) for i in range(chunk.num_samples) if chunk.position(i) in acked]
        # A bad row comes before the sample that it precedes.
        marks.sort(key=lambda mark: (mark[0], isinstance(mark[1], Done)))
    start = 0
    for sample, segment in marks:
        if start < sample:
            yield Run(chunk, start, sample)
        yield segment
        start = sample + 1 if isinstance(segment, Done) else sample
    if start < chunk.num_samples:
        yield Run(chunk, start, chunk.num_samples)
    yield ChunkEnd(chunk)
