"""The groups that were served and are not trained yet, for rollouts that run without end: as one immutable value.

The way of one group through miles' fully asynchronous rollout::

    data source --served--> being generated --put--> data buffer --get--> batch of rollout r --saved--> gone for good
         ^                         |                      |
         |       aborted           |                      |  too stale
         +------- retry <----------+----------------------+
                  drop: gone, counted by its reason

From ``served`` to ``saved``, the group is here, with its record of the moment when it was served. A checkpoint of
rollout r has all groups that are here, except those in the batches of rollouts up to r. So each group that was ever
served is trained by rollout r, dropped and counted, or in the checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.errors import SnapshotError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncdata.integrations.slime.rollout_ledger import Entry

__all__ = ("Batch", "TrackedGroups")

MAX_BATCHES = 3
"""Rollouts whose batches are stored until they are saved. Drivers are at most one rollout ahead of the saved one."""

_replace = msgspec.structs.replace


class Batch(msgspec.Struct, frozen=True, eq=False):
    """The groups that a rollout took for training. Only their records are stored."""

    rollout_id: int
    entries: tuple[Any, ...] = ()


class TrackedGroups(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Served groups, until a checkpoint counts them as trained.

    :ivar rollout_id: the rollout whose batch is being collected.
    :ivar out: by the identity of their list, in the order in which they were served: those that no batch has.
    :ivar batches: of the last rollouts, the oldest first; that of ``rollout_id`` is incomplete.
    :ivar forgotten: the latest rollout whose batch is not stored any more.
    """

    rollout_id: int = 0
    out: dict[int, Any] = {}
    batches: tuple[Batch, ...] = ()
    forgotten: int | None = None

    def served(self, entries: Iterable[Entry]) -> TrackedGroups:
        """These groups are with the rollout now."""
        return _replace(self, out={**self.out, **{id(entry.group): entry for entry in entries}})

    def find(self, group: list[Any], group_index: int | None = None) -> Entry | None:
        """The entry of a group that is out: of this list, or of one with this number."""
        if id(group) in self.out:
            return self.out[id(group)]  # type: ignore[no-any-return]

        if group_index is None:
            return None

        return next((entry for entry in self.out.values() if entry.group_index == group_index), None)

    def without(self, entries: Iterable[Entry]) -> TrackedGroups:
        """These groups were dropped or given back."""
        gone = {id(entry.group) for entry in entries}
        return _replace(self, out={key: entry for key, entry in self.out.items() if key not in gone})

    def consumed(self, entry: Entry) -> TrackedGroups:
        """A group is in the batch that is being collected."""
        kept = _replace(entry, group=[])  # the trainer's tokens are not kept alive
        batches = self.batches
        if batches and batches[-1].rollout_id == self.rollout_id:
            last = batches[-1]
            batches = (*batches[:-1], Batch(last.rollout_id, (*last.entries, kept)))
        else:
            batches = (*batches, Batch(self.rollout_id, (kept,)))
        return _forgetting(_replace(self.without((entry,)), batches=batches), len(batches) - MAX_BATCHES)

    def ended(self) -> TrackedGroups:
        """The batch is complete, and the next one begins."""
        return _replace(self, rollout_id=self.rollout_id + 1)

    def begun(self, rollout_id: int) -> TrackedGroups:
        """The driver says which rollout is being collected. An earlier one has no effect."""
        return _replace(self, rollout_id=rollout_id) if rollout_id > self.rollout_id else self

    def left(self, rollout_id: int | None) -> tuple[Entry, ...]:
        """The groups that are not trained once ``rollout_id`` is, those served first at the front.

        :param rollout_id: None: the last complete one.
        :raises SnapshotError: if it is not complete, or is too long ago.
        """
        wanted = self.rollout_id - 1 if rollout_id is None else rollout_id
        if wanted >= self.rollout_id:
            raise SnapshotError(
                f"AD601 rollout {wanted} cannot be saved: the batch of rollout {self.rollout_id} is not complete. Call "
                "load(n - 1) before rollout n, the first one, or begin_rollout(n)"
            )

        if self.forgotten is not None and wanted < self.forgotten:
            raise SnapshotError(
                f"AD601 rollout {wanted} cannot be saved any more: rollout {self.forgotten} was saved, or "
                f"{MAX_BATCHES} later batches have begun; save a rollout before the second batch after it begins"
            )

        later = [entry for batch in self.batches if batch.rollout_id > wanted for entry in batch.entries]
        return tuple(sorted([*later, *self.out.values()], key=_age))

    def saved(self, rollout_id: int | None) -> TrackedGroups:
        """The batches up to ``rollout_id`` are in a checkpoint, and are not needed any more."""
        wanted = self.rollout_id - 1 if rollout_id is None else rollout_id
        return _forgetting(self, sum(batch.rollout_id <= wanted for batch in self.batches))


def _age(entry: Entry) -> tuple[bool, int]:
    return entry.group_index is None, entry.group_index or 0


def _forgetting(tracked: TrackedGroups, num_batches: int) -> TrackedGroups:
    """``tracked`` without its oldest batches."""
    if num_batches < 1:
        return tracked

    forgotten = tracked.batches[num_batches - 1].rollout_id
    return _replace(tracked, batches=tracked.batches[num_batches:], forgotten=forgotten)
