"""One delivery: from a ledger and the channel's ready items to samples and the next ledger. It changes no state.

The coordinator commits a delivery by replacing its ledger. So an exception, a timeout or Ctrl-C before the commit loses
nothing, and putting the old ledger back undoes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from asyncdata.core.errors import AsyncDataError, NoSamplesError, by_reason
from asyncdata.core.messages import EXCLUDED_REASON
from asyncdata.core.types import Position, SampleRange
from asyncdata.delivery.chunk import BadRow, Chunk
from asyncdata.delivery.items import AlreadyAcked, ChunkEnd, Failure, Item, Run
from asyncdata.delivery.ledger import Counters, Ledger, journal_key

POISON_CODES = frozenset({"AD422", "AD423"})
"""Codes of rows that hung or killed their worker. They may not do so again, so a snapshot names them in its journal."""


class BadRowStop(Exception):  # noqa: N818 - control flow; the coordinator turns it into an error for the user
    """The next row is bad and may not be passed over: the policy is "raise", or the limit is reached.

    :ivar passed: bad rows that this delivery passed over before it.
    """

    def __init__(self, bad: BadRow, passed: list[BadRow]) -> None:
        super().__init__()
        self.bad = bad
        self.passed = passed


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
    passed: list[BadRow]
    is_last: bool = False


def deliver(
    items: Iterable[Item],
    ledger: Ledger,
    num_groups: int,
    *,
    samples_per_group: int = 1,
    last_epoch: int | None = None,
    at_least: int | None = None,
    may_be_fewer: bool = False,
) -> Delivery | None:
    """Take the next ``num_groups`` samples of the stream; each becomes a group. None if they are not ready yet.

    :param items: the channel's ready items, from ``ledger.head`` on.
    :param last_epoch: do not go beyond this epoch; there are fewer samples if it ends.
    :param at_least: so many are enough if no more are ready; None: all.
    :param may_be_fewer: take the samples before what stops the stream, which is then raised at the next call.
    :raises BadRowStop: if a bad row that may not be passed over comes before the last requested sample.
    :raises NoSamplesError: if an epoch ends without a sample.
    :raises AsyncDataError: the error that ended the stream.
    """
    least = num_groups if at_least is None else at_least
    if last_epoch is not None and ledger.position.epoch > last_epoch:
        return Delivery([], 0, ledger, [], is_last=least > 0)

    walk = _Walk(ledger, num_groups, samples_per_group)
    for item in items:
        if walk.need == 0 and not walk.may_pass(item):
            break

        is_enough = num_groups - walk.need >= least or (may_be_fewer and walk.ranges)
        if is_enough and (isinstance(item, Failure) or (isinstance(item, BadRow) and item.stops)):
            return walk.result()

        walk.step(item)
        if last_epoch is not None and walk.position.epoch > last_epoch:
            return walk.result(is_last=num_groups - walk.need < least)

    return walk.result() if num_groups - walk.need >= least else None


def upcoming(
    items: Iterable[Item], ledger: Ledger, num_groups: int, samples_per_group: int, last_epoch: int | None, is_all: bool
) -> list[SampleRange] | None:
    """The next ``num_groups`` samples of the stream, each as a group; None if they are not ready yet.

    There are fewer if the stream ends before, or stops at an error, which the delivery that comes to it raises.

    :param is_all: no more will be ready before a delivery.
    """
    walk = _Walk(ledger, num_groups, samples_per_group)
    try:
        for item in items:
            if not walk.need or (last_epoch is not None and walk.position.epoch > last_epoch):
                return walk.ranges

            walk.step(item)
    except (BadRowStop, AsyncDataError):
        return walk.ranges

    is_end = is_all or (last_epoch is not None and walk.position.epoch > last_epoch)
    return None if walk.need and not is_end else walk.ranges


def advanced(ledger: Ledger, run: Run, num_groups: int, samples_per_group: int) -> Ledger:
    """The ledger after ``num_groups`` more samples of ``run``, the item that it points to, without the run's end."""
    walk = _Walk(ledger, num_groups, samples_per_group)
    walk.step(run)
    return walk.result().ledger


class _Walk:
    """The changing values while items are walked."""

    def __init__(self, ledger: Ledger, need: int, samples_per_group: int) -> None:
        self.ledger = ledger
        self.need = need
        self.position = ledger.position
        self.head, self.offset, self.taken = ledger.head, ledger.offset, ledger.taken
        self.ranges: list[SampleRange] = []
        self.passed: list[BadRow] = []
        self._samples_per_group = samples_per_group
        self._counts = msgspec.structs.asdict(ledger.counters)

    def may_pass(self, item: Item) -> bool:
        """Whether to take this item although enough samples are found.

        A chunk's end is taken with its last sample, so that the position at an epoch's end is the start of the next.
        Not the end of a part of a mixture, nor anything before an epoch's first sample: whether that is ready already
        depends on timing, and what it changes must not.
        """
        if self.offset or not self._counts["epoch_groups"]:  # with an offset, a part of the previous run is left
            return False

        if isinstance(item, ChunkEnd):
            return item.chunk.record is None or item.chunk.num_samples > 0

        return isinstance(item, AlreadyAcked)

    def step(self, item: Item) -> None:
        """Walk one item, or as much of it as is needed."""
        if isinstance(item, Run):
            self._run(item)
        elif isinstance(item, ChunkEnd):
            self._chunk_end(item.chunk)
        elif isinstance(item, AlreadyAcked):
            self._pass_samples(item.chunk, item.sample, item.sample + 1)
            self.head += 1
        elif isinstance(item, BadRow):
            if item.stops:
                raise BadRowStop(item, self.passed)

            self.passed.append(item)
            self._counts["num_bad_rows"] += 1
            self._count(f"bad row {item.error.code}", 1)
            self.head += 1
        else:
            raise item.error

    def _run(self, run: Run) -> None:
        start = run.start + self.offset
        stop = min(run.stop, start + self.need)
        counts, size = self._counts, self._samples_per_group
        self.ranges.append(SampleRange(run.chunk, start, stop, counts["num_samples"], counts["num_groups"], size))
        self._pass_samples(run.chunk, start, stop)
        num_taken = stop - start
        self.need -= num_taken
        self.taken += num_taken
        self.offset += num_taken
        if stop == run.stop:
            self.head += 1
            self.offset = 0

    def _pass_samples(self, chunk: Chunk, start: int, stop: int) -> None:
        """Count the samples ``[start, stop)``, each as a group, and move on past them."""
        self._move_to(chunk, chunk.row_of(stop - 1) + 1)
        counts, number = self._counts, stop - start
        counts["num_groups"] += number
        counts["num_samples"] += number * self._samples_per_group
        counts["num_tokens"] += chunk.num_tokens(start, stop)
        counts["epoch_groups"] += number
        counts["digest"] = counts["digest"].plus(chunk.sums, start, stop)

    def _chunk_end(self, chunk: Chunk) -> None:
        self._move_to(chunk, chunk.num_rows)
        if chunk.ends_epoch:
            if self._counts["epoch_groups"] == 0:
                raise NoSamplesError(_no_samples(chunk.first.epoch, self._counts["epoch_drops"]))

            self.position = Position(chunk.first.epoch + 1)
            self._counts |= {"epoch_groups": 0, "epoch_drops": {}}
        self.head += 1

    def _move_to(self, chunk: Chunk, row: int) -> None:
        """Set the position to the chunk's row ``row``; count the drops and notes of the rows before it."""
        first, here = chunk.first, self.position
        done = here.row - first.row if (here.epoch, here.window) == (first.epoch, first.window) else 0
        for drop in chunk.drops:
            self._count(drop.reason, _num_between(drop.rows, done, row))
        for note in chunk.notes:
            self._count(note.name, _num_between(note.rows, done, row), ("notes",))
        self.position = Position(first.epoch, first.window, first.row + row)
        if chunk.record is not None:
            self._counts["mixture"] = chunk.record.point(row)

    def _count(self, name: str, number: int, among: tuple[str, ...] = ("drops", "epoch_drops")) -> None:
        for counted in among if number else ():
            before = self._counts[counted]
            self._counts[counted] = {**before, name: before.get(name, 0) + number}

    def result(self, *, is_last: bool = False) -> Delivery:
        """The delivery of what was walked."""
        before = self.ledger
        poison = [journal_key(bad.chunk.source, bad.key) for bad in self.passed if bad.error.code in POISON_CODES]
        after = msgspec.structs.replace(
            before,
            position=self.position,
            counters=Counters(**self._counts),
            journal=before.journal.union(poison) if poison else before.journal,
            head=self.head,
            offset=self.offset,
            taken=self.taken,
        )
        return Delivery(self.ranges, self.taken - before.taken, after, self.passed, is_last)


def _num_between(rows: Any, start: int, stop: int) -> int:
    """How many of ``rows``, in ascending order, are in ``[start, stop)``."""
    return int(rows.searchsorted(stop)) - int(rows.searchsorted(start))


def _no_samples(epoch: int, drops: dict[str, int]) -> str:
    num_rows = sum(drops.values())
    remedy = f'; rows are "{EXCLUDED_REASON}" by Outcomes(policy=...) or exclude()' if EXCLUDED_REASON in drops else ""
    return f"AD401 epoch {epoch}: {num_rows} rows read, 0 kept: {by_reason(drops)}{remedy}"


def dropped(delivery: Delivery) -> Delivery:
    """The delivery without its samples, which are dropped for good: a short last batch under ``drop_last``."""
    places = [one.chunk.position(sample) for one in delivery.ranges for sample in range(one.start, one.stop)]
    ledger = delivery.ledger.leaving_out(places, "drop_last", delivery.num_groups)
    return delivery._replace(ranges=[], num_groups=0, ledger=ledger)
