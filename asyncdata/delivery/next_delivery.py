"""One delivery: from a ledger and the channel's ready items to samples and the next ledger. It changes no state.

The coordinator commits a delivery by replacing its ledger. So an exception, a timeout or Ctrl-C before the commit loses
nothing, and putting the old ledger back undoes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from asyncdata.core.errors import NoSamplesError, by_reason
from asyncdata.core.row_codes import EXCLUDED_REASON
from asyncdata.core.types import Position, SampleRange
from asyncdata.delivery.channel import AlreadyAcked, BadRowItem, ChunkEnd, Run
from asyncdata.delivery.ledger import Counters, Ledger
from asyncdata.delivery.mixture import MixturePoint

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from asyncdata.delivery.channel import Item
    from asyncdata.delivery.chunk import Chunk
    from asyncdata.delivery.merged_chunk import MergedChunk

__all__ = ("BadRowStop", "Delivery", "EpochEntered", "advanced", "deliver", "dropped")

POISON_CODES = frozenset({"AD422", "AD423"})
"""Codes of rows that hung or killed their worker. They may not do so again, so a snapshot names them in its journal."""


class BadRowStop(Exception):  # noqa: N818 - control flow; the coordinator turns it into an error for the user
    """The next row is bad and may not be passed over: the policy is "raise", or the limit is reached.

    :ivar passed: bad rows that this delivery passed over before it.
    """

    def __init__(self, bad: BadRowItem, passed: list[BadRowItem]) -> None:
        super().__init__()
        self.bad = bad
        self.passed = passed


class EpochEntered(Exception):  # noqa: N818 - control flow, as above
    """The next sample is of an epoch of which it is not decided yet which rows it excludes."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch = epoch


class Delivery(NamedTuple):
    """Samples, and the ledger after their delivery.

    :ivar ranges: the samples, in order.
    :ivar num_groups: the number of samples of the stream in ``ranges``; each becomes a group.
    :ivar passed: bad rows that were passed over.
    :ivar is_last: whether the stream ended (or the epoch ``last_epoch``) before enough samples were found.
    """

    ranges: list[SampleRange]
    num_groups: int
    ledger: Ledger
    passed: list[BadRowItem]
    is_last: bool = False


def deliver(
    items: Iterable[Item],
    ledger: Ledger,
    num_groups: int,
    *,
    samples_per_group: int = 1,
    last_epoch: int | None = None,
    bad_row_stops: bool = True,
    max_bad_rows: int | None = None,
    decided: Container[int] | None = None,
) -> Delivery | None:
    """Take the next ``num_groups`` samples of the stream; each becomes a group. None if they are not ready yet.

    :param items: the channel's ready items, from ``ledger.head`` on.
    :param last_epoch: do not go beyond this epoch; there are fewer samples if it ends.
    :param decided: epochs of which a sample may be taken; None: all.
    :raises EpochEntered: if the next sample is of another epoch.
    :raises BadRowStop: if a bad row comes before the last requested sample, and ``bad_row_stops`` is set or
        ``max_bad_rows`` were passed over already.
    :raises NoSamplesError: if an epoch ends without a sample.
    :raises AsyncDataError: the error that ended the stream.
    """
    if last_epoch is not None and ledger.position.epoch > last_epoch:
        return Delivery([], 0, ledger, [], is_last=num_groups > 0)

    walk = _Walk(ledger, num_groups, samples_per_group, bad_row_stops, max_bad_rows)
    for item in items:
        if walk.need == 0 and not walk.may_pass(item):
            break

        if decided is not None and isinstance(item, Run) and item.chunk.first.epoch not in decided:
            raise EpochEntered(item.chunk.first.epoch)

        walk.step(item)
        if last_epoch is not None and walk.position.epoch > last_epoch:
            return walk.result(is_last=walk.need > 0)

    return None if walk.need else walk.result()


def advanced(ledger: Ledger, run: Run, num_groups: int, samples_per_group: int) -> Ledger:
    """The ledger after ``num_groups`` more samples of ``run``, the item that it points to, without the run's end."""
    walk = _Walk(ledger, num_groups, samples_per_group, bad_row_stops=True, max_bad_rows=None)
    walk.step(run)
    return walk.result().ledger


class _Walk:
    """The changing values while items are walked."""

    def __init__(
        self, ledger: Ledger, need: int, samples_per_group: int, bad_row_stops: bool, max_bad_rows: int | None
    ) -> None:
        counters = ledger.counters
        self.ledger = ledger
        self.need = need
        self.position = ledger.position
        self.head, self.offset, self.taken = ledger.head, ledger.offset, ledger.taken
        self.ranges: list[SampleRange] = []
        self.passed: list[BadRowItem] = []
        self._samples_per_group = samples_per_group
        self._bad_row_stops, self._max_bad_rows = bad_row_stops, max_bad_rows
        self._num_groups, self._epoch_groups = counters.num_groups, counters.epoch_groups
        self._num_tokens = counters.num_tokens
        self._digest = counters.digest
        self._drops, self._epoch_drops, self._notes = counters.drops, counters.epoch_drops, counters.notes
        self._mixture = counters.mixture

    def may_pass(self, item: Item) -> bool:
        """Whether to take this item although enough samples are found.

        A chunk's end is taken with its last sample, so that the position at an epoch's end is the start of the next.
        """
        if self.offset:  # a part of the previous run is left
            return False

        if isinstance(item, ChunkEnd):
            return not (item.chunk.ends_epoch and self._epoch_groups == 0)

        return isinstance(item, AlreadyAcked)

    def step(self, item: Item) -> None:
        """Walk one item, or as much of it as is needed."""
        if isinstance(item, Run):
            self._run(item)
        elif isinstance(item, ChunkEnd):
            self._chunk_end(item.chunk)
        elif isinstance(item, AlreadyAcked):
            self._move_to(item.chunk, item.chunk.row_of(item.sample) + 1)
            self._num_tokens += item.chunk.num_tokens(item.sample, item.sample + 1)
            self._digest = self._digest.plus(item.chunk.sums, item.sample, item.sample + 1)
            self._num_groups += 1
            self._epoch_groups += 1
            self.head += 1
        elif isinstance(item, BadRowItem):
            self._bad(item)
        else:
            raise item.error

    def _run(self, run: Run) -> None:
        start = run.start + self.offset
        stop = min(run.stop, start + self.need)
        index, size = self._next_index(), self._samples_per_group
        self.ranges.append(SampleRange(run.chunk, start, stop, index, self._num_groups, size))
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

    def _chunk_end(self, chunk: Chunk | MergedChunk) -> None:
        self._move_to(chunk, chunk.num_rows)
        if chunk.ends_epoch:
            if self._epoch_groups == 0:
                raise NoSamplesError(_no_samples(chunk.first.epoch, self._epoch_drops))

            self.position = Position(chunk.first.epoch + 1)
            self._epoch_groups, self._epoch_drops = 0, {}
        self.head += 1

    def _bad(self, bad: BadRowItem) -> None:
        num_bad = self.ledger.counters.num_bad_rows + len(self.passed)
        stops = self._bad_row_stops or (self._max_bad_rows is not None and num_bad >= self._max_bad_rows)
        if bad.policy.stops if bad.policy is not None else stops:
            raise BadRowStop(bad, self.passed)

        self.passed.append(bad)
        self._move_to(bad.chunk, bad.error.row + 1)
        self._count(f"bad row {bad.error.code}", 1)
        self.head += 1

    def _move_to(self, chunk: Chunk | MergedChunk, row: int) -> None:
        """Set the position to the chunk's row ``row``; count the drops and notes of the rows before it."""
        first, here = chunk.first, self.position
        done = here.row - first.row if (here.epoch, here.window) == (first.epoch, first.window) else 0
        for drop in chunk.drops:
            self._count(drop.reason, _num_between(drop.rows, done, row))
        for note in chunk.notes:
            if number := _num_between(note.rows, done, row):
                self._notes = {**self._notes, note.name: self._notes.get(note.name, 0) + number}
        self.position = Position(first.epoch, first.window, first.row + row)
        if chunk.record is not None:
            self._mixture = MixturePoint(chunk.record, row)

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
            mixture=self._mixture,
        )
        after = Ledger(
            position=self.position,
            counters=counters,
            buffer=before.buffer,
            leases=before.leases,
            acked=before.acked,
            journal=before.journal.union(_poison(self.passed)) if self.passed else before.journal,
            packs=before.packs,
            head=self.head,
            offset=self.offset,
            taken=self.taken,
        )
        return Delivery(self.ranges, self.taken - before.taken, after, self.passed, is_last)


def _num_between(rows: Any, start: int, stop: int) -> int:
    """How many of ``rows``, in ascending order, are in ``[start, stop)``."""
    return int(rows.searchsorted(stop)) - int(rows.searchsorted(start))


def _poison(passed: list[BadRowItem]) -> list[tuple[int, int]]:
    return [bad.chunk.row_key(bad.error.row) for bad in passed if bad.error.code in POISON_CODES]


def _no_samples(epoch: int, drops: dict[str, int]) -> str:
    num_rows = sum(drops.values())
    remedy = f'; rows are "{EXCLUDED_REASON}" by Outcomes(policy=...)' if EXCLUDED_REASON in drops else ""
    return f"AD401 epoch {epoch}: {num_rows} rows read, 0 kept: {by_reason(drops)}{remedy}"


def dropped(delivery: Delivery) -> Delivery:
    """The delivery without its samples, which are counted as dropped: a short last batch under ``drop_last``."""
    counters, number = delivery.ledger.counters, delivery.num_groups
    if number:
        drops = {**counters.drops, "drop_last": counters.drops.get("drop_last", 0) + number}
        counters = msgspec.structs.replace(counters, drops=drops)
    ledger = msgspec.structs.replace(delivery.ledger, counters=counters)
    return delivery._replace(ranges=[], num_groups=0, ledger=ledger)
