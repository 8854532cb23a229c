"""The data source for slime (and miles): ``--data-source-path asyncdata.integrations.slime.AsyncDataSource``.

It replaces ``slime.rollout.data_source.RolloutDataSourceWithBuffer``: the same arguments, the same prompts in the same
order with the same numbers, the same buffer and filters, and checkpoints from which either can continue. In addition,
worker processes read and render rows while the rollout runs; only the read-ahead is in memory; the buffer is in the
checkpoint, and a rollout that the driver began before it saved the previous one is not (see ``rollout_ledger``); and an
error is raised at every call, instead of a short batch. :class:`ReadOnlyDataSource` is the same without a buffer, like
slime's ``RolloutDataSource``.

The order is slime's own by default, and asyncdata's with ``asyncdata_order: stream`` (see ``config.Options``). Groups
that a rollout took and never gave back are consumed: those that a fully asynchronous rollout has not finished when its
process dies are not generated again.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from asyncdata.core.log import get_logger
from asyncdata.integrations.slime import checkpoint as slime_checkpoint
from asyncdata.integrations.slime.base import ReadOnlyDataSource, ReadOnlyError, whole_number
from asyncdata.integrations.slime.buffer import BadGroupError, GroupKeeper, pop_first, take
from asyncdata.integrations.slime.config import import_by_path

if TYPE_CHECKING:
    from asyncdata.integrations.slime.base import Process
    from asyncdata.integrations.slime.checkpoint import Found
    from asyncdata.integrations.slime.rollout_ledger import Entry

__all__ = ("AsyncDataSource", "BadGroupError", "ReadOnlyDataSource", "ReadOnlyError")

_log = get_logger(__name__)


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
        super().__init__(args)

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
        """As in :class:`ReadOnlyDataSource`, and the number of groups that no checkpoint can store."""
        return {**super().statistics(), "asyncdata_unpersistable_groups_total": self._keeper.num_without_record}

    # Checkpoints.

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
