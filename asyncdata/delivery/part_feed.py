"""Where the producer of one part puts its chunks; to the producer, it is what the coordinator is for a single source.

All calls are made in the service's thread, so there is no lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from asyncdata.delivery.channel import Channel, Failure
from asyncdata.delivery.mixture import PartCursor
from asyncdata.delivery.outcomes.rows import NO_IDS
from asyncdata.delivery.part_queue import PartQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.delivery.channel import Entry
    from asyncdata.delivery.chunk import Chunk
    from asyncdata.delivery.merged_chunk import MergedChunk
    from asyncdata.delivery.outcomes.policy import Ids
    from asyncdata.delivery.part_decisions import PartDecisions
    from asyncdata.delivery.part_queue import BadRowRules
    from asyncdata.delivery.requests import DeliveryRules
    from asyncdata.order.mixture_tree import Leaf

__all__ = ("PartFeed",)


class _PartChannel(Channel):
    """The channel of a part. Its filled prefix goes to the queue, from which the schedule takes samples.

    :param bytes_left: returns how many bytes all parts together may still keep ready.
    """

    def __init__(
        self, queue: PartQueue, capacity: int, bytes_left: Callable[[], int], decisions: PartDecisions | None
    ) -> None:
        rules = queue.rules
        most = 0 if rules.is_raised else rules.max
        left = None if most is None else max(0, most - queue.cursor.num_bad_rows)
        super().__init__(capacity=capacity, max_bytes=0, max_bad_rows=left)
        self._queue = queue
        self._decisions = decisions
        self._bytes_left = bytes_left

    def room(self, taken: int) -> int:
        """Rows that may be entered now. A part without a ready sample has room whatever the others keep."""
        if self.is_stopped or (self._queue.num_ready and self._bytes_left() <= 0):
            return 0

        return max(0, -self.excess(taken))

    def excluded(self, epoch: int) -> Ids:
        """The ids of the rows that ``epoch`` excludes, as far as that is decided: they need not be tokenized."""
        return NO_IDS if self._decisions is None else self._decisions.excluded(epoch)

    def _append(self, content: Chunk | MergedChunk | Failure | None) -> None:
        if self.is_stopped or content is None:
            return

        if isinstance(content, Failure):
            self._queue.fail(content.error)
        else:
            self._queue.add(content)  # type: ignore[arg-type]
            self.num_produced += content.num_samples
            self._num_bad_rows += len(content.errors)
        too_many = self._max_bad_rows is not None and self._num_bad_rows > self._max_bad_rows
        self._queue.is_cut = too_many
        self.is_stopped = too_many or self._queue.error is not None


class PartFeed:
    """The channel and the queue of a part, from one position on; :meth:`restart` begins anew.

    :param on_fill: called when more of the part may be ready.
    :param decisions: decide which rows an epoch of the part has; None: all.
    """

    def __init__(
        self,
        leaf: Leaf,
        rules: DeliveryRules,
        bad_rows: BadRowRules,
        bytes_left: Callable[[], int],
        on_fill: Callable[[], object],
        decisions: PartDecisions | None = None,
    ) -> None:
        self.leaf = leaf
        self.rules = rules
        self._bad_rows = bad_rows
        self._bytes_left = bytes_left
        self._on_fill = on_fill
        self._decisions = decisions
        self.restart(None)

    def restart(self, cursor: PartCursor | None) -> None:
        """Begin anew, after what was delivered up to ``cursor``; None: at the start."""
        self.queue = PartQueue(self.leaf, self._bad_rows, cursor or PartCursor(), self._decisions)
        self.channel = _PartChannel(self.queue, self.rules.capacity, self._bytes_left, self._decisions)

    def set_capacity(self, capacity: int) -> None:
        """Read so many samples ahead from now on."""
        self.rules = msgspec.structs.replace(self.rules, capacity=capacity)
        self.channel.capacity = capacity

    @property
    def fullness(self) -> float:
        """Samples that are ready or in flight, per capacity."""
        return (self.queue.num_ready + self.channel.num_rows_in_flight) / self.rules.capacity

    def reserve(self, channel: Channel, max_rows: int, min_rows: int) -> Entry | None:
        """A place for at most ``max_rows`` rows; None if there is no room for ``min_rows``."""
        if channel is not self.channel or channel.is_stopped:  # a window without a row takes no room
            return None

        room = channel.room(self.queue.num_taken)
        is_starving = not self.queue.num_ready and not channel.num_rows_in_flight
        if room < min_rows and not (room and is_starving):
            return None

        return channel.enter(min(max_rows, room))

    def shorten(self, channel: Channel, entry: Entry, num_rows: int) -> None:
        """``entry``, the last one reserved, takes only ``num_rows`` rows."""
        channel.shorten(entry, num_rows)

    def split(self, channel: Channel, entry: Entry, num_rows: int) -> Entry:
        """Cut ``entry`` after ``num_rows`` rows; the rest is returned."""
        return channel.split(entry, num_rows)

    def fill(self, channel: Channel, entry: Entry, content: Chunk | Failure) -> None:
        """Set the content of ``entry``."""
        channel.fill(entry, content)
        if channel is self.channel:
            self._on_fill()

    def fail(self, channel: Channel, failure: Failure) -> None:
        """End the part with an error, after everything that is entered."""
        channel.fail(failure.error)
        if channel is self.channel:
            self._on_fill()
