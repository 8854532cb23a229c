"""What rollouts were given and gave back, as one immutable value: the pure core of the data source for slime.

The way of one group::

    the stream --delivered: it gets its numbers--> rollout r --trained--> gone for good
        ^                                             |  ^
        |                                 given back  |  |  served, in this rollout or in a later one
        |                                             v  |
        |                                           buffer: the group, and its record of this moment
        |
    a mark, made right before the first thing that a rollout does: the numbering, the dataset's state and the buffer of
    that moment; and, from then on, what came back of that which was out at that moment

A snapshot for rollout r must hold nothing that a later rollout has done: the driver may have run rollout r + 1 before
it saves rollout r (train_async does), and rollout r + 1 is run again after a restart. So it is the mark of the first
rollout after r, where there is one, and this very moment otherwise.

What is out when a mark is made is not in it: those groups are being trained, or waited for. Should one be given back
later, it joins the mark, for no stream will bring it again. It is told from the groups of later rollouts by its number,
which is below the mark's, and which copies of it have too; a group that was in the mark already, went out once more and
comes back again is not put in twice. A group without a number counts as one of the current rollout.

Groups that are never given back are consumed: a rollout that over-samples and drops what it does not need has had them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.errors import SnapshotError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ("Entry", "Mark", "Moment", "Numbering", "RolloutLedger")

MAX_MARKS = 3
"""Rollouts whose start is remembered. slime's drivers are at most one rollout ahead of the one they save."""

_replace = msgspec.structs.replace


class Numbering(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far the stream has come, in slime's own words.

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

    :ivar group: the very list that was given back.
    :ivar record: what a snapshot keeps of it, as it was when it was given back: rollouts change groups in place. None:
        no snapshot can hold it.
    :ivar group_index: its number, if it has one.
    :ivar reason: why there is no record.
    """

    group: list[Any]
    record: Any
    group_index: int | None = None
    reason: str | None = None


class Moment(msgspec.Struct, frozen=True, eq=False):
    """All that a run needs to continue from a moment.

    :ivar dataset: the state of where prompts come from.
    :ivar metadata: what plugins keep at the data source.
    """

    numbering: Numbering
    entries: tuple[Entry, ...]
    dataset: Any
    metadata: dict[Any, Any]


class Mark(msgspec.Struct, frozen=True, eq=False):
    """The start of a rollout.

    :ivar again: by number, how many groups have left the buffer since and are not back.
    """

    rollout_id: int
    moment: Moment
    again: dict[int, int] = {}

    def after(self, gone: Sequence[Entry], added: Sequence[Entry]) -> Mark:
        """This mark once groups have left the buffer, and others have come."""
        again = dict(self.again)
        for entry in gone:
            if entry.group_index is not None:
                again[entry.group_index] = again.get(entry.group_index, 0) + 1
        late = [entry for entry in added if self._is_late(entry, again)]
        if not late:
            return Mark(self.rollout_id, self.moment, again)

        return Mark(self.rollout_id, _replace(self.moment, entries=(*self.moment.entries, *late)), again)

    def _is_late(self, entry: Entry, again: dict[int, int]) -> bool:
        """Whether it was out when the mark was made. What comes back again is struck from ``again``."""
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
    :ivar rollout_id: the latest rollout that has begun; None where the driver does not tell.
    :ivar marks: the starts of the last rollouts, the oldest first.
    :ivar forgotten: the latest rollout whose mark is gone.
    :ivar drops: groups that left the buffer and were not served, by reason.
    """

    numbering: Numbering = Numbering()
    entries: tuple[Entry, ...] = ()
    rollout_id: int | None = None
    marks: tuple[Mark, ...] = ()
    forgotten: int | None = None
    drops: dict[str, int] = {}

    def begins(self, rollout_id: int | None) -> bool:
        """Whether this is a rollout that has not begun yet, so that its start has to be marked.

        An evaluation between two rollouts sets the driver's number back; what is delivered belongs to the later one.
        """
        return rollout_id is not None and (self.rollout_id is None or rollout_id > self.rollout_id)

    def marked(self, rollout_id: int, dataset: Any, metadata: dict[Any, Any]) -> RolloutLedger:
        """The ledger once ``rollout_id`` has begun."""
        mark = Mark(rollout_id, Moment(self.numbering, self.entries, dataset, metadata))
        marks = (*self.marks, mark)
        return _forgetting(_replace(self, rollout_id=rollout_id, marks=marks), len(marks) - MAX_MARKS)

    def delivered(self, numbering: Numbering) -> RolloutLedger:
        """The ledger once the stream has come to ``numbering``."""
        return _replace(self, numbering=numbering)

    def with_buffer(self, entries: Iterable[Entry]) -> RolloutLedger:
        """The ledger with another buffer: what is missing in it has gone out, what is new in it has come back."""
        entries = tuple(entries)
        before, now = set(map(id, self.entries)), set(map(id, entries))
        gone = [entry for entry in self.entries if id(entry) not in now]
        added = [entry for entry in entries if id(entry) not in before]
        if not gone and not added:
            return _replace(self, entries=entries)

        return _replace(self, entries=entries, marks=tuple(mark.after(gone, added) for mark in self.marks))

    def dropping(self, reason: str, number: int) -> RolloutLedger:
        """The ledger once ``number`` groups were dropped."""
        return _replace(self, drops={**self.drops, reason: self.drops.get(reason, 0) + number}) if number else self

    def start_after(self, rollout_id: int | None) -> Moment | None:
        """The moment that a snapshot for ``rollout_id`` must hold; None: the current one.

        :raises SnapshotError: if it is not remembered any more.
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
        """The ledger once a snapshot for ``rollout_id`` is written: its start and earlier ones are forgotten."""
        if rollout_id is None:
            return self

        return _forgetting(self, sum(mark.rollout_id <= rollout_id for mark in self.marks))


def _forgetting(ledger: RolloutLedger, num_marks: int) -> RolloutLedger:
    """The ledger without its oldest marks."""
    if num_marks < 1:
        return ledger

    return _replace(ledger, marks=ledger.marks[num_marks:], forgotten=ledger.marks[num_marks - 1].rollout_id)
