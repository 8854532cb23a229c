"""Reads all parts of a mixture ahead, and merges them: a read-ahead for each part -> its queue -> merger -> channel.

To the service, the tuner and the coordinator it is what a :class:`~asyncdata.read_ahead.source.ReadAhead` is.

There may be a thousand parts, so an event asks only those that it concerns, which are *due*. There is one rule: a part
that waits for its turn is due after each event that may let it send more, and stays due until it had nothing to send.

- It begins to wait; it was answered, or a slot of it is free; samples of it were merged, so that it has room.
- It is the part whose sample is missing: it is asked at every event.
- Its samples are near in the schedule now.

A part that lacks a worker, or memory that all parts share, is asked when there is some.
"""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from msgspec.structs import replace

from asyncdata.core.errors import AsyncDataError
from asyncdata.delivery.items import Failure
from asyncdata.delivery.merger import Merger, PartQueue, ReadyAhead
from asyncdata.delivery.mixture import MixtureState, PartCursor
from asyncdata.order.mixture import Leaf, Node, shares_of
from asyncdata.read_ahead.calls import Calls
from asyncdata.read_ahead.source import ReadAhead, Supply
from asyncdata.workers.base import MAX_LOSSES
from asyncdata.workers.changes import Changes

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.messages import Request
    from asyncdata.core.types import Position
    from asyncdata.delivery.channel import Channel, Entry
    from asyncdata.delivery.chunk import Chunk
    from asyncdata.delivery.coordinator import Coordinator
    from asyncdata.delivery.ledger import Ledger
    from asyncdata.workers.pool import Pool
    from asyncdata.workers.worker import Call

T = TypeVar("T")
_MIN_CAPACITY = 2048
"""Samples that each part may read ahead at least, if the loader reads so many ahead. Fewer make small chunks, and
merging costs by the chunk: in five parts of trivial rows, the CPU time of this process was 5.5 us a row with 512, 3.8
with 1024, and 2.3 with 2048, on a busy machine; one source had 1.5."""
_MAX_MERGED = 2048
_START_SAMPLES = 32
"""Until so many samples are merged, only their parts are read, one window of each: more would delay the first batch."""
_LEAST_ROWS = 1
"""The first chunk of a part that has next to no weight. Chunks double until they are large enough."""
_AHEAD = 4
"""Times the capacity: a part that has no weight yet is read when its stage is so near."""
_NAME_END = "\n"


class PartCalls(Calls):
    """The calls of one part: all parts share the workers, and each has slots of its own.

    :param part: the number of the part, by which a worker knows its job.
    :ivar turns: of what waits for the part's turn.
    :ivar note: called when the part may send more; the mixture sets it.
    """

    def __init__(self, executor: Pool, part: int) -> None:
        super().__init__(executor)
        self.slots = executor.slots.of_part(part, executor.num_parts)
        self.slots.tell(self.changed)
        self.changes, self.turns = Changes(), Changes()
        self.note: Callable[[], object] = bool
        self._part = part

    @property
    def num_workers(self) -> int:
        """Its channel need not keep all workers busy alone."""
        return 1

    def set_limit(self, num_slots: int | None) -> None:
        """Let the part hold so many slots; None: all of its own. Without one, it reads no window."""
        self.slots.limit = len(self.slots.numbers) if num_slots is None else num_slots

    def changed(self) -> None:
        self.changes()
        self.note()

    def submit(self, request: Request, max_losses: int = MAX_LOSSES) -> Call:
        asked = super().submit(replace(request, part=self._part), max_losses)
        asked.then(lambda _: self.changed())  # called last: who asks is told before
        return asked

    async def turn(self, look: Callable[[], T | None]) -> T:
        """What ``look`` finds that is not None; it is called only when it is the part's turn."""
        return await self.turns.next(look, lambda _: self.note())

    def restart(self) -> None:
        """Nothing: the mixture does it once, before its parts start again."""


class Part:
    """A part. To its read-ahead it is what the coordinator is to that of a single source.

    :ivar channel: its ready chunks, from the last start on.
    :ivar lock: the coordinator's.
    :ivar expected: digests of its canaries, of a snapshot.
    :ivar wait_s: for how long calls have waited for it.
    :ivar rank: its place in the order in which parts were first needed after the last start.
    :ivar has_run: whether it was ever read; a part that was not is read when it is needed.
    """

    def __init__(self, mixture: MixtureReadAhead, leaf: Leaf, supply: Supply) -> None:
        self.leaf, self.name = leaf, leaf.name
        assert isinstance(supply.calls, PartCalls), "each part has its own"
        self.calls, self.canaries = supply.calls, supply.canaries
        whole = mixture.coordinator
        self.rules = replace(whole.rules, capacity=1, max_ready_bytes=0, bad_rows=supply.bad_rows)
        self.lock = whole.lock
        self.expected: list[str] = []
        self.wait_s = 0.0
        self.rank = 0
        self.has_run = False
        self._mixture, self._decisions = mixture, supply.decisions
        self._ledger: Ledger | None = None
        self._set_cursor(PartCursor())
        self.reading = ReadAhead(supply, self, epochs=None)

    def _set_cursor(self, cursor: PartCursor) -> None:
        self.channel = PartQueue(self.leaf, self.rules, cursor, self._mixture.ready, self._decisions)

    def restart(self, ledger: Ledger, cursor: PartCursor, expected: list[str]) -> None:
        """Begin anew after ``cursor``, at the next :meth:`begin`."""
        self.calls.set_limit(0)
        self.calls.repeat()
        self._set_cursor(cursor)
        self._ledger, self.expected = replace(ledger, position=cursor.position), expected

    def begin(self) -> None:
        """Read ahead, from now on."""
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            self.has_run = True
            self.reading.start(ledger, self.expected)

    def set_capacity(self, capacity: int) -> None:
        """Read so many samples ahead from now on."""
        self.rules = replace(self.rules, capacity=capacity)
        self.channel.capacity = capacity
        self.reading.pacer.resize(capacity, 1)

    @property
    def need(self) -> tuple[bool, float, int]:
        """How much it lacks samples, the smallest value first."""
        num_ready = self.channel.num_ready
        return num_ready > 0, (num_ready + self.channel.num_rows_in_flight) / self.rules.capacity, self.rank

    # What its read-ahead asks.

    def restart_position(self) -> Position:
        """The first position of this part that a restart would need now."""
        state: MixtureState = self._mixture.coordinator.ledger.needed().counters.mixture.state
        return state.parts.get(self.name, PartCursor()).position

    def is_awaited(self, channel: Channel) -> bool:
        """Whether a call waits for a sample of this part."""
        return self._mixture.is_awaited(self)

    def reserve(self, channel: Channel, max_rows: int, min_rows: int) -> Entry | None:
        """A place for at most ``max_rows`` rows; None if there is no room for ``min_rows``."""
        if channel.is_stopped:  # a window without a row takes no room
            return None

        queue = self.channel
        room = queue.room(queue.num_taken)
        is_starving = not queue.num_ready and not queue.num_rows_in_flight
        return queue.enter(min(max_rows, room)) if room >= min_rows or (room and is_starving) else None

    def fill(self, channel: Channel, entry: Entry, content: Chunk | Failure) -> None:
        """Set the content of ``entry``."""
        channel.fill(entry, content)
        self._mixture.changed()

    def fail(self, channel: Channel, failure: Failure) -> None:
        """End the part with an error, after everything that is entered."""
        channel.fail(failure.error)
        self._mixture.changed()


class MixtureReadAhead:
    """See :class:`~asyncdata.read_ahead.source.ReadAhead`.

    :param supplies: of the parts, by the number of their leaf.
    :param epochs: the number of epochs of the mixture; None: no end.
    :ivar changed: call it after a change of what it waits for.
    """

    def __init__(
        self,
        node: Node,
        seed: int,
        supplies: list[Supply],
        calls: Calls,
        coordinator: Coordinator,
        *,
        epochs: int | None,
    ) -> None:
        self._schedule = node, seed
        self._calls, self.coordinator, self._epochs = calls, coordinator, epochs
        self.changed = calls.changed
        self.ready = ReadyAhead(coordinator)
        self._parts = [Part(self, leaf, supply) for leaf, supply in zip(node.leaves(), supplies, strict=True)]
        self._channel: Channel = coordinator.channel
        self._merger: Merger | None = None
        self._entry: Entry | None = None
        self._is_finished = self._is_starting = True
        self._is_asking = False
        self._num_merged = self._looks_at = 0
        self._due: set[int] = set()
        self._wanted: set[int] = set()
        self._blocked: tuple[int, float] | None = None
        for number, part in enumerate(self._parts):
            part.calls.note = partial(self._note_and_ask, number)
        self._share_capacity()
        for part, share in zip(self._parts, shares_of(node), strict=True):
            rows = part.reading.pacer.num_rows  # a first batch has few samples of each part
            part.reading.pacer.num_rows = max(1, min(rows, _LEAST_ROWS + int(share * rows)))

    def start(self, ledger: Ledger, expected_canaries: list[str] | None = None) -> None:
        """Read ahead from the ledger's position; drop everything that is in flight."""
        self._is_finished = True  # what follows would send
        self._calls.restart()
        record = ledger.counters.mixture.record.cut(ledger.counters.mixture.row)
        self._channel, self._entry, self._blocked = self.coordinator.channel, None, None
        self.ready.num_samples = self.ready.num_bytes = 0
        expected = _by_part(expected_canaries or [])
        for part in self._parts:
            cursor = record.before.parts.get(part.name, PartCursor())
            part.restart(ledger, cursor, expected.get(part.name, []))
        self._merger = Merger(
            *self._schedule,
            [part.channel for part in self._parts],
            self.ready,
            record,
            ledger.position,
            with_token_sums=self.coordinator.rules.digest == "tokens",
        )
        self._num_merged, self._is_starting = 0, True
        num_known = self.coordinator.rules.capacity if self._schedule[0].is_by_rows else _START_SAMPLES
        ranks = {number: rank for rank, number in enumerate(self._merger.next_parts(num_known))}
        for number, part in enumerate(self._parts):
            part.rank = ranks.get(number, len(self._parts))
            if part.has_run:
                part.begin()
        self._due, self._wanted = set(), set()
        self._is_finished = False
        self._want()
        self.changed()

    async def run(self) -> None:
        """Merge what is ready, from each start on, until cancelled."""
        async with anyio.create_task_group() as group:
            for part in self._parts:
                group.start_soon(part.reading.run)
            group.start_soon(self._calls.changes.until, self._ask_due)
            while True:
                try:
                    await self._calls.changes.until(self._merge)
                except AsyncDataError as error:
                    self._fail(error)

    def _note_and_ask(self, number: int) -> None:
        self._note(number)
        self._ask_due()

    def _note(self, number: int) -> None:
        """A part is due, if it waits for its turn."""
        if self._parts[number].calls.turns.num_waiting:
            self._due.add(number)

    def _ask_due(self) -> None:
        """Let the parts that are due send in turn, those that lack most first, as long as workers want more."""
        if self._is_asking or self._is_finished or self._merger is None:
            return

        self._is_asking = True
        if (blocked := self._merger.blocked) >= 0:
            self._parts[blocked].calls.changes()
            if self._calls.executor.num_wanted > 0:
                self._ask(blocked)
        while self._calls.executor.num_wanted > 0 and (number := self._next_due()) >= 0:
            self._ask(number)
        self._is_asking = False

    def _ask(self, number: int) -> None:
        """Let a part send. It stays due if it has, or if it lacks memory, which all parts share."""
        part = self._parts[number]
        if part.calls.turns.offer() or (part.channel.num_ready > 0 and self.ready.bytes_left <= 0):
            self._note(number)

    def _next_due(self) -> int:
        """The part to ask next: that which lacks most; -1 if there is none."""
        due = {number: self._parts[number].need for number in self._due & self._wanted}
        number = min(due, key=due.__getitem__, default=-1)
        if number < 0 or (due[number][0] and self.ready.bytes_left <= 0):
            return -1

        self._due.remove(number)
        return number

    def _want(self) -> None:
        """Find the parts that are needed soon, and let them read; the others read no window."""
        assert self._merger is not None
        capacity = self.coordinator.rules.capacity
        if self._is_starting:
            wanted = self._merger.next_parts(_START_SAMPLES)
        else:
            wanted = sorted(self._merger.awaited(_AHEAD * capacity))
        before, self._wanted = self._wanted, set(wanted)
        for number in wanted:
            if number not in before:
                self._let_read(number)
        self._looks_at = self._num_merged + capacity

    def _let_read(self, number: int) -> None:
        self._wanted.add(number)
        self._parts[number].calls.set_limit(1 if self._is_starting else None)
        self._parts[number].begin()
        self._parts[number].calls.changed()

    def _merge(self) -> None:
        """Move samples from the parts to the channel, as long as the next one is ready and there is room."""
        while self._merger is not None and not self._is_finished and self._merge_next(self._merger):
            pass

    def _merge_next(self, merger: Merger) -> bool:
        """The same once; return whether there was one."""
        if self._epochs is not None and merger.position.epoch >= self._epochs:
            self._is_finished = True
            for part in self._parts:
                part.reading.stop()
            return False

        if merger.is_blocked:
            self._wait_for(merger.blocked)
            return False

        self._entry = self._entry or self._reserve()
        if self._entry is None:
            return False

        chunk = merger.merge(self._entry.num_rows)
        if chunk is None:
            self._wait_for(merger.blocked)
            return False

        self._unblock()
        entry, self._entry = self._entry, None
        self._num_merged += chunk.num_samples
        self.coordinator.fill(self._channel, entry, chunk)
        for number in merger.taken:
            self._parts[number].calls.changed()
        if self._is_starting and self._num_merged >= _START_SAMPLES:
            self._is_starting, self._wanted = False, set()  # the first batch is there: let the parts read on
            self._want()
        elif chunk.num_samples == 0 or self._num_merged >= self._looks_at:
            self._want()
        self._calls.changes()  # there may be media to load
        return True

    def _reserve(self) -> Entry | None:
        least = max(1, min(_MAX_MERGED, self.coordinator.rules.capacity // 8))
        return self.coordinator.reserve(self._channel, _MAX_MERGED, least)

    @property
    def oldest_in_flight(self) -> Entry | None:
        """The oldest entry in flight of the part whose sample is missing."""
        blocked = self._merger.blocked if self._merger is not None else -1
        return self._parts[blocked].channel.oldest_in_flight if blocked >= 0 else None

    def _wait_for(self, number: int) -> None:
        """The next sample is one of part ``number``, and is not ready."""
        error = self._parts[number].channel.error
        if number not in self._wanted:
            self._let_read(number)
        if error is not None:
            self._fail(error)
        elif self._blocked is None or self._blocked[0] != number:
            self._unblock()
            self._blocked = number, time.monotonic()
            self._parts[number].calls.changed()  # it may begin an epoch now that a call waits for it

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
            self.coordinator.fail(self._channel, Failure(error))
        else:
            self.coordinator.fill(self._channel, entry, Failure(error))

    def resize(self) -> None:
        """The number of workers has changed."""
        self._share_capacity()
        for number in self._wanted:
            self._parts[number].calls.changed()
        self.changed()

    def _share_capacity(self) -> None:
        total = self.coordinator.rules.capacity
        for part, share in zip(self._parts, shares_of(self._schedule[0]), strict=True):
            part.set_capacity(max(min(_MIN_CAPACITY, total), int(share * total)))

    def is_awaited(self, part: Part) -> bool:
        """Whether a call waits for a sample of a part."""
        is_blocked = self._merger is not None and self._merger.blocked == part.leaf.number  # since the last merge
        is_next = is_blocked and not part.channel.num_ready
        return is_next and self.coordinator.is_awaited(self._channel)

    @property
    def digests(self) -> list[str]:
        """Those of the canaries of all parts; each is preceded by the name of its part."""
        return [
            f"{part.name}{_NAME_END}{digest}"
            for part in self._parts
            for digest in part.canaries.digests or part.expected
        ]

    def numbers(self) -> dict[str, Any]:
        """Numbers for :class:`~asyncdata.Statistics`: of all parts together."""
        total: Counter[str] = Counter()
        for part in self._parts:
            total.update(part.reading.numbers(), in_flight_rows=part.channel.num_rows_in_flight)
        return dict(total)

    @property
    def unread_keys(self) -> dict[str, int]:
        """Those of each part, after its name."""
        parts = [(part.name, part.reading.unread_keys) for part in self._parts]
        return {f"{name} {key}": number for name, counts in parts for key, number in counts.items()}

    def waits(self) -> dict[str, float]:
        """Seconds for which calls waited for a sample of each part, until now."""
        waits, blocked = {part.name: part.wait_s for part in self._parts}, self._blocked
        if blocked is not None:
            waits[self._parts[blocked[0]].name] += self._blocked_s(blocked[1])
        return waits


def _by_part(digests: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for text in digests:
        name, _, digest = text.partition(_NAME_END)
        found.setdefault(name, []).append(digest)
    return found
