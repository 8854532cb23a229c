"""The channel: bounded, ordered read-ahead. It is only a cache: after a restart it is filled again from the ledger.

Entries are made in the order of D and filled in any order. The filled prefix is cut into *items*, numbered from 0,
and a delivery takes items in that order. Nothing here waits or locks; the coordinator does both.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

import msgspec

from asyncdata.delivery.chunk import NO_IDS, BadRow, Chunk, Ids
from asyncdata.delivery.items import AlreadyAcked, ChunkEnd, Failure, Item, Run, items_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Set

    from asyncdata.core.errors import AsyncDataError
    from asyncdata.core.types import Position, SourceLocation
    from asyncdata.delivery.ledger import DeliveryRules
    from asyncdata.delivery.media_queue import MediaQueue


class Exclusions(Protocol):
    """Decides, once an epoch, which of its rows are left out."""

    def is_decided(self, epoch: int) -> bool:
        """Whether it is decided which rows ``epoch`` excludes."""
        ...

    def decide(self, epoch: int) -> None:
        """Decide which rows ``epoch`` excludes, by what is known now."""
        ...

    def excluded(self, epoch: int) -> Ids:
        """The ids of the rows that ``epoch`` excludes, ascending; none before that is decided."""
        ...


class Media(Protocol):
    """The media of a loader's samples."""

    def queue(self, channel: Channel) -> MediaQueue:
        """What waits for its media in a channel."""
        ...


class Entry:
    """A place in the order for ``num_rows`` rows that are being tokenized.

    :ivar location: returns the location of a row by its number, from 0 on, for error messages.
    :ivar request_id: of the request that tokenizes them; 0: none does.
    """

    __slots__ = ("content", "location", "num_rows", "request_id")

    def __init__(self, num_rows: int) -> None:
        self.num_rows, self.request_id = num_rows, 0
        self.location: Callable[[int], SourceLocation] | None = None
        self.content: Chunk | Failure | None = None


class Channel:
    """Read-ahead from one position on; a restart makes a new channel.

    :param rules: its capacity, and what is done with bad rows; one that may not be passed over ends the stream.
    :param num_bad_rows: bad rows that were passed over before.
    :param epoch_groups: samples that the current epoch had before this channel's first row.
    :param acked: positions that were acknowledged before a restart.
    :param outcomes: decides which rows an epoch excludes; None: no rows.
    :ivar outcomes: as above.
    :ivar media: what waits for its media; None: samples have none.
    :ivar demand: samples that a waiting request needs; they are read even beyond the capacity.
    :ivar demanded_at: when that request came, on the clock of ``time.monotonic()``.
    :ivar num_produced: samples ever made ready.
    :ivar is_begun: whether the read-ahead has begun to fill it.
    :ivar is_stopped: whether the last item ends the stream.
    :ivar ended_epoch: the last epoch whose end is among the items; -1 for none.
    :ivar failure: the error after which no worker does anything.
    """

    def __init__(
        self,
        rules: DeliveryRules,
        *,
        num_bad_rows: int = 0,
        epoch_groups: int = 0,
        acked: Set[Position] = frozenset(),
        outcomes: Exclusions | None = None,
    ) -> None:
        self.capacity, self._max_bytes = rules.capacity, rules.max_ready_bytes
        self.demand = 0
        self.demanded_at = 0.0
        self.num_produced = 0
        self.is_begun = self.is_stopped = False
        self.ended_epoch = -1
        self.failure: AsyncDataError | None = None
        self.num_rows_in_flight = 0
        self.num_ready_bytes = 0
        self._bad_rows, self._num_bad_rows = rules.bad_rows, num_bad_rows
        self._acked = acked
        self.outcomes = outcomes
        self._epoch_groups = epoch_groups
        self._entries: deque[Entry] = deque()
        self._items: deque[Item] = deque()
        self._num_items = 0  # ever appended; only the service's thread appends, so that Ctrl-C cannot interrupt it
        self.media: MediaQueue | None = None

    def room(self, taken: int) -> int:
        """Rows that may be entered now, after ``taken`` samples were taken."""
        if self.is_stopped or (self.num_ready_bytes >= self._max_bytes and self.num_produced - taken > self.demand):
            return 0

        return max(0, -self.excess(taken))

    def excess(self, taken: int) -> int:
        """Samples ready or in flight above the capacity. A negative number is the room that is left."""
        num_ahead = self.num_rows_in_flight + self.num_waiting + self.num_produced - taken
        return num_ahead - max(self.capacity, self.demand)

    @property
    def num_waiting(self) -> int:
        """Samples that were read and wait for their media."""
        return 0 if self.media is None else self.media.num_waiting

    def enter(self, num_rows: int) -> Entry:
        """The next place in the order."""
        entry = Entry(num_rows)
        self._entries.append(entry)
        self.num_rows_in_flight += num_rows
        return entry

    def split(self, entry: Entry, num_rows: int) -> Entry:
        """Cut an entry after ``num_rows`` rows; the rest is returned, as the next entry in the order."""
        rest = Entry(entry.num_rows - num_rows)
        entry.num_rows = num_rows
        self._entries.insert(self._entries.index(entry) + 1, rest)
        return rest

    def fill(self, entry: Entry, content: Chunk | Failure) -> None:
        """Set the content of ``entry``; turn the filled prefix into items."""
        entry.content = content
        while self._entries and self._entries[0].content is not None:
            first = self._entries.popleft()
            self.num_rows_in_flight -= first.num_rows
            self._append(first.content)

    def fail(self, error: AsyncDataError, *, overtakes: bool = False) -> None:
        """Deliver ``error`` after everything that is already entered.

        :param overtakes: after what is ready instead: perhaps no one will fill the entries that are in flight.
        """
        if overtakes:
            self.failure = error
            self.emit(Failure(error))
        else:
            self.fill(self.enter(0), Failure(error))

    def _append(self, content: Chunk | Failure | None) -> None:
        add = self.emit if self.media is None else self.media.push
        if isinstance(content, Failure):
            add(content)
        elif content is not None:
            self.num_ready_bytes += content.num_bytes
            for item in items_of(content, content.bad_rows(self._bad_rows, self._num_bad_rows), self._acked):
                add(item)

    def emit(self, item: Item) -> None:
        """The next item is ready."""
        if self.media is not None and isinstance(item, BadRow) and not item.chunk.source:
            # Others may have become bad before it, since its chunk came.
            item = msgspec.structs.replace(item, stops=item.policy.stops_after(self._num_bad_rows))
        self._items.append(item)
        self._num_items += 1
        if self.is_stopped:
            return

        if isinstance(item, Failure):
            self.is_stopped = True
        elif isinstance(item, Run):
            self.num_produced += item.stop - item.start
            self._epoch_groups += item.stop - item.start
        elif isinstance(item, AlreadyAcked):
            self._epoch_groups += 1
        elif isinstance(item, BadRow):
            self._num_bad_rows += 1
            self.is_stopped = item.stops
        elif isinstance(item, ChunkEnd) and item.chunk.ends_epoch:
            self.ended_epoch = item.chunk.first.epoch
            self.is_stopped = self._epoch_groups == 0  # the epochs after an empty epoch would be empty, too
            self._epoch_groups = 0

    def excluded(self, epoch: int) -> Ids:
        """The ids of the rows that ``epoch`` excludes, ascending; none if that is not decided yet."""
        return NO_IDS if self.outcomes is None else self.outcomes.excluded(epoch)

    @property
    def _first_item(self) -> int:
        """Computed, not counted: an interrupt between removing an item and counting it would lose the next one."""
        return self._num_items - len(self._items)

    def items(self, head: int) -> Iterator[Item]:
        """The ready items from number ``head`` on; earlier ones are removed."""
        while self._first_item < head:
            item = self._items.popleft()
            if isinstance(item, ChunkEnd):
                self.num_ready_bytes -= item.chunk.num_bytes
            elif self.media is not None and isinstance(item, Run):
                self.media.forget(item)
        return iter(self._items)

    def item(self, number: int) -> Item | None:
        """The item of that number, if it is ready and not removed."""
        index = number - self._first_item
        return self._items[index] if 0 <= index < len(self._items) else None

    def run(self, number: int) -> Run | None:
        """The item of that number, if it is a run of which samples may be taken."""
        item = self.item(number)
        return item if isinstance(item, Run) else None

    def remembers(self, head: int) -> bool:
        """Whether :meth:`items` can still go back to number ``head``."""
        return self._first_item <= head

    @property
    def oldest_in_flight(self) -> Entry | None:
        """The oldest entry that is not filled, if any: later ones wait for it."""
        return self._entries[0] if self._entries else None
