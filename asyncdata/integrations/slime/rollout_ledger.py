"""What rollouts got and gave back, as one immutable value: the pure core of the data source for slime.

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

Groups may be tracked instead, for a rollout that runs without end, beside the training, as miles' fully asynchronous
one::

    data source --served--> being generated --put--> data buffer --get--> batch of rollout r --saved--> gone for good
         ^                         |                      |
         |       aborted           |                      |  too stale
         +------- retry <----------+----------------------+
                  drop: gone, counted by its reason

From ``served`` to ``saved``, the group is here, with its record of the moment when it was served. A snapshot for
rollout r has all groups that are here, except those in the batches of rollouts up to r. So each group that was ever
served is trained by rollout r, dropped and counted, or in the snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from asyncdata.core.errors import SnapshotError
from asyncdata.delivery.ledger import counted

MAX_ROLLOUTS = 3
"""Rollouts that are remembered until they are saved. Drivers are at most one rollout ahead of the saved one."""

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
    """A group that is in the buffer, or is tracked.

    :ivar group: the list itself that was given back or served.
    :ivar record: its record for a snapshot, from that moment, as rollouts change groups in place. None: no snapshot
        can store it.
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


class Rollout(msgspec.Struct, frozen=True, eq=False):
    """A rollout that is in no snapshot yet.

    :ivar mark: the moment right before it; None where groups are tracked.
    :ivar again: by number, the groups that have left the buffer since then and are not back.
    :ivar batch: the tracked groups that it took for training. Only their records are stored.
    """

    rollout_id: int
    mark: Moment | None = None
    again: dict[int, int] = {}
    batch: tuple[Entry, ...] = ()

    def after(self, gone: Sequence[Entry], added: Sequence[Entry]) -> Rollout:
        """This rollout after groups have left the buffer, and others were added."""
        if self.mark is None:
            return self

        again = dict(self.again)
        for entry in gone:
            if entry.group_index is not None:
                again[entry.group_index] = again.get(entry.group_index, 0) + 1
        first_new = self.mark.numbering.sample_group_index
        late = tuple(entry for entry in added if _is_late(entry.group_index, first_new, again))
        mark = _replace(self.mark, entries=self.mark.entries + late) if late else self.mark
        return _replace(self, mark=mark, again=again)


def _is_late(number: int | None, first_new: int, again: dict[int, int]) -> bool:
    """Whether a rollout had a group when the mark was made. A group that comes back is removed from ``again``."""
    if number is None:
        return False

    if number in again:
        again[number] -= 1
        if not again[number]:
            del again[number]
        return False

    return number < first_new


class RolloutLedger(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The state of delivery to rollouts.

    :ivar entries: the buffer, the oldest first unless a filter has ordered it otherwise.
    :ivar rollout_id: the latest rollout that has begun, or whose batch is being collected; -1 before any, and where the
        driver says none.
    :ivar rollouts: the last ones that are not saved, the oldest first.
    :ivar forgotten: the latest rollout that is not remembered any more.
    :ivar drops: groups that were dropped, by reason.
    :ivar out: the tracked groups that no batch has, by the identity of their list, in the order in which they were
        served; None: groups are not tracked.
    """

    entries: tuple[Entry, ...] = ()
    rollout_id: int = -1
    rollouts: tuple[Rollout, ...] = ()
    forgotten: int = -1
    drops: dict[str, int] = {}
    out: dict[int, Entry] | None = None

    # Rollouts.

    def begun(self, rollout_id: int, now: Callable[[], Moment]) -> RolloutLedger:
        """The ledger after ``rollout_id`` has begun; the same if it had begun before.

        An evaluation between two rollouts sets the driver's number back; what is delivered belongs to the later one.

        :param now: makes the current state. Tracked groups are in every snapshot, so that it is not needed.
        """
        if rollout_id <= self.rollout_id:
            return self

        if self.out is not None:
            return _replace(self, rollout_id=rollout_id)

        return _with(_replace(self, rollout_id=rollout_id), Rollout(rollout_id, now()))

    # Groups.

    def with_buffer(self, entries: Iterable[Entry]) -> RolloutLedger:
        """The ledger with another buffer: missing groups were served or dropped, new ones were given back."""
        entries = tuple(entries)
        before, now = set(map(id, self.entries)), set(map(id, entries))
        gone = [entry for entry in self.entries if id(entry) not in now]
        added = [entry for entry in entries if id(entry) not in before]
        if not gone and not added:
            return _replace(self, entries=entries)

        return _replace(self, entries=entries, rollouts=tuple(one.after(gone, added) for one in self.rollouts))

    def dropping(self, reason: str, number: int) -> RolloutLedger:
        """The ledger after ``number`` groups were dropped."""
        return _replace(self, drops=counted(self.drops, reason, number))

    # Tracked groups.

    def tracking(self, rollout_id: int) -> RolloutLedger:
        """The ledger that tracks groups; the batch of ``rollout_id`` is collected first."""
        return RolloutLedger(entries=self.entries, drops=self.drops, rollout_id=rollout_id, out={})

    def served(self, entries: Iterable[Entry]) -> RolloutLedger:
        """These groups are with the rollout now."""
        return _replace(self, out={**(self.out or {}), **{id(entry.group): entry for entry in entries}})

    def find(self, group: list[Any], group_index: int | None) -> Entry | None:
        """The entry of a group that is out: of this list, or of one with this number."""
        out = self.out or {}
        if id(group) in out:
            return out[id(group)]

        if group_index is None:
            return None

        return next((entry for entry in out.values() if entry.group_index == group_index), None)

    def ended(self, *entries: Entry) -> RolloutLedger:
        """These groups are not out any more: they were dropped, given back or consumed."""
        gone = {id(entry.group) for entry in entries}
        out = {key: entry for key, entry in (self.out or {}).items() if key not in gone}
        return _replace(self, out=out) if gone else self

    def consumed(self, entry: Entry) -> RolloutLedger:
        """A group is in the batch that is being collected."""
        kept = _replace(entry, group=[])  # the trainer's tokens are not kept alive
        here = next((one for one in self.rollouts if one.rollout_id == self.rollout_id), Rollout(self.rollout_id))
        return _with(self.ended(entry), _replace(here, batch=(*here.batch, kept)))

    # Snapshots.

    def moment_after(self, rollout_id: int | None, now: Callable[[], Moment]) -> Moment:
        """What a snapshot for ``rollout_id`` has.

        :param rollout_id: None: the last complete one where groups are tracked, otherwise the current state.
        :param now: makes the current state.
        :raises SnapshotError: if that rollout is not complete, or no longer remembered.
        """
        rollout_id = self._named(rollout_id)
        if rollout_id is None:
            return now()

        if self.out is not None and rollout_id >= self.rollout_id:
            raise SnapshotError(
                f"AD601 rollout {rollout_id} cannot be saved: the batch of rollout {self.rollout_id} is not complete. "
                "Call load(n - 1) before rollout n, the first one, or begin_rollout(n)"
            )

        if rollout_id < self.forgotten:
            raise SnapshotError(
                f"AD601 rollout {rollout_id} cannot be saved any more: rollout {self.forgotten} was saved, or "
                f"{MAX_ROLLOUTS} later ones have begun; save a rollout before the second one after it begins"
            )

        later = [one for one in self.rollouts if one.rollout_id > rollout_id]
        if self.out is None:
            return next((one.mark for one in later), None) or now()

        left = sorted([*(entry for one in later for entry in one.batch), *self.out.values()], key=_age)
        moment = now()
        return _replace(moment, entries=(*left, *moment.entries))

    def saved(self, rollout_id: int | None) -> RolloutLedger:
        """The ledger after a snapshot for ``rollout_id`` was written, without what only earlier ones need."""
        rollout_id = self._named(rollout_id)
        num_saved = 0 if rollout_id is None else sum(one.rollout_id <= rollout_id for one in self.rollouts)
        return _without_oldest(self, num_saved)

    def _named(self, rollout_id: int | None) -> int | None:
        """None becomes the last complete rollout, which is known where groups are tracked."""
        return self.rollout_id - 1 if rollout_id is None and self.out is not None else rollout_id


def _with(ledger: RolloutLedger, rollout: Rollout) -> RolloutLedger:
    """The ledger in which this is the latest rollout."""
    rollouts = (*(one for one in ledger.rollouts if one.rollout_id < rollout.rollout_id), rollout)
    return _without_oldest(_replace(ledger, rollouts=rollouts), len(rollouts) - MAX_ROLLOUTS)


def _without_oldest(ledger: RolloutLedger, num_rollouts: int) -> RolloutLedger:
    if num_rollouts < 1:
        return ledger

    forgotten = ledger.rollouts[num_rollouts - 1].rollout_id
    return _replace(ledger, rollouts=ledger.rollouts[num_rollouts:], forgotten=forgotten)


def _age(entry: Entry) -> tuple[bool, int]:
    return entry.group_index is None, entry.group_index or 0
