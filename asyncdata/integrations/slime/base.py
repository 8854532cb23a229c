"""The data source without a buffer, as ``slime.rollout.data_source.RolloutDataSource``."""

from __future__ import annotations

import copy
import operator
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.errors import ConfigError, InvalidGroupError, SnapshotError, SnapshotMismatchError
from asyncdata.core.log import get_logger
from asyncdata.integrations.slime import checkpoint as slime_checkpoint
from asyncdata.integrations.slime.config import import_by_path, settings_of
from asyncdata.integrations.slime.driver import current_rollout_id, package_of, register, tells_rollouts
from asyncdata.integrations.slime.dump import dump_tokenizer
from asyncdata.integrations.slime.feeds import feed_of
from asyncdata.integrations.slime.loader_feed import LoaderFeed
from asyncdata.integrations.slime.media import media_process
from asyncdata.integrations.slime.rollout_ledger import Moment, RolloutLedger
from asyncdata.integrations.slime.sample import resolve_sample_type

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from asyncdata.integrations.slime.checkpoint import Found
    from asyncdata.integrations.slime.feeds import Feed
    from asyncdata.integrations.slime.rollout_ledger import Entry, Numbering

    Process = Callable[[dict[str, Any]], Any]

__all__ = ("ReadOnlyDataSource", "ReadOnlyError", "whole_number")

_log = get_logger(__name__)
_OWN = {"n_samples_per_prompt", "buffer"}
"""Names in ``asyncdata_allow_changed`` that the loader does not have."""

_MILES_BUFFER = "asyncdata.integrations.slime.AsyncDataBuffer"


class ReadOnlyError(InvalidGroupError, RuntimeError):
    """Groups were given back to a data source that has no buffer."""


def _number(name: str, about: str) -> Any:
    """A number of the ledger as an attribute. Setting ``epoch_id`` or ``sample_offset`` goes to that position."""

    def get(source: ReadOnlyDataSource) -> int:
        return getattr(source._ledger.numbering, name)  # type: ignore[no-any-return]  # noqa: SLF001 - its own

    def set_to(source: ReadOnlyDataSource, number: int) -> None:
        source._go_to(**{name: number})  # noqa: SLF001 - its own

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

    def __init__(self, args: Any) -> None:
        self.args = args
        self.metadata: dict[Any, Any] = {}
        self._settings = settings_of(args)
        self._lock = threading.RLock()  # a filter may ask for the buffer's length
        self._ledger = RolloutLedger()
        self._told_rollout_id: int | None = None
        self._sample_type = resolve_sample_type()
        process = media_process(args, self._settings)
        self._set_up(process)
        self._feed = self._first_feed(process)
        dump_tokenizer(self._settings)
        package = package_of(self._sample_type)
        register(ReadOnlyDataSource, package)
        self._say_if_no_rollout_is_told(package)

    def _set_up(self, process: Process | None) -> None:
        """Called before anything is read."""

    def _first_feed(self, process: Process | None) -> Feed:
        path = self._settings.options.dataset
        if path is not None and self._settings.is_global:
            return feed_of(import_by_path(path)(self.args), self._settings, self._sample_type)

        if self._settings.source is None:
            return feed_of(None, self._settings, self._sample_type)

        return LoaderFeed(self._settings, self._sample_type, process)

    # Groups.

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """Exactly ``num_samples`` fresh groups of ``n_samples_per_prompt`` samples, over as many epochs as needed.

        They share no mutable object.

        :param num_samples: groups; 0 gives an empty list and changes nothing.
        :raises ConfigError: for anything but a whole number from 0 on.
        :raises PrefetchTimeoutError: if rows are not ready in time.
        :raises AsyncDataError: for any other error of the stream; at this call and at every later one.
        """
        number = whole_number("num_samples", num_samples)
        if number == 0:
            return []

        with self._lock:
            self._begin()
            ledger = self._ledger
            try:
                return self._feed.groups(number, ledger.numbering, self._commit)
            except BaseException:
                self._ledger = ledger
                raise

    def _commit(self, numbering: Numbering) -> None:
        self._ledger = self._ledger.delivered(numbering)

    def add_samples(self, samples: list[list[Any]] | None) -> None:
        """Refused, as there is no buffer. None and [] do nothing.

        :raises ReadOnlyError: a RuntimeError, as with slime.
        """
        if samples:
            raise ReadOnlyError(
                f"AD432 a {type(self).__name__} takes no groups back, as it has no buffer; use "
                "asyncdata.integrations.slime.AsyncDataSource"
            )

    # Rollouts.

    def begin_rollout(self, rollout_id: int) -> None:
        """Say which rollout is generated from now on, if the driver does not: older versions of slime, and miles.

        To be called by your own rollout function, before it takes groups. What is delivered and given back from here on
        belongs to that rollout, so that a checkpoint of an earlier one does not contain it. Not for evaluations.

        :param rollout_id: the rollout. A rollout that has already begun has no effect.
        """
        number = whole_number("rollout_id", rollout_id)
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
        rollout_id = self._told_rollout_id if self._told_rollout_id is not None else current_rollout_id()
        if rollout_id is not None and self._ledger.begins(rollout_id):
            self._ledger = self._ledger.marked(rollout_id, self._feed.state(), copy.deepcopy(self.metadata))

    def _take_stock(self) -> None:
        """Without a buffer, plugins can have changed nothing."""

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
            moment = self._moment(rollout_id)
            slime_checkpoint.write(
                folder,
                rollout_id,
                moment,
                kind=self._feed.kind,
                samples_per_group=self._settings.samples_per_group,
                drops=self._ledger.drops,
            )
            self._forget(rollout_id)

    def _moment(self, rollout_id: int | None) -> Moment:
        """What a checkpoint of ``rollout_id`` has."""
        return self._ledger.start_after(rollout_id) or self._now()

    def _forget(self, rollout_id: int | None) -> None:
        """A checkpoint of ``rollout_id`` is written."""
        self._ledger = self._ledger.saved(rollout_id)

    def _now(self) -> Moment:
        return Moment(self._ledger.numbering, self._ledger.entries, self._feed.state(), copy.deepcopy(self.metadata))

    def load(self, rollout_id: int | None = None) -> None:
        """Continue from the checkpoint of ``rollout_id`` in ``args.load``: asyncdata's, otherwise slime's own.

        Without ``--load`` nothing happens. A missing checkpoint is a warning, or, with ``asyncdata_strict_load``, an
        error; before the first rollout (-1) there is none.

        :raises SnapshotMismatchError: if it belongs to other data or settings that ``asyncdata_allow_changed`` does
            not name.
        :raises SnapshotError: if it is damaged, or missing with ``asyncdata_strict_load``.
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
                f"AD602 there is no checkpoint of rollout {rollout_id} in {folder}/rollout; the data would start from "
                "the beginning"
            )

        _log.warning("checkpoint.missing", folder=folder, rollout_id=rollout_id)

    def _restore(self, found: Found) -> None:
        allowed = set(self._settings.options.allow_changed)
        drops = dict(found.state.drops) if found.state is not None else {}
        if found.state is not None:
            self._check_kind(found.state.kind)
        entries = self._entries_of(found, drops, allowed)
        numbering = self._feed.restore(found.dataset, found.numbering, allowed - _OWN)
        self._ledger = RolloutLedger(numbering=numbering, entries=entries, drops=drops)
        self._told_rollout_id = None
        self._fill_buffer(entries)
        self.metadata = dict(found.metadata)
        _log.info("checkpoint.restored", path=found.path, num_buffered_groups=len(entries))

    def _check_kind(self, kind: str) -> None:
        if kind != self._feed.kind:
            raise SnapshotMismatchError(
                f"AD603 this checkpoint is of another kind of dataset: saved {kind}, present {self._feed.kind}. Its "
                "position has no meaning here; start a new run, or use the old dataset",
                {"dataset": (kind, self._feed.kind)},
            )

    def _entries_of(self, found: Found, drops: dict[str, int], allowed: set[str]) -> tuple[Entry, ...]:
        """The groups of a checkpoint that will be served again; all others are added to ``drops``."""
        if found.records:
            number = len(found.records)
            slime_checkpoint.refuse_change("buffer", f"{number} groups", "none (a read-only data source)", allowed)
            drops["read_only"] = drops.get("read_only", 0) + number
        return ()

    def _fill_buffer(self, entries: tuple[Entry, ...]) -> None:
        """Without a buffer, there is nothing to do."""

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
            if dataset is self._feed.dataset:
                return

            feed = feed_of(dataset, self._settings, self._sample_type)
            self._feed.close()
            self._feed = feed

    epoch_id = _number("epoch_id", "The epoch of the last prompt. May be set, as all four numbers.")
    sample_offset = _number(
        "sample_offset", "Prompts of it that were delivered; at its very end, the next epoch has not begun."
    )
    sample_group_index = _number("sample_group_index", "Number of the next group.")
    sample_index = _number("sample_index", "Number of the next sample.")

    def _go_to(self, **numbers: Any) -> None:
        found = {name: whole_number(name, number) for name, number in numbers.items()}
        with self._lock:
            self._begin()
            before = self._ledger.numbering
            after = msgspec.structs.replace(before, **found)
            if (after.epoch_id, after.sample_offset) != (before.epoch_id, before.sample_offset):
                self._feed.go_to(after)
            self._ledger = self._ledger.delivered(after)

    def update_metadata(self, metadata: Mapping[Any, Any]) -> None:
        """Add to the plugins' metadata."""
        with self._lock:
            self.metadata.update(metadata)

    def get_metadata(self) -> dict[Any, Any]:
        """The plugins' metadata."""
        return self.metadata

    def get_buffer_length(self) -> int | None:
        """Groups in the buffer; None, as with miles, if there is no buffer."""
        return None

    def set_train_parallel_config(self, config: Mapping[str, Any]) -> None:
        """Read ``dp_size`` times as much ahead. Never needed, and does not change the order."""
        dp_size = config.get("dp_size") or 1
        if not isinstance(dp_size, int) or dp_size < 1:
            raise ConfigError(f"dp_size must be a whole number from 1 on, got {dp_size!r}")

        with self._lock:
            self._feed.set_dp_size(dp_size)

    def statistics(self) -> dict[str, Any]:
        """Flat numbers: the loader's statistics, and the groups delivered, buffered and dropped."""
        with self._lock:
            numbering, drops = self._ledger.numbering, self._ledger.drops
            return {
                **(self._feed.statistics() if isinstance(self._feed, LoaderFeed) else {}),
                "asyncdata_groups_total": numbering.sample_group_index,
                "asyncdata_samples_total": numbering.sample_index,
                "asyncdata_buffered_groups": self.get_buffer_length() or 0,
                "asyncdata_dropped_groups_total": sum(drops.values()),
                **{f"asyncdata_dropped_groups_{reason}_total": number for reason, number in drops.items()},
            }

    def close(self) -> None:
        """Stop the workers. slime does not call it: it is called automatically, at the latest when Python ends."""
        self._feed.close()


def whole_number(name: str, value: Any) -> int:
    """``value`` as an int; it may be an integer of numpy.

    :raises ConfigError: for anything but a whole number from 0 on.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(f"AD440 {name} must be a whole number from 0 on, got {value!r}")

    return number
