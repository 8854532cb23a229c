"""Reads all parts of a mixture ahead, and merges them: a producer for each part -> its feed -> merger -> channel.

To the service, the tuner and the coordinator it is what a :class:`~asyncdata.prefetch.producer.Producer` is. It runs in
the service's thread, is driven by the same events, and never waits.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from asyncdata.core.errors import AsyncDataError
from asyncdata.delivery.channel import Failure
from asyncdata.delivery.ledger import Ledger
from asyncdata.delivery.merged_chunk import journal_of
from asyncdata.delivery.merger import Merger
from asyncdata.delivery.mixture import MixtureState, PartCursor
from asyncdata.order.mixture_tree import shares_of
from asyncdata.prefetch.producer import Producer

if TYPE_CHECKING:
    from asyncdata.delivery.channel import Channel, Entry
    from asyncdata.delivery.coordinator import Coordinator
    from asyncdata.delivery.part_feed import PartFeed
    from asyncdata.order.mixture_tree import Node
    from asyncdata.prefetch.canaries import Canaries
    from asyncdata.prefetch.windows.base import Windows
    from asyncdata.workers.base import Executor
    from asyncdata.workers.part_executor import PartExecutor

__all__ = ("MixtureProducer", "PartSupply")

_MIN_CAPACITY = 2048
"""Samples that each part may read ahead at least, if the loader reads so many ahead. Fewer make small chunks, and
merging costs by the chunk: in five parts of trivial rows, the CPU time of this process was 5.5 us a row with 512, 3.8
with 1024, and 2.3 with 2048, on a busy machine; one source had 1.5."""
_MAX_MERGED = 2048
_START_SAMPLES = 32
"""Until so many samples are merged, each part reads one window: the next ones would delay the first batch."""
_LEAST_ROWS = 1
"""The first chunk of a part that has next to no weight. Chunks double until they are large enough."""
_AHEAD = 4
"""Times the capacity: a part that has no weight yet is read when its stage is so near."""
_NAME_END = "\n"


class PartSupply(NamedTuple):
    """What one part is read with."""

    feed: PartFeed
    windows: Windows
    canaries: Canaries
    executor: PartExecutor
    num_files: int


class _Part:
    """A part, its producer, and for how long calls have waited for it."""

    def __init__(self, supply: PartSupply) -> None:
        self.name = supply.feed.leaf.name
        self.feed = supply.feed
        self.executor = supply.executor
        self.canaries = supply.canaries
        self.producer = Producer(
            supply.windows,
            supply.canaries,
            supply.executor,
            supply.feed,
            epochs=None,
            num_files=supply.num_files,
            source=self.name,
        )
        self.expected: list[str] = []
        self.wait_s = 0.0


class _Work:
    """Rows and time of tokenizing in all parts."""

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts

    @property
    def total_rows(self) -> int:
        return sum(part.producer.pacer.total_rows for part in self._parts)

    @property
    def total_work_s(self) -> float:
        return sum(part.producer.pacer.total_work_s for part in self._parts)


class _AllCanaries:
    """The canaries of all parts; each digest is preceded by the name of its part."""

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts

    @property
    def digests(self) -> list[str]:
        return [
            f"{part.name}{_NAME_END}{digest}"
            for part in self._parts
            for digest in part.canaries.digests or part.expected
        ]


class MixtureProducer:
    """See :class:`~asyncdata.prefetch.producer.Producer`.

    :param supplies: of the parts, by the number of their leaf.
    :param epochs: the number of epochs of the mixture; None: no end.
    """

    def __init__(
        self,
        node: Node,
        seed: int,
        supplies: list[PartSupply],
        executor: Executor,
        coordinator: Coordinator,
        *,
        epochs: int | None,
    ) -> None:
        self._schedule = node, seed
        self._parts = [_Part(supply) for supply in supplies]
        self._executor = executor
        self._coordinator = coordinator
        self._epochs = epochs
        self._channel: Channel = coordinator.channel
        self._merger: Merger | None = None
        self._entry: Entry | None = None
        self._is_finished = self._is_starting = True
        self._num_merged = 0
        self._is_pumping = self._is_pump_due = False
        self._blocked: tuple[int, float] | None = None
        self.lacks_room = False
        self.pacer = _Work(self._parts)
        self.canaries = _AllCanaries(self._parts)
        executor.watch(self.pump)
        self._share_capacity()
        for part, share in zip(self._parts, shares_of(node), strict=True):
            rows = part.producer.pacer.num_rows  # a first batch has few samples of each part
            part.producer.pacer.num_rows = max(1, min(rows, _LEAST_ROWS + int(share * rows)))

    def start(self, ledger: Ledger, expected_canaries: list[str] | None = None) -> None:
        """Read ahead from the ledger's position; drop everything that is in flight."""
        self._is_finished = True  # what follows would pump
        self._executor.forget()
        state = ledger.counters.mixture.state() if ledger.counters.mixture is not None else MixtureState()
        self._channel, self._entry, self._blocked = self._coordinator.channel, None, None
        cursors = [state.parts.get(part.name, PartCursor()) for part in self._parts]
        for part, cursor in zip(self._parts, cursors, strict=True):
            part.feed.restart(cursor)
        self._merger = Merger(
            *self._schedule,
            [part.feed.queue for part in self._parts],
            state.schedule,
            ledger.position,
            earlier=state.earlier,
            with_token_sums=self._coordinator.rules.digest == "tokens",
        )
        self._num_merged, self._is_starting = 0, True
        for part in self._parts:
            part.executor.set_limit(0)
        for part, cursor in zip(self._parts, cursors, strict=True):
            part.expected = _of_part(part.name, expected_canaries or [])
            part_ledger = Ledger(position=cursor.position, journal=journal_of(part.name, ledger.journal))
            part.producer.start(part_ledger, part.expected or None)
        self._is_finished = False
        self.pump()

    def pump(self) -> None:
        """Merge what is ready, and send all rows that can be sent now."""
        self._is_pump_due = True
        if self._is_pumping:
            return

        self._is_pumping = True
        try:
            while self._is_pump_due and not self._is_finished:
                self._is_pump_due = False
                self._merge()
                self._send()
        except AsyncDataError as error:
            self._fail(error)
        finally:
            self._is_pumping = False

    def _send(self) -> None:
        """Let the parts send chunks in turn, those that lack most first, as long as workers want more."""
        is_first = True
        while not self._is_finished:
            num_sent = 0
            for part in self._by_need():
                if not is_first and self._executor.num_wanted <= 0:
                    return

                part.executor.allowance = 1
                part.producer.pump()
                num_sent += part.executor.allowance < 1
                part.executor.allowance = 0
            is_first = False
            if not num_sent:
                return

    def _by_need(self) -> list[_Part]:
        """The parts that are needed soon; the others read no window."""
        if self._merger is None:
            return []

        blocked, awaited = self._merger.blocked, self._merger.awaited(_AHEAD * self._coordinator.rules.capacity)
        for number in awaited:
            self._parts[number].executor.set_limit(1 if self._is_starting else None)
        numbers = sorted(awaited, key=lambda number: (number != blocked, self._parts[number].feed.fullness))
        return [self._parts[number] for number in numbers]

    def _merge(self) -> None:
        """Move samples from the parts to the channel, as long as the next one is ready and there is room."""
        merger = self._merger
        while merger is not None and not self._is_finished:
            if self._epochs is not None and merger.position.epoch >= self._epochs:
                self._is_finished = True
                return

            if merger.is_undecided and not self._coordinator.when_awaited(self._channel, merger.decide):
                return

            if merger.is_stuck:
                self._wait_for(merger.blocked)
                return

            if self._entry is None:
                self._entry = self._reserve()
            self.lacks_room = self._entry is None
            if self._entry is None:
                return

            chunk = merger.merge(self._entry.num_rows)
            if chunk is None and merger.is_undecided:
                continue

            if chunk is None:
                self._wait_for(merger.blocked)
                return

            self._unblock()
            entry, self._entry = self._entry, None
            self._num_merged += chunk.num_samples
            self._coordinator.fill(self._channel, entry, chunk)
            if self._is_starting and self._num_merged >= _START_SAMPLES:
                self._end_start()

    def _end_start(self) -> None:
        """The first batch is there: let the parts read on, and tokenize their canaries, which had no slot yet."""
        self._is_starting = False
        for part in self._by_need():
            part.canaries.make()

    def _reserve(self) -> Entry | None:
        least = max(1, min(_MAX_MERGED, self._coordinator.rules.capacity // 8))
        return self._coordinator.reserve(self._channel, _MAX_MERGED, least)

    @property
    def oldest_in_flight(self) -> Entry | None:
        """The oldest entry in flight of the part whose sample is missing."""
        blocked = self._merger.blocked if self._merger is not None else -1
        return self._parts[blocked].feed.channel.oldest_in_flight if blocked >= 0 else None

    def _wait_for(self, number: int) -> None:
        """The next sample is one of part ``number``, and is not ready."""
        error = self._parts[number].feed.queue.error
        if error is not None:
            self._fail(error)
        elif self._blocked is None or self._blocked[0] != number:
            self._unblock()
            self._blocked = number, time.monotonic()

    def _unblock(self) -> None:
        if self._blocked is not None:
            self._parts[self._blocked[0]].wait_s += self._blocked_s(self._blocked[1])
            self._blocked = None

    def _blocked_s(self, since: float) -> float:
        """For how long calls have waited by now, of the time since ``since``."""
        channel = self._channel
        return max(0.0, time.monotonic() - max(since, channel.demanded_at)) if channel.demand > 0 else 0.0

    def _fail(self, error: AsyncDataError) -> None:
        """End the read-ahead with an error."""
        self._is_finished = True
        entry, self._entry = self._entry, None
        if entry is None:
            self._coordinator.fail(self._channel, Failure(error))
        else:
            self._coordinator.fill(self._channel, entry, Failure(error))

    def resize(self) -> None:
        """The number of workers, or the capacity of the channel, has changed."""
        self._share_capacity()
        self.pump()

    def _share_capacity(self) -> None:
        total = self._coordinator.rules.capacity
        for part, share in zip(self._parts, shares_of(self._schedule[0]), strict=True):
            part.feed.set_capacity(max(min(_MIN_CAPACITY, total), int(share * total)))
            part.producer.pacer.resize(part.feed.rules.capacity, 1)

    @property
    def num_blank(self) -> int:
        """Blank lines passed over so far, in what was read ahead."""
        return sum(part.producer.num_blank for part in self._parts)

    @property
    def num_in_flight(self) -> int:
        """Rows of all parts that workers have, or that wait for earlier rows."""
        return sum(part.feed.channel.num_rows_in_flight for part in self._parts)

    @property
    def num_ready(self) -> int:
        """Samples that are ready, and that the schedule has not taken yet."""
        return sum(part.feed.queue.num_ready for part in self._parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of the parts' ready samples."""
        return sum(part.feed.queue.num_bytes for part in self._parts)

    def times_passed_over(self) -> dict[str, int]:
        """How often it was the turn of each part, and it had no row to replay."""
        return {part.name: part.feed.queue.num_passed_over for part in self._parts}

    def waits(self) -> dict[str, float]:
        """Seconds for which calls waited for a sample of each part, until now."""
        waits, blocked = {part.name: part.wait_s for part in self._parts}, self._blocked
        if blocked is not None:
            waits[self._parts[blocked[0]].name] += self._blocked_s(blocked[1])
        return waits


def _of_part(name: str, digests: list[str]) -> list[str]:
    return [text.removeprefix(f"{name}{_NAME_END}") for text in digests if text.startswith(f"{name}{_NAME_END}")]
