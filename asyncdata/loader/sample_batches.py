"""Batches of samples as they come, without packing; and what all kinds of batches have in common."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from asyncdata.core.errors import ConfigError, EndOfData, NoSamplesError
from asyncdata.core.types import Position
from asyncdata.delivery.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from asyncdata.batching.packs import Counts, PackState
    from asyncdata.core.types import Sample
    from asyncdata.delivery.coordinator import Coordinator
    from asyncdata.loader.config import LoaderConfig
    from asyncdata.loader.exclusions import RowKeys
    from asyncdata.loader.loader_media import LoaderMedia
    from asyncdata.loader.opened_source import OpenedPart


Batch = tuple[Any, ...]
"""One batch, or empty if samples form no batch."""


class BatchShare(NamedTuple):
    """One rank's part of a batch of all ranks: every ``world_size``-th item, from ``rank`` on.

    :ivar size: items of the batch of all ranks: groups of samples, or packs.
    """

    rank: int
    world_size: int
    size: int
    rounds_up: bool

    @classmethod
    def of_config(cls, config: LoaderConfig) -> BatchShare:
        """The share of a loader.

        :raises ConfigError: if the configuration has no batch size.
        """
        if config.batch_size is None:
            raise ConfigError("iterating needs batch_size=...; or call get_next_batch(n)")

        ranks, size = config.ranks, config.batch_size // config.n_samples_per_prompt
        return cls(ranks.rank, ranks.world_size, size * ranks.world_size, ranks.rounds_up)

    def of(self, num_items: int) -> Sequence[int]:
        """This rank's items of ``num_items``. With ``rounds_up``, items are repeated to fill a batch of ``size``."""
        if num_items < self.size and num_items and self.rounds_up:
            return [number % num_items for number in range(self.rank, self.size, self.world_size)]

        return range(self.rank, num_items, self.world_size)


class PackTotals(NamedTuple):
    """What the statistics say about packs.

    :ivar num_packs: packs delivered to all ranks.
    :ivar num_tokens: their tokens.
    :ivar counts: samples and tokens that are in no pack; None without packing.
    :ivar num_held: samples in memory, as they wait to be packed or delivered.
    :ivar bad_rows: samples in delivered packs whose media could not be loaded, by reason.
    """

    num_packs: int = 0
    num_tokens: int = 0
    counts: Counts | None = None
    num_held: int = 0
    bad_rows: Mapping[str, int] = {}


class Making(NamedTuple):
    """What batches are made with.

    :ivar parts: the sources of the samples.
    :ivar collate: makes a batch of samples, or of packs.
    :ivar packs_samples: whether batches have packs; False: samples, which may be grouped by length.
    :ivar media: counts the media in batches as long as they are held; None: there are none.
    """

    config: LoaderConfig
    parts: Sequence[OpenedPart]
    collate: Callable[[list[Any]], Any]
    packs_samples: bool = False
    media: LoaderMedia | None = None

    def batch(self, items: list[Any]) -> Any:
        """The batch of samples, or of packs."""
        batch = self.collate(items)
        if self.media is not None:
            self.media.count(batch)
        return batch


class Batching:
    """How a loader makes batches; chosen once, by :mod:`asyncdata.loader.packing_choice`. This one packs nothing.

    It has no state: the progress of packing is ``ledger.packs``.

    :ivar is_packed: whether batches are made of packs.
    :ivar is_planned: whether each row of D is at its place in a batch: samples as they come, or planned packs.
    :ivar loops_only: why only a ``for`` loop may take samples; empty if other calls may.
    """

    is_packed = False
    is_planned = True

    def __init__(self, making: Making) -> None:
        self.making, self.config = making, making.config
        world_size = self.config.ranks.world_size
        self.loops_only = f"is one of world_size={world_size}" if world_size > 1 else ""

    @cached_property
    def row_keys(self) -> RowKeys:
        """The keys of the rows that samples are of."""
        from asyncdata.loader.exclusions import RowKeys

        return RowKeys(self.making.parts)

    def description(self) -> dict[str, Any]:
        """The settings that decide which packs there are, if they are not in the source's order. As builtins."""
        return {}

    def begin(self, ledger: Ledger) -> Any:
        """The progress of packing at the ledger before the first sample."""
        return None

    def at_epoch(self, ledger: Ledger, epoch: int) -> Ledger:
        """The ledger at the start of ``epoch``, without samples that wait to be packed."""
        return ledger.at_epoch(epoch)

    def epoch(self, ledger: Ledger) -> int:
        """The epoch of the next sample, or of the next pack."""
        return ledger.position.epoch

    def totals(self, ledger: Ledger) -> PackTotals:
        """How many packs were delivered."""
        return PackTotals()

    def saved(self, ledger: Ledger) -> PackState | msgspec.UnsetType:
        """What a snapshot keeps of packing."""
        return msgspec.UNSET

    def restored(self, ledger: Ledger, state: PackState) -> Ledger:
        """The ledger with the progress that ``state`` was saved from.

        :raises SnapshotError: if it is not a state of this packing.
        """
        return ledger

    def batches(self, coordinator: Coordinator, *, runs_on: bool) -> Any:
        """The batches of one loop: ``SampleBatches``, or ``PackBatches`` of packs.

        :param runs_on: False: the loop covers the epoch in which it begins, even if no samples are left of it.
        """
        return SampleBatches(self, coordinator, runs_on=runs_on)


class SampleBatches:
    """The batches of one loop.

    :param runs_on: False: the loop covers the epoch in which it begins, even if no samples are left of it.
    """

    def __init__(self, batching: Batching, coordinator: Coordinator, *, runs_on: bool) -> None:
        self._collate = batching.making.batch
        self._group_size = batching.config.n_samples_per_prompt
        self._share = BatchShare.of_config(batching.config)
        self._coordinator = coordinator
        self._runs_on = runs_on
        self._epoch: int | None = None
        self._from_start = False
        self._num_batches = 0
        self._is_over = False

    def next_request(self) -> tuple[int, int] | None:
        """The groups of a batch of all ranks, and the epoch in which the loop began; None at the end."""
        if self._is_over:
            return None

        if self._epoch is None:
            ledger = self._coordinator.ledger
            self._epoch, is_first = ledger.position.epoch, ledger.position == Position(ledger.position.epoch)
            self._from_start = is_first and all(place.epoch != self._epoch for place in ledger.acked)
        return self._share.size, self._epoch

    def finish(self, samples: list[Sample]) -> Batch:
        """The batch of ``samples``. No samples end the loop, unless there were none left at its start.

        So a run that is resumed after the last batch of an epoch continues with the next one, as the first run did.
        """
        if samples:
            return self._batch(samples)

        if self._num_batches or self._is_over or not (self._runs_on or self._from_start):
            self._is_over = True
            return ()

        if self._from_start:
            raise NoSamplesError(
                f"AD406 epoch {self._epoch} has fewer samples than one batch, and drop_last=True drops them all; lower "
                "batch_size or set drop_last=False"
            )

        self._epoch = None
        return ()

    def _batch(self, samples: list[Sample]) -> Batch:
        """This rank's share, collated; () if a short last batch has no group for this rank."""
        size = self._group_size
        if self._share.world_size > 1 or len(samples) < self._share.size * size:
            numbers = self._share.of(len(samples) // size)
            samples = [sample for number in numbers for sample in samples[number * size : (number + 1) * size]]
        batch = (self._collate(samples),) if samples else ()
        self._num_batches += 1
        return batch

    def end(self, end: EndOfData) -> Batch:
        """Called on EndOfData; return the final short batch, or ()."""
        self._is_over = True
        return self.finish(end.samples)
