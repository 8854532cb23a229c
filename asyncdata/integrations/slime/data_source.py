"""The data source for slime (and miles): ``--data-source-path asyncdata.integrations.slime.AsyncDataSource``.

It replaces ``slime.rollout.data_source.RolloutDataSourceWithBuffer``: the same arguments, the same prompts in the same
order with the same numbers, the same buffer and filters, and checkpoints from which either can continue. In addition,
worker processes read and render rows while the rollout runs; only the read-ahead is in memory; the buffer is in the
checkpoint, and a rollout that the driver began before it saved the previous one is not (see ``rollout_ledger``); and an
error is raised at every call, instead of a short batch. :class:`ReadOnlyDataSource` is the same without a buffer, like
slime's ``RolloutDataSource``.

The order is slime's own by default, and asyncdata's with ``asyncdata_order: stream`` (see ``config.Options``). Groups
that a rollout took and never gave back are consumed, unless groups are tracked: then those that a fully asynchronous
rollout has not finished, or not trained, when its process dies are served again (see ``rollout_ledger``). For miles,
:class:`~asyncdata.integrations.slime.async_rollouts.AsyncDataBuffer` tracks them.
"""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from asyncdata.core.errors import ConfigError, InvalidGroupError, SnapshotError, SnapshotMismatchError, get_logger
from asyncdata.core.settings import whole_number
from asyncdata.delivery.ledger import not_out, not_tracked
from asyncdata.integrations.slime import checkpoint as slime_checkpoint
from asyncdata.integrations.slime.buffer import BadGroupError, GroupKeeper, group_index_of, pop_first, scores_of, take
from asyncdata.integrations.slime.checkpoint import Found, GroupStore
from asyncdata.integrations.slime.config import dump_tokenizer, settings_of
from asyncdata.integrations.slime.feeds import Feed, feed_of
from asyncdata.integrations.slime.loader_feed import LoaderFeed, media_process
from asyncdata.integrations.slime.rollout_ledger import Entry, Moment, RolloutLedger
from asyncdata.integrations.slime.samples import (
    current_rollout_id,
    import_by_path,
    package_of,
    register,
    resolve_sample_type,
    tells_rollouts,
)

__all__ = ("AsyncDataSource", "BadGroupError", "ReadOnlyDataSource", "ReadOnlyError", "report_outcomes", "source_with")

_log = get_logger(__name__)
_OWN = {"n_samples_per_prompt", "buffer"}
"""Names in ``asyncdata_allow_changed`` that the loader does not have."""

_MILES_BUFFER = "asyncdata.integrations.slime.AsyncDataBuffer"


class ReadOnlyError(InvalidGroupError, RuntimeError):
    """Groups were given back to a data source that has no buffer."""


def _number(name: str, about: str) -> Any:
    """One of the position's four numbers as an attribute. Setting ``epoch_id`` or ``sample_offset`` goes there."""

    def get(source: ReadOnlyDataSource) -> int:
        return getattr(source._feed.numbering, name)  # type: ignore[no-any-return]  # noqa: SLF001 - its own

    def set_to(source: ReadOnlyDataSource, number: int) -> None:
        source._go_to(name, _counted(name, number))  # noqa: SLF001 - its own

    return property(get, set_to, doc=about)


class ReadOnlyDataSource:
    """Groups of prompts for rollouts that give no groups back.

    May be called from any thread, also from one that runs an event loop; calls run one at a time. A call waits for rows
    that are not read yet, but at most ``asyncdata_timeout_s``. If it fails, nothing has changed.

    :param args: slime's arguments. A missing one has slime's default; asyncdata's own keys are ``asyncdata_*``, as
        :class:`~asyncdata.integrations.slime.config.Options` describes them.
    :ivar metadata: what plugins store here; it is in checkpoints.
    :raises ConfigError: for a setting that cannot work.
    :raises SourceError: for files that cannot be read.
    """

    _has_buffer = False

    def __init__(self, args: Any) -> None:
        self.args = args
        self.metadata: dict[Any, Any] = {}
        self._settings = settings = settings_of(args)
        self._lock = threading.RLock()  # a filter may ask for the buffer's length
        self._given_back: list[Any] = []
        self._ledger = RolloutLedger()
        self._told_rollout_id: int | None = None
        self._first_rollout_id = 0
        self._sample_type = resolve_sample_type()
        path = settings.buffer_filter_path if self._has_buffer else None
        self.buffer_filter: Any = pop_first if path is None else import_by_path(path)
        process = media_process(args, settings)
        refuse = settings.options.unpersistable == "error"
        self._keeper = GroupKeeper(self._sample_type, settings.samples_per_group, process, refuse=refuse)
        path = settings.options.dataset if settings.is_global else None
        if path is None and settings.source is not None:
            self._feed: Feed = LoaderFeed(settings, self._sample_type, process, args).opened()
        else:
            dataset = None if path is None else import_by_path(path)(args)
            self._feed = feed_of(dataset, settings, self._sample_type)
        dump_tokenizer(settings)
        package = package_of(self._sample_type)
        register(ReadOnlyDataSource, package)
        self._say_if_no_rollout_is_told(package)

    # Groups.

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """Exactly ``num_samples`` groups of ``n_samples_per_prompt`` samples: the buffer's first, then fresh ones.

        Over as many epochs as needed. Fresh samples share no mutable object; the buffer's are the same objects
        that were given back.

        :param num_samples: groups; 0 gives an empty list and changes nothing.
        :raises ConfigError: for anything but a whole number from 0 on.
        :raises FilterError: if the buffer filter fails.
        :raises PrefetchTimeoutError: if rows are not ready in time.
        :raises AsyncDataError: for any other error of the stream; at this call and at every later one.
        """
        number = _counted("num_samples", num_samples)
        if number == 0:
            return []

        with self._lock:
            self._begin()
            ledger, before = self._ledger, list(self._given_back)
            try:
                taken = take(self._given_back, number, self.buffer_filter, self.args)
                self._ledger = ledger.with_buffer(self._entries()).dropping("buffer_filter", taken.num_dropped)
                fresh = number - len(taken.groups)
                groups = self._feed.groups(fresh) if fresh else []
            except BaseException:
                self._ledger, self._given_back[:] = ledger, before
                raise

            if ledger.out is not None:
                known = {id(entry.group): entry for entry in ledger.entries}
                served = [known[id(group)] for group in taken.groups] + list(map(self._keeper.served, groups))
                self._ledger = self._ledger.served(served)
            return taken.groups + groups

    def add_samples(self, samples: list[list[Any]] | None) -> None:
        """Refused, as there is no buffer. None and [] do nothing.

        :raises ReadOnlyError: a RuntimeError, as with slime.
        """
        if samples:
            raise ReadOnlyError(
                f"AD432 a {type(self).__name__} takes no groups back, as it has no buffer; use "
                "asyncdata.integrations.slime.AsyncDataSource"
            )

    def _entries(self) -> list[Entry]:
        """The current buffer. Groups that were not added by :meth:`add_samples` are recorded now."""
        known = {id(entry.group): entry for entry in self._ledger.entries}
        return [
            known.get(id(group)) or self._keeper.entry(group, f"buffer[{number}]")
            for number, group in enumerate(self._given_back)
        ]

    def _take_stock(self) -> None:
        """Note what plugins have changed in the buffer."""
        entries = self._ledger.entries
        if len(entries) != len(self._given_back) or not all(
            map(operator.is_, (e.group for e in entries), self._given_back)
        ):
            self._ledger = self._ledger.with_buffer(self._entries())

    # Rollouts.

    def begin_rollout(self, rollout_id: int) -> None:
        """Say which rollout is generated from now on, if the driver does not: older versions of slime, and miles.

        To be called by your own rollout function, before it takes groups. What is delivered and given back from here on
        belongs to that rollout, so that a checkpoint of an earlier one does not contain it. Not for evaluations.

        :param rollout_id: the rollout. A rollout that has already begun has no effect.
        """
        number = _counted("rollout_id", rollout_id)
        with self._lock:
            self._told_rollout_id = number
            self._begin()

    def _say_if_no_rollout_is_told(self, package: str | None) -> None:
        settings = self._settings
        if package is None or settings.save_folder is None or not settings.is_global or settings.is_colocated:
            return

        if tells_rollouts() or getattr(self.args, "custom_async_data_buffer_path", None) == _MILES_BUFFER:
            return

        effect = "a restart of train_async.py skips the rollout that had begun before the checkpoint was written"
        if getattr(self.args, "fully_async", False):
            effect += (
                f", and the groups of miles' data buffer: --custom-async-data-buffer-path {_MILES_BUFFER} keeps them"
            )
        _log.warning("rollout.not_told", package=package, effect=effect)

    def _begin(self) -> None:
        """Count the plugins' changes of the buffer to the previous rollout; then begin the current rollout."""
        self._take_stock()
        rollout_id = self._told_rollout_id
        if rollout_id is None and self._ledger.out is None:
            rollout_id = current_rollout_id()
        if rollout_id is not None:
            self._ledger = self._ledger.begun(rollout_id, self._now)

    def _now(self) -> Moment:
        return Moment(self._feed.numbering, self._ledger.entries, self._feed.state(), copy.deepcopy(self.metadata))

    # Checkpoints.

    def save(self, rollout_id: int | None) -> None:
        """Write a checkpoint into ``args.save``: what a run needs to continue with the rollout after ``rollout_id``.

        It does not contain what later rollouts were given or gave back.

        :raises SnapshotError: if it cannot be written, or the rollout is too long ago; existing files are unchanged.
        """
        if not self._settings.is_global:
            return

        folder = self._settings.save_folder
        if folder is None:
            raise ConfigError("there is no folder to save to: give --save")

        with self._lock:
            self._take_stock()
            slime_checkpoint.write(
                folder,
                rollout_id,
                self._ledger.moment_after(rollout_id, self._now),
                kind=self._feed.kind,
                samples_per_group=self._settings.samples_per_group,
                drops=self._ledger.drops,
            )
            self._ledger = self._ledger.saved(rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        """Continue from the checkpoint of ``rollout_id`` in ``args.load``: asyncdata's, otherwise slime's own.

        Without ``--load`` nothing is read. A missing checkpoint is a warning, or, with ``asyncdata_strict_load``, an
        error; before the first rollout (-1) there is none. If groups are tracked, the next rollout is
        ``rollout_id + 1``.

        :raises SnapshotMismatchError: if it belongs to other data or settings that ``asyncdata_allow_changed`` does
            not name.
        :raises SnapshotError: if it is damaged, or missing with ``asyncdata_strict_load``.
        """
        folder = self._settings.load_folder
        with self._lock:
            is_tracked = self._ledger.out is not None
            if self._settings.is_global and folder is not None:
                found = slime_checkpoint.read(folder, rollout_id)
                if found is not None:
                    self._restore(found, folder)
                elif rollout_id is not None and rollout_id >= 0:
                    self._miss(folder, rollout_id)
            self._first_rollout_id = 0 if rollout_id is None else rollout_id + 1
            if is_tracked:
                self._ledger = self._ledger.tracking(self._first_rollout_id)

    def _miss(self, folder: str, rollout_id: int) -> None:
        if self._settings.options.strict_load:
            raise SnapshotError(
                f"AD602 there is no checkpoint of rollout {rollout_id} in {folder}/rollout; the data would start from "
                "the beginning"
            )

        _log.warning("checkpoint.missing", folder=folder, rollout_id=rollout_id)

    def _restore(self, found: Found, folder: str) -> None:
        allowed = set(self._settings.options.allow_changed)
        saved, present = None if found.state is None else found.state.kind, self._feed.kind
        if saved not in (None, present):
            raise SnapshotMismatchError(
                f"AD603 this checkpoint is of another kind of dataset: saved {saved}, present {present}. Its "
                "position has no meaning here; start a new run, or use the old dataset",
                {"dataset": (saved, present)},
            )

        ledger = self._ledger_of(found, GroupStore(folder), allowed)
        self._feed.restore(found.dataset, found.numbering, allowed - _OWN)
        self._ledger = ledger
        self._told_rollout_id = None
        self._given_back[:] = [entry.group for entry in ledger.entries]
        self.metadata = dict(found.metadata)
        _log.info("checkpoint.restored", path=found.path, num_buffered_groups=len(ledger.entries))

    def _ledger_of(self, found: Found, store: GroupStore, allowed: set[str]) -> RolloutLedger:
        """The groups of a checkpoint that will be served again; all others are counted as dropped."""
        records, state = found.records, found.state
        if state is None:
            return RolloutLedger()

        ledger = RolloutLedger(drops=dict(state.drops))
        if lost := [(group.group_index, group.reason) for group in state.unsaved]:
            ledger = ledger.dropping("unpersistable", len(lost))
            _log.warning("checkpoint.groups_lost", path=found.path, num_groups=len(lost), groups=lost[:5])
        if records and not self._has_buffer:
            present = "none (a read-only data source)"
            slime_checkpoint.refuse_change("buffer", f"{len(records)} groups", present, allowed)
            return ledger.dropping("read_only", len(records))

        saved, wanted = state.samples_per_group, self._settings.samples_per_group
        if records and saved != wanted:
            slime_checkpoint.refuse_change("n_samples_per_prompt", str(saved), str(wanted), allowed)
            return ledger.dropping("n_samples_per_prompt", len(records))

        return ledger.with_buffer(self._keeper.restored(store.open(record)) for record in records)

    # Attributes that drivers and plugins read.

    def __len__(self) -> int:
        """Prompts of an epoch, without the buffer; 0 without a dataset.

        :raises TypeError: if it is not known: give ``--num-rollout``.
        """
        return 0 if self._feed.dataset is None else len(self._feed.dataset)

    @property
    def dataset(self) -> Any:
        """The source of fresh prompts; None: they are empty. Like slime's, it has ``samples``, by their numbers.

        It may be replaced by any object that has ``get_next_batch``, or ``samples`` and a length.
        """
        return self._feed.dataset

    @dataset.setter
    def dataset(self, dataset: Any) -> None:
        with self._lock:
            before = self._feed
            if dataset is not before.dataset:
                feed = feed_of(dataset, self._settings, self._sample_type)
                feed.numbering = before.numbering
                before.close()
                self._feed = feed

    epoch_id = _number("epoch_id", "The epoch of the last prompt. May be set, as all four numbers.")
    sample_offset = _number(
        "sample_offset", "Prompts of it that were delivered; at its very end, the next epoch has not begun."
    )
    sample_group_index = _number("sample_group_index", "Number of the next group.")
    sample_index = _number("sample_index", "Number of the next sample.")

    def _go_to(self, name: str, number: int) -> None:
        with self._lock:
            self._begin()
            before = self._feed.numbering
            after = msgspec.structs.replace(before, **{name: number})
            if (after.epoch_id, after.sample_offset) == (before.epoch_id, before.sample_offset):
                self._feed.numbering = after
            else:
                self._feed.go_to(after)

    def update_metadata(self, metadata: Mapping[Any, Any]) -> None:
        """Add to the plugins' metadata."""
        with self._lock:
            self.metadata.update(metadata)

    def get_metadata(self) -> dict[Any, Any]:
        """The plugins' metadata."""
        return self.metadata

    def get_buffer_length(self) -> int | None:
        """Groups in the buffer; None, as with miles, if there is no buffer."""
        return len(self._given_back) if self._has_buffer else None

    def set_train_parallel_config(self, config: Mapping[str, Any]) -> None:
        """Read ``dp_size`` times as much ahead. Never needed, and does not change the order."""
        dp_size = config.get("dp_size") or 1
        if not isinstance(dp_size, int) or dp_size < 1:
            raise ConfigError(f"dp_size must be a whole number from 1 on, got {dp_size!r}")

        with self._lock:
            self._feed.set_dp_size(dp_size)

    def statistics(self) -> dict[str, Any]:
        """Flat numbers: the loader's statistics, and the groups delivered, buffered, dropped, tracked, not storable."""
        with self._lock:
            numbering, ledger = self._feed.numbering, self._ledger
            return {
                **self._feed.statistics(),
                "asyncdata_groups_total": numbering.sample_group_index,
                "asyncdata_samples_total": numbering.sample_index,
                "asyncdata_buffered_groups": len(self._given_back),
                "asyncdata_dropped_groups_total": sum(ledger.drops.values()),
                **{f"asyncdata_dropped_groups_{reason}_total": number for reason, number in ledger.drops.items()},
                "asyncdata_tracked_groups": len(ledger.out or ()),
                "asyncdata_unpersistable_groups_total": self._keeper.num_without_record,
            }

    def close(self) -> None:
        """Stop the workers. slime does not call it: it is called automatically, at the latest when Python ends."""
        self._feed.close()


class AsyncDataSource(ReadOnlyDataSource):
    """Groups of prompts for rollouts, and a buffer for groups that rollouts give back.

    The rest is as with :class:`ReadOnlyDataSource`.

    :ivar buffer_filter: takes groups out of the buffer; called like slime's filters. It may be replaced.
    """

    _has_buffer = True

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        _sources[id(args)] = self

    @property
    def buffer(self) -> list[Any]:
        """The groups given back, a plain list that filters and plugins may change, or replace."""
        return self._given_back

    @buffer.setter
    def buffer(self, groups: list[Any]) -> None:
        self._given_back = groups

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
            self._given_back.extend(entry.group for entry in entries)
            self._report(samples)
            back = (self._ledger.find(entry.group, entry.group_index) for entry in entries)
            self._ledger = self._ledger.ended(*(entry for entry in back if entry is not None))

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

        attempts = settings.samples_per_group
        return self._feed.report(scores_of(groups, attempts, settings.reward_key), attempts)

    # Tracked groups.

    def track_groups(self) -> None:
        """From now on, a group that is served is in every checkpoint until it is trained, dropped or given back.

        For rollouts that run without end, beside the training: miles' fully asynchronous one, or one of your own. Then
        say where each group ends: :meth:`consume_group`, :meth:`drop_group` or :meth:`add_samples`, with the same list
        that :meth:`get_samples` returned; and :meth:`end_rollout` after each batch. To be called before the first
        group is served. A second call has no effect.
        """
        with self._lock:
            if self._ledger.out is None:
                self._ledger = self._ledger.tracking(self._first_rollout_id)

    def consume_group(self, group: list[Any]) -> None:
        """A group is handed over for training, in the current rollout.

        It is in checkpoints of earlier rollouts only, which :meth:`end_rollout` separates.

        :raises ConfigError: if it is not out: it was not served, or was already consumed, dropped or given back.
        """
        with self._lock:
            number = group_index_of(group)
            entry = self._tracking().find(group, number)
            if entry is None:
                raise not_out("consume_group", number)

            self._ledger = self._ledger.consumed(entry)
            self._report([group])

    def drop_group(self, group: list[Any], reason: str) -> None:
        """A group is not trained, and will not be served again. It is counted.

        A group that is not out, such as one that was given back, is no longer the rollout's: nothing happens.

        :param reason: under which :meth:`statistics` and checkpoints count it.
        """
        with self._lock:
            entry = self._tracking().find(group, group_index_of(group))
            if entry is not None:
                self._ledger = self._ledger.ended(entry).dropping(reason, 1)
                self._report([group])

    def end_rollout(self) -> None:
        """The batch of a rollout is complete. What is consumed from now on belongs to the next rollout.

        The first rollout is the one after that of :meth:`load`, or 0, unless :meth:`begin_rollout` says otherwise.
        """
        with self._lock:
            ledger = self._tracking()
            self._ledger = ledger.begun(ledger.rollout_id + 1, self._now)

    def _tracking(self) -> RolloutLedger:
        if self._ledger.out is None:
            raise not_tracked("track_groups")

        return self._ledger


_sources: WeakValueDictionary[int, AsyncDataSource] = WeakValueDictionary()
"""By the identity of their arguments, which a living source keeps alive."""


def source_with(args: Any) -> AsyncDataSource | None:
    """The data source of this process that was made with ``args``, the same object; None if there is none."""
    return _sources.get(id(args))


def report_outcomes(args: Any, all_samples: list[list[Any]], data_source: Any) -> None:
    """Report all finished groups of a rollout: ``--rollout-all-samples-process-path`` names this function.

    slime calls it also with those that its dynamic filter dropped.

    :param data_source: an :class:`~asyncdata.integrations.slime.AsyncDataSource`, or its ``get_samples``, which is what
        slime's own rollout passes.
    :raises ConfigError: for another data source.
    """
    source = getattr(data_source, "__self__", data_source)
    if not hasattr(source, "report"):
        raise ConfigError(
            f"report_outcomes needs asyncdata's data source, got {type(source).__name__}: give --data-source-path "
            "asyncdata.integrations.slime.AsyncDataSource"
        )

    source.report(all_samples)


def _counted(name: str, value: Any) -> int:
    """``value`` as an int.

    :raises ConfigError: for anything but a whole number from 0 on.
    """
    number = whole_number(value)
    if number < 0:
        raise ConfigError(f"AD440 {name} must be a whole number from 0 on, got {value!r}")

    return number
