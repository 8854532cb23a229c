"""The data source for slime (and miles): ``--data-source-path asyncdata.integrations.slime.AsyncDataSource``.

It takes the place of ``slime.rollout.data_source.RolloutDataSourceWithBuffer``: the same arguments, the same prompts
in the same order with the same numbers, the same buffer and filters, and checkpoints that either can go on from. What
it has beyond that: rows are read and rendered by worker processes while the rollout works; nothing is held but what is
read ahead; the buffer is in the checkpoint, and a rollout that the driver has begun before it saved the one before is
not (``rollout_ledger`` says how); and whatever fails is an error at every call, never a short batch.

The order is slime's own by default, and asyncdata's with ``asyncdata_order: stream`` (see ``slime_config.Options``).
What a rollout took and never gave back is consumed: groups that a fully asynchronous rollout has in the works when its
process dies are not generated again.
"""

from __future__ import annotations

import copy
import operator
import sys
import threading
from typing import TYPE_CHECKING, Any

from asyncdata.errors import ConfigError, SnapshotError, SnapshotMismatchError
from asyncdata.integrations import slime_checkpoint
from asyncdata.integrations.rollout_ledger import Moment, RolloutLedger
from asyncdata.integrations.slime_buffer import BadGroupError, GroupKeeper, pop_first, take
from asyncdata.integrations.slime_config import import_by_path, settings_of
from asyncdata.integrations.slime_dump import dump_tokenizer
from asyncdata.integrations.slime_feeds import feed_of
from asyncdata.integrations.slime_loader import LoaderFeed
from asyncdata.integrations.slime_media import media_process
from asyncdata.integrations.slime_sample import resolve_sample_type
from asyncdata.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from asyncdata.integrations.rollout_ledger import Entry, Numbering
    from asyncdata.integrations.slime_checkpoint import Found
    from asyncdata.integrations.slime_feeds import Feed

__all__ = ("AsyncDataSource", "BadGroupError")

_log = get_logger(__name__)
_HOOKS = ("slime.rollout.sample_hooks", "miles.rollout.sample_hooks")


class AsyncDataSource:
    """Groups of prompts for rollouts, and a buffer for those that rollouts give back.

    May be called from any thread, also from one that runs an event loop; calls come one after the other. A call waits
    for rows that are not read yet, but at most ``asyncdata_timeout_s``, and leaves everything as it was if it fails.

    :param args: slime's arguments. What is not there has slime's default; keys of our own are ``asyncdata_*``, as
        :class:`~asyncdata.integrations.slime_config.Options` describes them.
    :ivar buffer: the groups given back, a plain list that filters and plugins may change.
    :ivar metadata: what plugins keep here; it is in checkpoints.
    :raises ConfigError: for a setting that cannot work.
    :raises SourceError: for files that cannot be read.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.buffer: list[Any] = []
        self.metadata: dict[Any, Any] = {}
        self._settings = settings_of(args)
        self._filter = _filter(self._settings.buffer_filter_path)
        self._lock = threading.RLock()  # a filter may ask for the buffer's length
        self._ledger = RolloutLedger()
        self._sample_type = resolve_sample_type()
        process = media_process(args, self._settings)
        self._keeper = GroupKeeper(
            self._sample_type,
            self._settings.samples_per_group,
            process,
            refuse=self._settings.options.unpersistable == "error",
        )
        self._feed = self._first_feed(process)
        dump_tokenizer(self._settings)

    def _first_feed(self, process: Callable[[dict[str, Any]], Any] | None) -> Feed:
        path = self._settings.options.dataset
        if path is not None and self._settings.is_global:
            return feed_of(import_by_path(path)(self.args), self._settings, self._sample_type)

        if self._settings.source is None:
            return feed_of(None, self._settings, self._sample_type)

        return LoaderFeed(self._settings, self._sample_type, process)

    # Groups.

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """Exactly ``num_samples`` groups of ``n_samples_per_prompt`` samples: the buffer's first, then fresh ones.

        As many epochs as it takes. Fresh samples share nothing that can be changed; those of the buffer are the very
        objects that were given back.

        :param num_samples: groups; 0 gives an empty list and changes nothing.
        :raises ConfigError: for anything but a whole number from 0 on.
        :raises FilterError: if the buffer filter fails.
        :raises PrefetchTimeoutError: if rows are not ready in time.
        :raises AsyncDataError: for whatever else stops the stream; at this call and at every one after it.
        """
        number = _number(num_samples)
        if number == 0:
            return []

        with self._lock:
            self._begin()
            ledger, before = self._ledger, list(self.buffer)
            try:
                taken = take(self.buffer, number, self._filter, self.args)
                self._ledger = ledger.with_buffer(self._entries()).dropping("buffer_filter", taken.num_dropped)
                fresh = number - len(taken.groups)
                groups = self._feed.groups(fresh, ledger.numbering, self._commit) if fresh else []
            except BaseException:
                self._ledger, self.buffer[:] = ledger, before
                raise

            return taken.groups + groups

    def _commit(self, numbering: Numbering) -> None:
        self._ledger = self._ledger.delivered(numbering)

    def add_samples(self, samples: list[list[Any]] | None) -> None:
        """Give groups back: they are served before fresh ones, and are in every checkpoint until then.

        A snapshot will have them as they are now; the objects themselves are kept. Only the bytes of arrays, tensors
        and ``bytes`` from 64 KiB on are not copied now, but read when a snapshot is written: put another array in the
        place of such a one, rather than write into it.

        :param samples: groups of ``n_samples_per_prompt`` samples, or of lists of samples. None and [] do nothing.
        :raises BadGroupError: an AssertionError, as with slime, that names the first group that cannot be kept; none
            is added then.
        """
        if not samples:
            return

        with self._lock:
            self._begin()
            entries = self._keeper.entries(samples, self._ledger.entries)
            self._ledger = self._ledger.with_buffer((*self._ledger.entries, *entries))
            self.buffer.extend(entry.group for entry in entries)

    def _begin(self) -> None:
        """What plugins did to the buffer belongs to the rollout before; then the present one may begin."""
        self._take_stock()
        rollout_id = _current_rollout_id()
        if rollout_id is not None and self._ledger.begins(rollout_id):
            self._ledger = self._ledger.marked(rollout_id, self._feed.state(), copy.deepcopy(self.metadata))

    def _take_stock(self) -> None:
        entries = self._ledger.entries
        if len(entries) == len(self.buffer) and all(map(operator.is_, (e.group for e in entries), self.buffer)):
            return

        self._ledger = self._ledger.with_buffer(self._entries())

    def _entries(self) -> list[Entry]:
        """The buffer as it is. Groups that did not come by :meth:`add_samples` are written down now."""
        known = {id(entry.group): entry for entry in self._ledger.entries}
        return [
            known.get(id(group)) or self._keeper.entry(group, f"buffer[{number}]")
            for number, group in enumerate(self.buffer)
        ]

    # Checkpoints.

    def save(self, rollout_id: int | None) -> None:
        """Write a checkpoint into ``args.save``: what a run needs to go on with the rollout after ``rollout_id``.

        What later rollouts were given or gave back is not in it.

        :raises SnapshotError: if it cannot be written, or the rollout is too long ago; files that were there are whole.
        """
        if not self._settings.is_global:
            return

        folder = self._settings.save_folder
        if folder is None:
            raise ConfigError("there is no folder to save to: give --save")

        with self._lock:
            self._take_stock()
            moment = self._ledger.start_after(rollout_id) or self._now()
            slime_checkpoint.write(
                folder,
                rollout_id,
                moment,
                kind=self._feed.kind,
                samples_per_group=self._settings.samples_per_group,
                drops=self._ledger.drops,
            )
            self._ledger = self._ledger.saved(rollout_id)

    def _now(self) -> Moment:
        return Moment(self._ledger.numbering, self._ledger.entries, self._feed.state(), copy.deepcopy(self.metadata))

    def load(self, rollout_id: int | None = None) -> None:
        """Go on from the checkpoint of ``rollout_id`` in ``args.load``: ours, or else slime's own.

        Without ``--load`` nothing happens. A checkpoint that is not there is a warning, or, under
        ``asyncdata_strict_load``, an error; before the first rollout (-1) there is none to miss.

        :raises SnapshotMismatchError: if it belongs to other data or settings that ``asyncdata_allow_changed`` does
            not name.
        :raises SnapshotError: if it is damaged, or missing under ``asyncdata_strict_load``.
        """
        folder = self._settings.load_folder
        if not self._settings.is_global or folder is None:
            return

        with self._lock:
            found = slime_checkpoint.read(folder, rollout_id)
            if found is None:
                self._miss(folder, rollout_id)
                return

            self._restore(found)

    def _miss(self, folder: str, rollout_id: int | None) -> None:
        if rollout_id is None or rollout_id < 0:
            return

        if self._settings.options.strict_load:
            raise SnapshotError(
                f"AD602 there is no checkpoint of rollout {rollout_id} in {folder}/rollout; the data would begin anew"
            )

        _log.warning("checkpoint.missing", folder=folder, rollout_id=rollout_id)

    def _restore(self, found: Found) -> None:
        allowed = set(self._settings.options.allow_changed)
        drops = dict(found.state.drops) if found.state is not None else {}
        records = found.records
        if found.state is not None:
            self._check_kind(found.state.kind)
            if lost := found.state.unsaved:
                drops["unpersistable"] = drops.get("unpersistable", 0) + len(lost)
            saved, present = found.state.samples_per_group, self._settings.samples_per_group
            if records and saved != present:
                slime_checkpoint.refuse_change("n_samples_per_prompt", str(saved), str(present), allowed)
                drops["n_samples_per_prompt"] = drops.get("n_samples_per_prompt", 0) + len(records)
                records = []
        entries = tuple(self._keeper.restored(found.opened(record)) for record in records)
        numbering = self._feed.restore(found.dataset, found.numbering, allowed - {"n_samples_per_prompt"})
        self._ledger = RolloutLedger(numbering=numbering, entries=entries, drops=drops)
        self.buffer[:] = [entry.group for entry in entries]
        self.metadata = dict(found.metadata)
        if found.state is not None and found.state.unsaved:
            groups = [(lost.group_index, lost.reason) for lost in found.state.unsaved]
            _log.warning("checkpoint.groups_lost", path=found.path, num_groups=len(groups), groups=groups[:5])
        _log.info("checkpoint.restored", path=found.path, num_buffered_groups=len(entries))

    def _check_kind(self, kind: str) -> None:
        if kind != self._feed.kind:
            raise SnapshotMismatchError(
                f"AD603 this checkpoint is of another kind of dataset: saved {kind}, present {self._feed.kind}. Its "
                "place means nothing here; begin a new run, or give back the old dataset",
                {"dataset": (kind, self._feed.kind)},
            )

    # What drivers and plugins look at.

    def __len__(self) -> int:
        """Prompts of an epoch, the buffer not counted; 0 without a dataset.

        :raises TypeError: where nobody can know it: give ``--num-rollout``.
        """
        return 0 if self._feed.dataset is None else len(self._feed.dataset)

    @property
    def dataset(self) -> Any:
        """Where fresh prompts come from; None: they are empty.

        Another one may be put in its place, as long as it has ``get_next_batch``, or ``samples`` and a length.
        """
        return self._feed.dataset

    @dataset.setter
    def dataset(self, dataset: Any) -> None:
        with self._lock:
            if dataset is self._feed.dataset:
                return

            feed = feed_of(dataset, self._settings, self._sample_type)
            self._feed.close()
            self._feed = feed

    @property
    def epoch_id(self) -> int:
        """The epoch of the last prompt."""
        return self._ledger.numbering.epoch_id

    @property
    def sample_offset(self) -> int:
        """Prompts of it that were delivered; at its very end, the next one has not begun."""
        return self._ledger.numbering.sample_offset

    @property
    def sample_group_index(self) -> int:
        """Number of the next group."""
        return self._ledger.numbering.sample_group_index

    @property
    def sample_index(self) -> int:
        """Number of the next sample."""
        return self._ledger.numbering.sample_index

    def update_metadata(self, metadata: Mapping[Any, Any]) -> None:
        """Add to the plugins' metadata."""
        with self._lock:
            self.metadata.update(metadata)

    def get_metadata(self) -> dict[Any, Any]:
        """The plugins' metadata."""
        return self.metadata

    def get_buffer_length(self) -> int:
        """Groups in the buffer."""
        return len(self.buffer)

    def set_train_parallel_config(self, config: Mapping[str, Any]) -> None:
        """``dp_size`` ranks are fed: so many times as much is read ahead. Never needed, and no part of the order."""
        dp_size = config.get("dp_size") or 1
        if not isinstance(dp_size, int) or dp_size < 1:
            raise ConfigError(f"dp_size must be a whole number from 1 on, got {dp_size!r}")

        with self._lock:
            self._feed.set_dp_size(dp_size)

    def statistics(self) -> dict[str, Any]:
        """What was delivered and dropped, flat: the loader's numbers, and what this class counts of groups."""
        with self._lock:
            numbering, drops = self._ledger.numbering, self._ledger.drops
            return {
                **(self._feed.statistics() if isinstance(self._feed, LoaderFeed) else {}),
                "asyncdata_groups_total": numbering.sample_group_index,
                "asyncdata_samples_total": numbering.sample_index,
                "asyncdata_buffered_groups": len(self.buffer),
                "asyncdata_unpersistable_groups_total": self._keeper.num_without_record,
                "asyncdata_dropped_groups_total": sum(drops.values()),
                **{f"asyncdata_dropped_groups_{reason}_total": number for reason, number in drops.items()},
            }

    def close(self) -> None:
        """Stop the workers. slime does not call it: it comes by itself, at the latest with the interpreter's end."""
        self._feed.close()


def _current_rollout_id() -> int | None:
    """What the driver says is being generated; looked up, as whoever has not imported the driver is not run by it."""
    for name in _HOOKS:
        found = getattr(sys.modules.get(name), "_current_rollout_id", None)
        if isinstance(found, int):
            return found
    return None


def _filter(path: str | None) -> Any:
    return pop_first if path is None else import_by_path(path)


def _number(num_samples: Any) -> int:
    try:
        number = operator.index(num_samples)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(f"AD440 num_samples must be a whole number from 0 on, got {num_samples!r}")

    return number
