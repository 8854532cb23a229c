"""The data source for slime (and miles): ``--data-source-path asyncdata.integrations.slime.AsyncDataSource``.

It replaces ``slime.rollout.data_source.RolloutDataSourceWithBuffer``: the same arguments, the same prompts in the same
order with the same numbers, the same buffer and filters, and checkpoints from which either can continue. In addition,
worker processes read and render rows while the rollout runs; only the read-ahead is in memory; the buffer is in the
checkpoint, and a rollout that the driver began before it saved the previous one is not (see ``rollout_ledger``); and an
error is raised at every call, instead of a short batch. :class:`ReadOnlyDataSource` is the same without a buffer, like
slime's ``RolloutDataSource``.

The order is slime's own by default, and asyncdata's with ``asyncdata_order: stream`` (see ``config.Options``). Groups
that a rollout took and never gave back are consumed, unless groups are tracked: then those that a fully asynchronous
rollout has not finished, or not trained, when its process dies are served again (see ``tracked_groups``). For miles,
:class:`~asyncdata.integrations.slime.miles_buffer.AsyncDataBuffer` tracks them.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.core.log import get_logger
from asyncdata.integrations.slime import checkpoint as slime_checkpoint
from asyncdata.integrations.slime.base import ReadOnlyDataSource, ReadOnlyError, whole_number
from asyncdata.integrations.slime.buffer import BadGroupError, GroupKeeper, group_index_of, pop_first, take
from asyncdata.integrations.slime.config import import_by_path
from asyncdata.integrations.slime.outcomes import reports_of
from asyncdata.integrations.slime.tracked_groups import TrackedGroups

if TYPE_CHECKING:
    from asyncdata.integrations.slime.base import Process
    from asyncdata.integrations.slime.checkpoint import Found
    from asyncdata.integrations.slime.rollout_ledger import Entry, Moment

__all__ = ("AsyncDataSource", "BadGroupError", "ReadOnlyDataSource", "ReadOnlyError", "source_with")

_log = get_logger(__name__)
_sources: WeakValueDictionary[int, AsyncDataSource] = WeakValueDictionary()
"""By the identity of their arguments, which a living source keeps alive."""


def source_with(args: Any) -> AsyncDataSource | None:
    """The data source of this process that was made with ``args``, the same object; None if there is none."""
    return _sources.get(id(args))


class AsyncDataSource(ReadOnlyDataSource):
    """Groups of prompts for rollouts, and a buffer for groups that rollouts give back.

    May be called from any thread, also from one that runs an event loop; calls run one at a time. A call waits for rows
    that are not read yet, but at most ``asyncdata_timeout_s``. If it fails, nothing has changed.

    :param args: slime's arguments. A missing one has slime's default; asyncdata's own keys are ``asyncdata_*``, as
        :class:`~asyncdata.integrations.slime.config.Options` describes them.
    :ivar buffer: the groups given back, a plain list that filters and plugins may change.
    :ivar buffer_filter: takes groups out of the buffer; called like slime's filters. It may be replaced.
    :ivar metadata: what plugins store here; it is in checkpoints.
    :raises ConfigError: for a setting that cannot work.
    :raises SourceError: for files that cannot be read.
    """

    def __init__(self, args: Any) -> None:
        self.buffer: list[Any] = []
        self._tracked: TrackedGroups | None = None
        self._first_rollout_id = 0
        super().__init__(args)
        _sources[id(args)] = self

    def _set_up(self, process: Process | None) -> None:
        path = self._settings.buffer_filter_path
        self.buffer_filter: Any = pop_first if path is None else import_by_path(path)
        self._keeper = GroupKeeper(
            self._sample_type,
            self._settings.samples_per_group,
            process,
            refuse=self._settings.options.unpersistable == "error",
        )

    # Groups.

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """Exactly ``num_samples`` groups of ``n_samples_per_prompt`` samples: the buffer's first, then fresh ones.

        Over as many epochs as needed. Fresh samples share no mutable object; those of the buffer are the same objects
        that were given back.

        :param num_samples: groups; 0 gives an empty list and changes nothing.
        :raises ConfigError: for anything but a whole number from 0 on.
        :raises FilterError: if the buffer filter fails.
        :raises PrefetchTimeoutError: if rows are not ready in time.
        :raises AsyncDataError: for any other error of the stream; at this call and at every later one.
        """
        number = whole_number("num_samples", num_samples)
        if number == 0:
            return []

        with self._lock:
            self._begin()
            ledger, before = self._ledger, list(self.buffer)
            try:
                taken = take(self.buffer, number, self.buffer_filter, self.args)
                self._ledger = ledger.with_buffer(self._entries()).dropping("buffer_filter", taken.num_dropped)
                fresh = number - len(taken.groups)
                groups = self._feed.groups(fresh, ledger.numbering, self._commit) if fresh else []
            except BaseException:
                self._ledger, self.buffer[:] = ledger, before
                raise

            if self._tracked is not None:
                known = {id(entry.group): entry for entry in ledger.entries}
                served = [known[id(group)] for group in taken.groups] + list(map(self._keeper.served, groups))
                self._tracked = self._tracked.served(served)
            return taken.groups + groups

    def add_samples(self, samples: list[list[Any]] | None) -> None:
        """Give groups back: they are served before fresh ones, and are in every checkpoint until then.

        A snapshot stores them as they are now; the objects themselves are served again. Only the contents of arrays,
        tensors and ``bytes`` of 1 MiB or more are not copied now, but read when a snapshot is written: replace such
        an array, do not write into it.

        :param samples: groups of ``n_samples_per_prompt`` samples, or of lists of samples. None and [] do nothing.
        :raises BadGroupError: an AssertionError, as with slime, that names the first group that cannot be stored;
            none is added then.
        """
        if not samples:
            return

        with self._lock:
            self._begin()
            entries = self._keeper.entries(samples, self._ledger.entries)
            self._ledger = self._ledger.with_buffer((*self._ledger.entries, *entries))
            self.buffer.extend(entry.group for entry in entries)
            self._report(samples)
            if self._tracked is not None:
                back = [self._tracked.find(entry.group, entry.group_index) for entry in entries]
                self._tracked = self._tracked.without(entry for entry in back if entry is not None)

    def report(self, groups: list[list[Any]]) -> int:
        """Remember the rewards of finished samples, each once an epoch; return how many were new.

        For ``asyncdata_outcomes``; without it, nothing happens. Groups that come back, or are consumed or dropped, are
        reported anyway; :func:`~asyncdata.integrations.slime.report_outcomes` does it for slime's own rollouts.
        """
        with self._lock:
            return self._report(groups)

    def _report(self, groups: list[list[Any]]) -> int:
        settings = self._settings
        if settings.options.outcomes is None:
            return 0

        return self._feed.report(reports_of(groups, settings.samples_per_group, settings.reward_key))

    def _take_stock(self) -> None:
        entries = self._ledger.entries
        if len(entries) == len(self.buffer) and all(map(operator.is_, (e.group for e in entries), self.buffer)):
            return

        self._ledger = self._ledger.with_buffer(self._entries())

    def _entries(self) -> list[Entry]:
        """The current buffer. Groups that were not added by :meth:`add_samples` are recorded now."""
        known = {id(entry.group): entry for entry in self._ledger.entries}
        return [
            known.get(id(group)) or self._keeper.entry(group, f"buffer[{number}]")
            for number, group in enumerate(self.buffer)
        ]

    def get_buffer_length(self) -> int:
        """Groups in the buffer."""
        return len(self.buffer)

    def statistics(self) -> dict[str, Any]:
        """As in :class:`ReadOnlyDataSource`, and the numbers of groups that are out or that no checkpoint can store."""
        tracked = self._tracked
        return {
            **super().statistics(),
            "asyncdata_tracked_groups": len(tracked.out) if tracked is not None else 0,
            "asyncdata_unpersistable_groups_total": self._keeper.num_without_record,
        }

    # Tracked groups.

    def track_groups(self) -> None:
        """From now on, a group that is served is in every checkpoint until it is trained, dropped or given back.

        For rollouts that run without end, beside the training: miles' fully asynchronous one, or one of your own. Then
        say where each group ends: :meth:`consume_group`, :meth:`drop_group` or :meth:`add_samples`, with the same list
        that :meth:`get_samples` returned; and :meth:`end_rollout` after each batch. To be called before the first
        group is served. A second call has no effect.
        """
        with self._lock:
            if self._tracked is None:
                self._tracked = TrackedGroups(rollout_id=self._first_rollout_id)

    def consume_group(self, group: list[Any]) -> None:
        """A group is handed over for training, in the current rollout.

        It is in checkpoints of earlier rollouts only, which :meth:`end_rollout` separates.

        :raises ConfigError: if it is not out: it was not served, or was already consumed, dropped or given back.
        """
        with self._lock:
            number = group_index_of(group)
            entry = self._tracking().find(group, number)
            if entry is None:
                raise ConfigError(
                    f"consume_group takes a group that get_samples returned, once: group {number} was not served, or "
                    "was consumed, dropped or given back"
                )

            self._tracked = self._tracking().consumed(entry)
            self._report([group])

    def drop_group(self, group: list[Any], reason: str) -> None:
        """A group is not trained, and will not be served again. It is counted.

        A group that is not out, such as one that was given back, is no longer the rollout's: nothing happens.

        :param reason: under which :meth:`statistics` and checkpoints count it.
        """
        with self._lock:
            entry = self._tracking().find(group, group_index_of(group))
            if entry is not None:
                self._tracked = self._tracking().without((entry,))
                self._ledger = self._ledger.dropping(reason, 1)
                self._report([group])

    def end_rollout(self) -> None:
        """The batch of a rollout is complete. What is consumed from now on belongs to the next rollout.

        The first rollout is the one after that of :meth:`load`, or 0, unless :meth:`begin_rollout` says otherwise.
        """
        with self._lock:
            self._tracked = self._tracking().ended()

    def _tracking(self) -> TrackedGroups:
        if self._tracked is None:
            raise ConfigError("groups are not tracked: call track_groups() before the first group is served")

        return self._tracked

    def _begin(self) -> None:
        if self._tracked is None:
            super()._begin()
            return

        self._take_stock()  # tracked groups are in every checkpoint, so no mark is needed
        if self._told_rollout_id is not None:
            self._tracked = self._tracked.begun(self._told_rollout_id)

    # Checkpoints.

    def load(self, rollout_id: int | None = None) -> None:
        """As :meth:`ReadOnlyDataSource.load`. If groups are tracked, the next rollout is ``rollout_id + 1``."""
        with self._lock:
            super().load(rollout_id)
            self._first_rollout_id = 0 if rollout_id is None else rollout_id + 1
            if self._tracked is not None:
                self._tracked = TrackedGroups(rollout_id=self._first_rollout_id)

    def _moment(self, rollout_id: int | None) -> Moment:
        if self._tracked is None:
            return super()._moment(rollout_id)

        now = self._now()
        return msgspec.structs.replace(now, entries=(*self._tracked.left(rollout_id), *now.entries))

    def _forget(self, rollout_id: int | None) -> None:
        super()._forget(rollout_id)
        if self._tracked is not None:
            self._tracked = self._tracked.saved(rollout_id)

    def _entries_of(self, found: Found, drops: dict[str, int], allowed: set[str]) -> tuple[Entry, ...]:
        records = found.records
        if found.state is not None:
            if lost := [(group.group_index, group.reason) for group in found.state.unsaved]:
                drops["unpersistable"] = drops.get("unpersistable", 0) + len(lost)
                _log.warning("checkpoint.groups_lost", path=found.path, num_groups=len(lost), groups=lost[:5])
            saved, present = found.state.samples_per_group, self._settings.samples_per_group
            if records and saved != present:
                slime_checkpoint.refuse_change("n_samples_per_prompt", str(saved), str(present), allowed)
                drops["n_samples_per_prompt"] = drops.get("n_samples_per_prompt", 0) + len(records)
                records = []
        return tuple(self._keeper.restored(found.opened(record)) for record in records)

    def _fill_buffer(self, entries: tuple[Entry, ...]) -> None:
        self.buffer[:] = [entry.group for entry in entries]
