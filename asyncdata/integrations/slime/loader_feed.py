"""Fresh groups from asyncdata's own loader, with their numbers and multimodal inputs."""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.errors import ConfigError, LoaderClosedError, SnapshotMismatchError
from asyncdata.integrations.slime.checkpoint import refuse_change
from asyncdata.integrations.slime.feeds import Feed, leave_epoch, refuse_beyond
from asyncdata.integrations.slime.inputs import remember
from asyncdata.integrations.slime.outcomes import tagged
from asyncdata.integrations.slime.prompts import PromptLoader, PromptView, open_loader
from asyncdata.integrations.slime.sample import SampleFactory
from asyncdata.loader.mix import Mix
from asyncdata.order.rank_share import row_of_epoch
from asyncdata.order.shuffle import RowShuffle
from asyncdata.sources.arrow.parquet import ParquetSource
from asyncdata.sources.row_json import python_value

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from typing import TypeVar

    from asyncdata.core.types import Sample
    from asyncdata.delivery.outcomes.memory import RowReport
    from asyncdata.integrations.slime.checkpoint import Kind
    from asyncdata.integrations.slime.config import SlimeSettings
    from asyncdata.integrations.slime.rollout_ledger import Numbering

    T = TypeVar("T")
    Commit = Callable[[Numbering], object]

__all__ = ("LoaderFeed",)

_SKIPPED_AT_ONCE = 1000


class LoaderFeed(Feed):
    """Prompts from asyncdata's own loader.

    :param process: makes ``multimodal_inputs`` of a row's media; None if rows have no media.
    """

    kind: Kind = "loader"

    def __init__(
        self,
        settings: SlimeSettings,
        sample_type: type[Any],
        process: Callable[[dict[str, Any]], Any] | None,
        dp_size: int = 1,
    ) -> None:
        self._settings = settings
        self._process = process
        self._factory = SampleFactory(sample_type, settings.samples_per_group)
        self._single = SampleFactory(sample_type, 1)
        self._dp_size = dp_size
        self._epoch = 0
        self._is_indexed = not (settings.order == "legacy" and settings.shuffled)
        self._use(open_loader(settings, dp_size))

    @property
    def dataset(self) -> LoaderFeed:
        """Itself: it has the length that slime's relatives ask for."""
        return self  # no attribute, which would keep it alive

    def _use(self, loader: PromptLoader) -> None:
        self._loader = loader
        # slime never closes its data source: this does, at the latest when the interpreter ends.
        self._closer = weakref.finalize(self, loader.close)
        loader.start()

    def __len__(self) -> int:
        """Prompts of an epoch.

        :raises TypeError: in the stream order, which does not count its rows.
        """
        if not isinstance(self._settings.knobs["shuffle"], RowShuffle):
            raise TypeError("the stream order does not count its rows: give --num-rollout, or asyncdata_order: legacy")

        return self._loader.num_rows()

    def groups(self, number: int, before: Numbering, commit: Commit) -> list[Any]:
        if not self._is_indexed:  # without a timeout, as this is not a wait for a row
            self._loader.num_rows()
            self._is_indexed = True

        def finish(samples: list[Sample]) -> list[Any]:
            self._to_python(samples)
            if self._loader.remembers:
                samples = [tagged(sample, self._loader.row_of(sample)) for sample in samples]
            groups = self._make(samples, self._factory, before.sample_group_index, before.sample_index)
            after = before.after(len(samples), self._settings.samples_per_group, *self._place(samples, before))
            commit(after)
            self._epoch = after.epoch_id
            return groups

        return self._loader.take(number, finish)

    def _to_python(self, samples: list[Sample]) -> None:
        """Give samples of Parquet rows the values of pyarrow, as slime has them."""
        if isinstance(self._settings.source, ParquetSource):
            for sample in samples:
                sample.prompt, sample.label = python_value(sample.prompt), python_value(sample.label)
                sample.metadata = python_value(sample.metadata) or {}
                sample.extra = python_value(sample.extra)

    def _make(self, samples: list[Sample], factory: SampleFactory, *first_numbers: int) -> list[Any]:
        media = [sample.extra.get("multimodal") for sample in samples] if self._process is not None else []
        for sample, found in zip(samples, media, strict=False):
            if found is not None and self._process is not None:
                sample.extra["multimodal_inputs"] = self._process(found)
        for sample in samples:
            if sample.source_name is not None:
                sample.metadata = {**sample.metadata, "source_name": sample.source_name}
        groups = factory.groups(samples, *first_numbers)
        for group, found in zip(groups, media, strict=False):
            for item in group if found is not None else ():
                remember(item, found)
        return groups

    def _place(self, samples: list[Sample], before: Numbering) -> tuple[int, int]:
        """The epoch of the last sample, and the number of the next one."""
        last = samples[-1].position
        assert last is not None  # it comes from a row
        if isinstance(self._settings.knobs["shuffle"], RowShuffle):
            return last.epoch, row_of_epoch(last) + 1

        start = before.sample_offset if last.epoch == before.epoch_id else 0
        return last.epoch, start + sum(sample.position.epoch == last.epoch for sample in samples)  # type: ignore[union-attr]

    # The interface of slime's own dataset.

    @cached_property
    def samples(self) -> PromptView:
        """The prompts of the current epoch by their numbers, in its order, as samples without numbers."""
        me = weakref.ref(self)  # the view must not keep the feed alive
        given = self._settings.knobs
        knobs = {**given, "num_workers": 0 if given.get("num_workers") == 0 else 1, "outcomes": None}
        settings = msgspec.structs.replace(self._settings, knobs=knobs)
        return PromptView(
            lambda: open_loader(settings),
            lambda samples: _alive(me).unnumbered(samples),
            lambda: _alive(me)._epoch,  # noqa: SLF001 - its own
            lambda: len(_alive(me)),
        )

    def unnumbered(self, samples: list[Sample]) -> list[Any]:
        """The loader's samples as slime's samples, one of each, without numbers."""
        self._to_python(samples)
        made = [group[0] for group in self._make(samples, self._single, 0, 0)]
        for sample in made:
            sample.group_index = sample.index = None
        return made

    def __getitem__(self, number: Any) -> Any:
        """``samples[number]``."""
        return self.samples[number]

    def shuffle(self, new_epoch_id: int) -> None:
        """Make :attr:`samples` show another epoch. What is delivered does not change."""
        self._epoch = new_epoch_id

    # The position.

    def state(self) -> Any:
        return self._loader.state_dict()

    def restore(self, state: Any, numbering: Numbering, allow_changed: Collection[str]) -> Numbering:
        after = self._restored(state, numbering, allow_changed)
        self._epoch = after.epoch_id
        return after

    def _restored(self, state: Any, numbering: Numbering, allow_changed: Collection[str]) -> Numbering:
        if state is None:
            return self._continue_slimes(numbering, allow_changed)

        if self._loader.resume(state, allow_changed, same_rows=self._settings.options.same_rows):
            return numbering

        return numbering.after(0, 1, self._loader.epoch, 0)

    def _continue_slimes(self, numbering: Numbering, allow_changed: Collection[str]) -> Numbering:
        """Continue where slime's own data source has stopped."""
        if self._settings.order != "legacy":
            refuse_change("order", "slime's", "asyncdata's (asyncdata_order: stream)", allow_changed)
            return self._leave_epoch(numbering, "order")

        if numbering.sample_offset > (num_rows := self._loader.num_rows()):
            refuse_change("data", f"{numbering.sample_offset} rows or more", f"{num_rows} rows", allow_changed)
            return self._leave_epoch(numbering, "data")

        self._loader.seek(numbering.epoch_id, numbering.sample_offset, group_index=numbering.sample_group_index)
        return numbering

    def _leave_epoch(self, numbering: Numbering, changed: str) -> Numbering:
        after = leave_epoch(numbering, changed, None)
        self.go_to_epoch(after.epoch_id)
        return after

    def go_to_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless the loader is in it."""
        self._loader.set_epoch(epoch)
        self._epoch = epoch

    def go_to(self, numbering: Numbering) -> None:
        if isinstance(self._settings.knobs["shuffle"], RowShuffle):
            refuse_beyond(numbering, len(self))
            self._loader.seek(numbering.epoch_id, numbering.sample_offset, group_index=numbering.sample_group_index)
        elif isinstance(self._settings.source, Mix):
            raise ConfigError(
                "AD471 a mixture cannot go to another place of an epoch: its epochs begin where its parts are at the "
                "end of the one before. Restore a checkpoint instead"
            )
        else:
            before = self._loader.state_dict()
            try:
                self.skip_to(numbering)
            except SnapshotMismatchError:
                self._loader.load_state_dict(before)
                refuse_beyond(numbering, None)
        self._epoch = numbering.epoch_id

    def skip_to(self, numbering: Numbering) -> None:
        """Go to the position in an epoch after which that many prompts were delivered, by reading them again.

        :raises SnapshotMismatchError: if the epoch has fewer prompts.
        """
        state = self._loader.state_dict()
        state["counters"] |= {"epoch_groups": 0, "epoch_drops": {}}
        state.pop("stream", None)
        self._loader.load_state_dict({**state, "position": [numbering.epoch_id, 0, 0]})
        left = numbering.sample_offset
        while left:
            number = min(left, _SKIPPED_AT_ONCE)
            if self._loader.take(number, _last_epoch) != numbering.epoch_id:
                raise SnapshotMismatchError(
                    f"AD603 the data ended while {numbering.sample_offset} prompts of epoch {numbering.epoch_id} were "
                    "skipped: the state belongs to other data or settings. Use what it was taken with",
                    {"data": (f"{numbering.sample_offset} prompts or more", "fewer")},
                )

            left -= number

    def set_dp_size(self, dp_size: int) -> None:
        if dp_size == self._dp_size:
            return

        loader = open_loader(self._settings, dp_size)
        loader.load_state_dict(self._loader.state_dict())
        self._closer()
        self._use(loader)
        self._dp_size = dp_size

    def report(self, reports: Iterable[RowReport]) -> int:
        return self._loader.count(reports, self._settings.samples_per_group)

    def statistics(self) -> dict[str, Any]:
        """The statistics of the loader, as flat numbers."""
        return self._loader.statistics().to_dict()

    def close(self) -> None:
        self._closer()
        if "samples" in vars(self):
            self.samples.close()


def _alive(feed: weakref.ref[LoaderFeed]) -> LoaderFeed:
    found = feed()
    if found is None:
        raise LoaderClosedError("AD502 the data source of these samples was deleted")

    return found


def _last_epoch(samples: list[Sample]) -> int:
    assert samples[-1].position is not None  # it comes from a row
    return samples[-1].position.epoch
