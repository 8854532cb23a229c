"""The groups that rollouts got and gave back, as one immutable value: the pure core of the data source for slime.

The way of one group::

    the stream --delivered: it gets its numbers--> rollout r --trained--> gone for good
        ^                                             |  ^
        |                                 given back  |  |  served, in this rollout or in a later one
        |                                             v  |
        |                                           buffer: the group, and its record of this moment
        |
    a mark, made right before the first thing that a rollout does: the numbering, the dataset's state and the buffer of
    that moment; and, from then on, what came back of that which was out at that moment

A snapshot for rollout r must contain nothing that a later rollout has done: the driver may have run rollout r + 1
before it saves rollout r (train_async does), and rollout r + 1 is run again after a restart. So it is the mark of the
first rollout after r, if there is one, and otherwise the current state.

Groups that rollouts have when a mark is made are not in it: they are being generated or trained. If one is given back
later, it is added to the mark, as the stream will not deliver it again. It differs from the groups of later rollouts by
its number, which is below the mark's, and which copies of it have too. A group that was already in the mark, was served
and is given back again is not added twice. A group without a number counts as one of the current rollout.

Groups that are never given back are consumed, such as those that a rollout over-samples and drops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.errors import SnapshotError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ("Entry", "Mark", "Moment", "Numbering", "RolloutLedger")

MAX_MARKS = 3
"""Rollouts whose start is stored. slime's drivers are at most one rollout ahead of the one that they save."""

_replace = msgspec.structs.replace


class Numbering(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The position of the stream, in slime's four numbers.

    :ivar epoch_id: the epoch of the last prompt; at its very end, the next one has not begun.
    :ivar sample_offset: prompts of it that were delivered.
    :ivar sample_group_index: number of the next group, across epochs and restarts.
    :ivar sample_index: number of the next sample.
    """

    epoch_id: int = 0
    sample_offset: int = 0
    sample_group_index: int = 0
    sample_index: int = 0

    def after(self, num_groups: int, samples_per_group: int, epoch_id: int, sample_offset: int) -> Numbering:
        """The numbering once ``num_groups`` more are delivered, the last of them being that prompt of that epoch."""
        return Numbering(
            epoch_id=epoch_id,
            sample_offset=sample_offset,
            sample_group_index=self.sample_group_index + num_groups,
            sample_index=self.sample_index + num_groups * samples_per_group,
        )


class Entry(msgspec.Struct, frozen=True, eq=False):
    """A group in the buffer.

    :ivar group: the same list that was given back.
    :ivar record: its record for a snapshot, from when it was given back, as rollouts change groups in place. None: no
        snapshot can store it.
    :ivar group_index: its number, if it has one.
    :ivar reason: why there is no record.
    """

    group: list[Any]
    record: Any
    group_index: int | None = None
    reason: str | None = None


class Moment(msgspec.Struct, frozen=True, eq=False):
    """Everything that a run needs to continue from a moment.

    :ivar dataset: the state of the dataset.
    :ivar metadata: what plugins store at the data source.
    """

    numbering: Numbering
    entries: tuple[Entry, ...]
    dataset: Any
    metadata: dict[Any, Any]


class Mark(msgspec.Struct, frozen=True, eq=False):
    """The start of a rollout.

    :ivar again: by number, the groups that have left the buffer since then and are not back.
    """

    rollout_id: int
    moment: Moment
    again: dict[int, int] = {}

    def after(self, gone: Sequence[Entry], added: Sequence[Entry]) -> Mark:
        """This mark after groups have left the buffer, and others were added."""
        again = dict(self.again)
        for entry in gone:
            if entry.group_index is not None:
                again[entry.group_index] = again.get(entry.group_index, 0) + 1
        late = [entry for entry in added if self._is_late(entry, again)]
        if not late:
            return Mark(self.rollout_id, self.moment, again)

        return Mark(self.rollout_id, _replace(self.moment, entries=(*self.moment.entries, *late)), again)

    def _is_late(self, entry: Entry, again: dict[int, int]) -> bool:
        """Whether a rollout had it when the mark was made. A group that comes back is removed from ``again``."""
        number = entry.group_index
        if number is None:
            return False

        if number in again:
            again[number] -= 1
            if not again[number]:
                del again[number]
            return False

        return number < self.moment.numbering.sample_group_index


class RolloutLedger(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The state of delivery to rollouts.

    :ivar entries: the buffer, the oldest first unless a filter has ordered it otherwise.
    :ivar rollout_id: the latest rollout that has begun; None if the driver does not say.
    :ivar marks: the starts of the last rollouts, the oldest first.
    :ivar forgotten: the latest rollout whose mark was removed.
    :ivar drops: groups that left the buffer and were not served, by reason.
    """

    numbering: Numbering = Numbering()
    entries: tuple[Entry, ...] = ()
    rollout_id: int | None = None
    marks: tuple[Mark, ...] = ()
    forgotten: int | None = None
    drops: dict[str, int] = {}

    def begins(self, rollout_id: int | None) -> bool:
        """Whether this rollout has not begun yet, so that its start must be marked.

        An evaluation between two rollouts sets the driver's number back; what is delivered belongs to the later one.
        """
        return rollout_id is not None and (self.rollout_id is None or rollout_id > self.rollout_id)

    def marked(self, rollout_id: int, dataset: Any, metadata: dict[Any, Any]) -> RolloutLedger:
        """The ledger after ``rollout_id`` has begun."""
        mark = Mark(rollout_id, Moment(self.numbering, self.entries, dataset, metadata))
        marks = (*self.marks, mark)
        return _forgetting(_replace(self, rollout_id=rollout_id, marks=marks), len(marks) - MAX_MARKS)

    def delivered(self, numbering: Numbering) -> RolloutLedger:
        """The ledger with the stream at ``numbering``."""
        return _replace(self, numbering=numbering)

    def with_buffer(self, entries: Iterable[Entry]) -> RolloutLedger:
        """The ledger with another buffer: missing groups were served or dropped, new ones were given back."""
        entries = tuple(entries)
        before, now = set(map(id, self.entries)), set(map(id, entries))
        gone = [entry for entry in self.entries if id(entry) not in now]
        added = [entry for entry in entries if id(entry) not in before]
        if not gone and not added:
            return _replace(self, entries=entries)

        return _replace(self, entries=entries, marks=tuple(mark.after(gone, added) for mark in self.marks))

    def dropping(self, reason: str, number: int) -> RolloutLedger:
        """The ledger after ``number`` groups were dropped."""
        return _replace(self, drops={**self.drops, reason: self.drops.get(reason, 0) + number}) if number else self

    def start_after(self, rollout_id: int | None) -> Moment | None:
        """The moment for a snapshot for ``rollout_id``; None: the current one.

        :raises SnapshotError: if it is no longer stored.
        """
        if rollout_id is None:
            return None

        if self.forgotten is not None and rollout_id < self.forgotten:
            raise SnapshotError(
                f"AD601 rollout {rollout_id} cannot be saved any more: rollout {self.forgotten} was saved, or "
                f"{MAX_MARKS} later ones have begun; save a rollout before the second one after it begins"
            )

        return next((mark.moment for mark in self.marks if mark.rollout_id > rollout_id), None)

    def saved(self, rollout_id: int | None) -> RolloutLedger:
        """The ledger after a snapshot for ``rollout_id`` was written, without its start and earlier ones."""
        if rollout_id is None:
            return self

        return _forgetting(self, sum(mark.rollout_id <= rollout_id for mark in self.marks))


def _forgetting(ledger: RolloutLedger, num_marks: int) -> RolloutLedger:
    """The ledger without its oldest marks."""
    if num_marks < 1:
        return ledger

    return _replace(ledger, marks=ledger.marks[num_marks:], forgotten=ledger.marks[num_marks - 1].rollout_id)
