"""Fresh groups from asyncdata's own loader, with their numbers and multimodal inputs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from asyncdata.checkpoint import snapshot as snapshots
from asyncdata.core.errors import ConfigError, LoaderClosedError, NoSamplesError, SnapshotMismatchError
from asyncdata.integrations.adapters import KEY, Scored, key_of, report_scores
from asyncdata.integrations.slime.checkpoint import Kind, refuse_change
from asyncdata.integrations.slime.feeds import Feed, leave_epoch, refuse_beyond
from asyncdata.integrations.slime.samples import (
    INPUTS,
    Process,
    groups_of,
    package_of,
    process_of,
    remember,
    resolve_sample_type,
    to_worker,
    unpack,
)
from asyncdata.loader.loader import DataLoader
from asyncdata.loader.mix import Mix
from asyncdata.order.order import row_of_epoch
from asyncdata.order.shuffle import RowShuffle
from asyncdata.sources.arrow.parquet import ParquetSource
from asyncdata.sources.row_json import python_value

if TYPE_CHECKING:
    from asyncdata.core.types import Sample
    from asyncdata.integrations.slime.config import SlimeSettings
    from asyncdata.integrations.slime.rollout_ledger import Numbering

    T = TypeVar("T")
    L = TypeVar("L", bound=DataLoader)

_SKIPPED_AT_ONCE = 1000
_SHOWN_AT_ONCE = 256


class _Loader(DataLoader):
    """A loader whose samples count as delivered only when groups are made of them."""

    def take(self, number: int, finish: Callable[[list[Sample]], T]) -> T:
        """``finish`` of the next ``number`` samples; if it raises, they are delivered again."""
        return self._take(number, None, finish)

    def resume(self, state: Mapping[str, Any], allow_changed: Collection[str], *, same_rows: bool) -> bool:
        """As :meth:`load_state_dict`. Return whether it is at the saved position, and not at an epoch's start."""
        self._check()
        return self._restore(snapshots.from_state_dict(state), allow_changed, same_rows=same_rows)


class LoaderFeed(Feed):
    """Prompts from asyncdata's own loader, which is opened at its first use.

    :param process: makes ``multimodal_inputs`` of a row's media; None if rows have no media. Workers do it ahead; this
        process does only what they could not send.
    """

    kind: Kind = "loader"

    def __init__(self, settings: SlimeSettings, sample_type: type[Any], process: Process | None, args: Any) -> None:
        self._settings = settings
        self._process = process
        self._tokenize_fn = settings.tokenize_fn
        if process is not None and self._tokenize_fn is not None:
            processing = to_worker(args, settings.options.processor)
            self._tokenize_fn = replace(self._tokenize_fn, processing=processing)
        self._sample_type = sample_type
        self._dp_size = 1
        self._loader: _Loader | None = None
        self.shown_epoch = 0

    @property
    def dataset(self) -> LoaderFeed:
        """Itself: it has the length that slime's relatives ask for."""
        return self  # no attribute, which would keep it alive

    @property
    def loader(self) -> _Loader:
        """The loader, which reads ahead from its first use on."""
        return self._loader or self._use(self._open(_Loader, dp_size=self._dp_size))

    def opened(self) -> LoaderFeed:
        """The same feed. Its loader reads ahead from now on."""
        self._use(self._open(_Loader, dp_size=self._dp_size))
        return self

    def _open(self, kind: type[L], **knobs: Any) -> L:
        settings = self._settings
        assert settings.source is not None
        return kind(settings.source, tokenize_fn=self._tokenize_fn, **{**settings.knobs, **knobs})

    def _use(self, loader: _Loader) -> _Loader:
        self._loader = loader
        # slime never closes its data source: this does, at the latest when the interpreter ends.
        self._closer = weakref.finalize(self, loader.close)
        loader.start()
        return loader

    @property
    def _counts_rows(self) -> bool:
        return isinstance(self._settings.knobs["shuffle"], RowShuffle)

    def __len__(self) -> int:
        """Prompts of an epoch.

        :raises TypeError: in the stream order, which does not count its rows.
        """
        if not self._counts_rows:
            raise TypeError("the stream order does not count its rows: give --num-rollout, or asyncdata_order: legacy")

        return self.loader.num_rows()

    def groups(self, number: int) -> list[Any]:
        if self._settings.order == "legacy" and self._settings.shuffled:
            self.loader.num_rows()  # waits for the row index, without a timeout, as this is not a wait for a row
        before, loader = self.numbering, self.loader

        def finish(samples: list[Sample]) -> list[Any]:
            self._to_python(samples)
            for sample in samples:
                key = key_of(loader, sample)
                if key is not None and isinstance(sample.metadata, dict):
                    sample.metadata = {**sample.metadata, KEY: key}
            size = self._settings.samples_per_group
            groups = self._make(samples, size, before.sample_group_index, before.sample_index)
            self._be_at(before.after(len(samples), size, *self._place_after(samples, before)))
            return groups

        try:
            return loader.take(number, finish)
        except BaseException:
            self.numbering = before
            raise

    def _be_at(self, numbering: Numbering) -> None:
        self.numbering, self.shown_epoch = numbering, numbering.epoch_id

    def _to_python(self, samples: list[Sample]) -> None:
        """Give samples of Parquet rows the values of pyarrow, as slime has them."""
        if isinstance(self._settings.source, ParquetSource):
            for sample in samples:
                sample.prompt, sample.label = python_value(sample.prompt), python_value(sample.label)
                sample.metadata = python_value(sample.metadata) or {}
                sample.extra = python_value(sample.extra)

    def _make(self, samples: list[Sample], size: int, *first_numbers: int) -> list[Any]:
        for sample in samples:
            found = sample.extra.get("multimodal")
            if found is not None and self._process is not None:
                data = (sample.columns or {}).get(INPUTS.name)
                is_made = data is not None and data.size
                sample.extra["multimodal_inputs"] = unpack(data) if is_made else self._process(found)
            if sample.source_name is not None:
                sample.metadata = {**sample.metadata, "source_name": sample.source_name}
        groups = groups_of(samples, self._sample_type, size, *first_numbers)
        for sample, group in zip(samples, groups, strict=True):
            if "multimodal_inputs" in sample.extra:
                for item in group:
                    remember(item, sample.extra["multimodal"])
        return groups

    def _place_after(self, samples: list[Sample], before: Numbering) -> tuple[int, int]:
        """The epoch of the last sample, and the number of the next one."""
        epochs = [_place(sample)[0] for sample in samples]
        if self._counts_rows:
            return epochs[-1], _place(samples[-1])[1] + 1

        start = before.sample_offset if epochs[-1] == before.epoch_id else 0
        return epochs[-1], start + epochs.count(epochs[-1])

    # The interface of slime's own dataset.

    @cached_property
    def samples(self) -> _Prompts:
        """The prompts of the current epoch by their numbers, in its order, as samples without numbers."""
        return _Prompts(self)

    def opened_beside(self) -> DataLoader:
        """Another loader of the same prompts."""
        num_workers = 0 if self._settings.knobs.get("num_workers") == 0 else 1
        return self._open(DataLoader, num_workers=num_workers, outcomes=None)

    def unnumbered(self, samples: list[Sample]) -> list[Any]:
        """The loader's samples as slime's samples, one of each, without numbers."""
        self._to_python(samples)
        made = [group[0] for group in self._make(samples, 1, 0, 0)]
        for sample in made:
            sample.group_index = sample.index = None
        return made

    def __getitem__(self, number: Any) -> Any:
        """``samples[number]``."""
        return self.samples[number]

    def shuffle(self, new_epoch_id: int) -> None:
        """Make :attr:`samples` show another epoch. What is delivered does not change."""
        self.shown_epoch = new_epoch_id

    # The position.

    def state(self) -> Any:
        return self.loader.state_dict()

    def restore(self, state: Any, numbering: Numbering, allow_changed: Collection[str]) -> None:
        if state is None:
            self._continue_slimes(numbering, allow_changed)
        elif self.loader.resume(state, allow_changed, same_rows=self._settings.options.same_rows):
            self._be_at(numbering)
        else:
            self._be_at(numbering.after(0, 1, self.loader.epoch, 0))

    def _continue_slimes(self, numbering: Numbering, allow_changed: Collection[str]) -> None:
        """Continue where slime's own data source has stopped; or with the next epoch, where its place is not valid."""
        if self._settings.order != "legacy":
            changed, saved, present = "order", "slime's", "asyncdata's (asyncdata_order: stream)"
        elif numbering.sample_offset > (num_rows := self.loader.num_rows()):
            changed, saved, present = "data", f"{numbering.sample_offset} rows or more", f"{num_rows} rows"
        else:
            self._seek(numbering)
            return

        refuse_change(changed, saved, present, allow_changed)
        self.go_to_epoch(leave_epoch(numbering, changed, None))

    def go_to_epoch(self, numbering: Numbering) -> None:
        """Go to the start of an epoch, unless the loader is in it."""
        self.loader.set_epoch(numbering.epoch_id)
        self._be_at(numbering)

    def go_to(self, numbering: Numbering) -> None:
        if self._counts_rows:
            refuse_beyond(numbering, len(self))
            self._seek(numbering)
            return

        if isinstance(self._settings.source, Mix):
            raise ConfigError(
                "AD471 a mixture cannot go to another place of an epoch: its epochs begin where its parts are at the "
                "end of the one before. Restore a checkpoint instead"
            )

        before = self.loader.state_dict()
        try:
            self.skip_to(numbering)
        except SnapshotMismatchError:
            self.loader.load_state_dict(before)
            refuse_beyond(numbering, None)

    def _seek(self, numbering: Numbering) -> None:
        self.loader.seek(numbering.epoch_id, numbering.sample_offset, group_index=numbering.sample_group_index)
        self._be_at(numbering)

    def skip_to(self, numbering: Numbering) -> None:
        """Go to the position in an epoch after which that many prompts were delivered, by reading them again.

        :raises SnapshotMismatchError: if the epoch has fewer prompts.
        """
        state = self.loader.state_dict()
        state["counters"] |= {"epoch_groups": 0, "epoch_drops": {}}
        state.pop("stream", None)
        self.loader.load_state_dict({**state, "position": [numbering.epoch_id, 0, 0]})
        left = numbering.sample_offset
        while left:
            number = min(left, _SKIPPED_AT_ONCE)
            if _place(self.loader.get_next_batch(number)[-1])[0] != numbering.epoch_id:
                raise SnapshotMismatchError(
                    f"AD603 the data ended while {numbering.sample_offset} prompts of epoch {numbering.epoch_id} were "
                    "skipped: the state belongs to other data or settings. Use what it was taken with",
                    {"data": (f"{numbering.sample_offset} prompts or more", "fewer")},
                )

            left -= number
        self._be_at(numbering)

    def set_dp_size(self, dp_size: int) -> None:
        before = self._loader
        if before is not None and dp_size == self._dp_size:
            return

        loader = self._open(_Loader, dp_size=dp_size)
        if before is not None:
            loader.load_state_dict(before.state_dict())
            self._closer()
        self._use(loader)
        self._dp_size = dp_size

    def report(self, scored: Iterable[Scored], attempts: int) -> int:
        return report_scores(self.loader, scored, attempts)

    def statistics(self) -> dict[str, Any]:
        return self.loader.statistics().to_dict()

    def close(self) -> None:
        """Stop the workers."""
        if self._loader is not None:
            self._closer()
        if "samples" in vars(self):
            self.samples.close()


class _Prompts(Sequence[Any]):
    """The prompts of an epoch, in its order. Reading them does not affect what is delivered.

    A row that yields no sample has a number too: its number is an error, and slices and loops skip it, as rollouts do.
    A separate loader, opened at the first access, reads the rows.
    """

    def __init__(self, feed: LoaderFeed) -> None:
        self._feed = weakref.ref(feed)  # the prompts must not keep the feed alive
        self._lock = threading.Lock()
        self._loader: DataLoader | None = None
        self._at: tuple[int, int] | None = None

    def _alive(self) -> LoaderFeed:
        feed = self._feed()
        if feed is None:
            raise LoaderClosedError("AD502 the data source of these samples was deleted")

        return feed

    def __len__(self) -> int:
        return len(self._alive())

    def __getitem__(self, key: Any) -> Any:
        """The sample with that number, or the samples of a slice, as in a list. They are new at each call.

        :raises IndexError: if there is no such number.
        :raises NoSamplesError: if the row of that number yields no sample.
        :raises TypeError: in the stream order, where rows have no numbers.
        """
        numbers = range(len(self))[key]
        epoch = self._alive().shown_epoch
        if isinstance(numbers, range):
            found = {} if len(numbers) == 0 else self._read(epoch, min(numbers), max(numbers) + 1)
            return [found[number] for number in numbers if number in found]

        found = self._read(epoch, numbers, numbers + 1)
        if not found:
            raise NoSamplesError(
                f"AD401 prompt {numbers} of epoch {epoch} is none: its row is bad, or was dropped; rollouts skip it"
            )

        return found[numbers]

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, len(self), _SHOWN_AT_ONCE):
            yield from self[first : first + _SHOWN_AT_ONCE]

    def _read(self, epoch: int, first: int, stop: int) -> dict[int, Any]:
        """The samples of the rows [first, stop), by their numbers."""
        feed = self._alive()
        found: dict[int, Any] = {}
        with self._lock:
            loader = self._go_to(feed, epoch, first)
            while self._at is not None and first <= self._at[1] < stop and self._at[0] == epoch:
                samples = loader.get_next_batch(min(stop - self._at[1], _SHOWN_AT_ONCE))
                places = [_place(sample) for sample in samples]
                self._at = places[-1][0], places[-1][1] + 1
                wanted = [n for n, place in enumerate(places) if place[0] == epoch and place[1] < stop]
                made = feed.unnumbered([samples[n] for n in wanted])
                found |= zip((places[n][1] for n in wanted), made, strict=True)
        return found

    def _go_to(self, feed: LoaderFeed, epoch: int, number: int) -> DataLoader:
        if self._loader is None:
            self._loader = feed.opened_beside()
            self._closer = weakref.finalize(self, self._loader.close)
        if self._at != (epoch, number):
            self._at = None  # if this fails, the position is not known
            self._loader.seek(epoch, number)
            self._at = epoch, number
        return self._loader

    def close(self) -> None:
        """Stop reading."""
        if self._loader is not None:
            self._closer()


def _place(sample: Sample) -> tuple[int, int]:
    """The epoch of a sample, and its row's number there."""
    place = sample.position
    assert place is not None  # it comes from a row
    return place.epoch, row_of_epoch(place)


def media_process(args: Any, settings: SlimeSettings) -> Process | None:
    """The function that makes ``multimodal_inputs`` of a row's media; None if rows have no media.

    :raises ConfigError: if ``asyncdata_processor`` cannot be imported.
    """
    fn = settings.tokenize_fn
    if fn is None or not (fn.shows_media or fn.multimodal_keys is not None):
        return None

    return process_of(args, settings.options.processor, package_of(resolve_sample_type()))
