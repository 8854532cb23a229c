"""One delivery: from a ledger and the ready segments to samples and the ledger after them. Nothing is changed.

The coordinator commits a delivery by replacing its ledger, so that an exception, a timeout or Ctrl-C before that loses
nothing, and putting the old ledger back undoes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from asyncdata.core.errors import NoSamplesError
from asyncdata.core.types import Lot, Position
from asyncdata.delivery.channel import Bad, ChunkEnd, Done, Run
from asyncdata.delivery.ledger import Counters, Ledger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncdata.delivery.channel import Segment
    from asyncdata.delivery.chunk import Chunk

__all__ = ("BadRowStop", "Delivery", "advanced", "deliver", "dropped")

POISON_CODES = frozenset({"AD422", "AD423"})
"""Rows that hung or killed their worker. Whether they do so again is not certain, so a snapshot names them."""


class BadRowStop(Exception):  # noqa: N818 - flow between here and the coordinator, which makes an error of it
    """The row at this turn is bad, and may not be passed over: ``on_bad_row`` is "raise", or the budget is used up.

    :ivar passed: bad rows that were passed over on the way to it.
    """

    def __init__(self, bad: Bad, passed: list[Bad]) -> None:
        super().__init__()
        self.bad = bad
        self.passed = passed


class Delivery(NamedTuple):
    """Samples, and the ledger once they are delivered.

    :ivar lots: in order.
    :ivar num_groups: how many samples of the stream that is.
    :ivar passed: bad rows that were passed over on the way.
    :ivar is_last: whether the stream ended (or the epoch, where asked to stop there) before all was found.
    """

    lots: list[Lot]
    num_groups: int
    ledger: Ledger
    passed: list[Bad]
    is_last: bool = False


def deliver(
    segments: Iterable[Segment],
    ledger: Ledger,
    num_groups: int,
    *,
    samples_per_group: int = 1,
    last_epoch: int | None = None,
    bad_row_stops: bool = True,
    max_bad_rows: int | None = None,
) -> Delivery | None:
    """Take the next ``num_groups`` samples of the stream, each to become a group; None if they are not ready yet.

    :param segments: the ready ones, from ``ledger.head`` on.
    :param last_epoch: do not go beyond this epoch; fewer samples come if it ends.
    :raises BadRowStop: if a bad row comes before the last sample asked for, and ``bad_row_stops`` or there were
        ``max_bad_rows`` already.
    :raises NoSamplesError: if an epoch ends without a sample.
    :raises AsyncDataError: what stopped the stream.
    """
    if last_epoch is not None and ledger.position.epoch > last_epoch:
        return Delivery([], 0, ledger, [], is_last=num_groups > 0)

    walk = _Walk(ledger, num_groups, samples_per_group, bad_row_stops, max_bad_rows)
    for segment in segments:
        if walk.need == 0 and not walk.may_pass(segment):
            break

        walk.step(segment)
        if last_epoch is not None and walk.position.epoch > last_epoch:
            return walk.result(is_last=walk.need > 0)

    return None if walk.need else walk.result()


def advanced(ledger: Ledger, run: Run, num_groups: int, samples_per_group: int) -> Ledger:
    """The ledger after ``num_groups`` more samples of ``run``, the segment it points to; some of the run is left."""
    walk = _Walk(ledger, num_groups, samples_per_group, bad_row_stops=True, max_bad_rows=None)
    walk.step(run)
    return walk.result().ledger


class _Walk:
    """The changing values while segments are walked."""

    def __init__(
        self, ledger: Ledger, need: int, samples_per_group: int, bad_row_stops: bool, max_bad_rows: int | None
    ) -> None:
        counters = ledger.counters
        self.ledger = ledger
        self.need = need
        self.position = ledger.position
        self.head, self.offset, self.taken = ledger.head, ledger.offset, ledger.taken
        self.lots: list[Lot] = []
        self.passed: list[Bad] = []
        self._samples_per_group = samples_per_group
        self._bad_row_stops, self._max_bad_rows = bad_row_stops, max_bad_rows
        self._num_groups, self._epoch_groups = counters.num_groups, counters.epoch_groups
        self._num_tokens = counters.num_tokens
        self._digest = counters.digest
        self._drops, self._epoch_drops, self._notes = counters.drops, counters.epoch_drops, counters.notes

    def may_pass(self, segment: Segment) -> bool:
        """Whether a segment behind the last sample asked for goes with it, so that an epoch's end is the next's
        start.
        """
        if self.offset:  # the run before it is not at its end
            return False

        if isinstance(segment, ChunkEnd):
            return not (segment.chunk.ends_epoch and self._epoch_groups == 0)

        return isinstance(segment, Done)

    def step(self, segment: Segment) -> None:
        """Walk one segment, or as much of it as is needed."""
        if isinstance(segment, Run):
            self._run(segment)
        elif isinstance(segment, ChunkEnd):
            self._chunk_end(segment.chunk)
        elif isinstance(segment, Done):
            self._move_to(segment.chunk, segment.chunk.row_of(segment.sample) + 1)
            self._num_tokens += segment.chunk.num_tokens(segment.sample, segment.sample + 1)
            self._digest = self._digest.plus(segment.chunk.sums, segment.sample, segment.sample + 1)
            self._num_groups += 1
            self._epoch_groups += 1
            self.head += 1
        elif isinstance(segment, Bad):
            self._bad(segment)
        else:
            raise segment.error

    def _run(self, run: Run) -> None:
        start = run.start + self.offset
        stop = min(run.stop, start + self.need)
        index, size = self._next_index(), self._samples_per_group
        self.lots.append(Lot(run.chunk, start, stop, index, self._num_groups, size))
        self._move_to(run.chunk, run.chunk.row_of(stop - 1) + 1)
        self._num_tokens += run.chunk.num_tokens(start, stop)
        self._digest = self._digest.plus(run.chunk.sums, start, stop)
        num_taken = stop - start
        self.need -= num_taken
        self.taken += num_taken
        self._num_groups += num_taken
        self._epoch_groups += num_taken
        self.offset += num_taken
        if stop == run.stop:
            self.head += 1
            self.offset = 0

    def _chunk_end(self, chunk: Chunk) -> None:
        self._move_to(chunk, chunk.num_rows)
        if chunk.ends_epoch:
            if self._epoch_groups == 0:
                raise NoSamplesError(_no_samples(chunk.first.epoch, self._epoch_drops))

            self.position = Position(chunk.first.epoch + 1)
            self._epoch_groups, self._epoch_drops = 0, {}
        self.head += 1

    def _bad(self, bad: Bad) -> None:
        num_bad = self.ledger.counters.num_bad_rows + len(self.passed)
        if self._bad_row_stops or (self._max_bad_rows is not None and num_bad >= self._max_bad_rows):
            raise BadRowStop(bad, self.passed)

        self.passed.append(bad)
        self._move_to(bad.chunk, bad.error.row + 1)
        self._count(f"bad row {bad.error.code}", 1)
        self.head += 1

    def _move_to(self, chunk: Chunk, row: int) -> None:
        """Every row of the chunk before ``row`` has had its turn."""
        first, here = chunk.first, self.position
        done = here.row - first.row if (here.epoch, here.window) == (first.epoch, first.window) else 0
        for drop in chunk.drops:
            self._count(drop.reason, _num_between(drop.rows, done, row))
        for note in chunk.notes:
            if number := _num_between(note.rows, done, row):
                self._notes = {**self._notes, note.name: self._notes.get(note.name, 0) + number}
        self.position = Position(first.epoch, first.window, first.row + row)

    def _count(self, reason: str, number: int) -> None:
        if number:
            self._drops = {**self._drops, reason: self._drops.get(reason, 0) + number}
            self._epoch_drops = {**self._epoch_drops, reason: self._epoch_drops.get(reason, 0) + number}

    def _next_index(self) -> int:
        """The number of the next sample of the stream."""
        before = self.ledger.counters
        return before.num_samples + (self._num_groups - before.num_groups) * self._samples_per_group

    def result(self, *, is_last: bool = False) -> Delivery:
        """The delivery of what was walked."""
        before = self.ledger
        counters = Counters(
            num_groups=self._num_groups,
            num_samples=self._next_index(),
            num_tokens=self._num_tokens,
            num_bad_rows=before.counters.num_bad_rows + len(self.passed),
            drops=self._drops,
            epoch_groups=self._epoch_groups,
            epoch_drops=self._epoch_drops,
            notes=self._notes,
            digest=self._digest,
        )
        after = Ledger(
            position=self.position,
            counters=counters,
            buffer=before.buffer,
            leases=before.leases,
            acked=before.acked,
            journal=before.journal.union(_poison(self.passed)) if self.passed else before.journal,
            head=self.head,
            offset=self.offset,
            taken=self.taken,
        )
        return Delivery(self.lots, self.taken - before.taken, after, self.passed, is_last)


def _num_between(rows: Any, start: int, stop: int) -> int:
    """How many of ``rows``, which rise, are in ``[start, stop)``."""
    return int(rows.searchsorted(stop)) - int(rows.searchsorted(start))


def _poison(passed: list[Bad]) -> list[tuple[int, int]]:
    return [bad.chunk.row_key(bad.error.row) for bad in passed if bad.error.code in POISON_CODES]


def _no_samples(epoch: int, drops: dict[str, int]) -> str:
    num_rows = sum(drops.values())
    reasons = ", ".join(f"{number} by {reason}" for reason, number in sorted(drops.items())) or "there was no row"
    return f"AD401 epoch {epoch}: {num_rows} rows read, 0 kept: {reasons}"


def dropped(delivery: Delivery) -> Delivery:
    """The delivery with its samples dropped: a short last batch under ``drop_last``."""
    counters, number = delivery.ledger.counters, delivery.num_groups
    if number:
        drops = {**counters.drops, "drop_last": counters.drops.get("drop_last", 0) + number}
        counters = msgspec.structs.replace(counters, drops=drops)
    ledger = msgspec.structs.replace(delivery.ledger, counters=counters)
    return delivery._replace(lots=[], num_groups=0, ledger=ledger)
