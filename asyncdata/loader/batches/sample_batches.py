"""Batches of samples as they come, without packing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.errors import NoSamplesError
from asyncdata.delivery.ledger import RestartPoint
from asyncdata.loader.batches.base import NO_PACKS, share_of_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.batching.packers.base import PackState
    from asyncdata.core.errors import EndOfData
    from asyncdata.core.types import Sample
    from asyncdata.delivery.ledger import Ledger
    from asyncdata.loader.batches.base import BatchShare, Deliveries, PackTotals
    from asyncdata.loader.batches.epoch import Batch
    from asyncdata.loader.config import LoaderConfig

__all__ = ("SampleBatches", "SampleBatching")


class SampleBatching:
    """No packing; see :class:`~asyncdata.loader.batches.batching.Batching`.

    :param collate: makes a batch of samples.
    """

    is_packed = False

    def __init__(self, config: LoaderConfig, collate: Callable[[list[Any]], Any]) -> None:
        self.loops_only = f"is one of world_size={config.ranks.world_size}" if config.ranks.world_size > 1 else ""
        self._config = config
        self._collate = collate

    def description(self) -> dict[str, Any]:
        """As the protocol says: nothing."""
        return {}

    def begin(self) -> None:
        """As the protocol says: nothing."""

    def at_epoch(self, ledger: Ledger, epoch: int) -> Ledger:
        """As the protocol says."""
        return ledger.at_epoch(epoch)

    def epoch(self, ledger: Ledger) -> int:
        """As the protocol says."""
        return ledger.position.epoch

    def totals(self, ledger: Ledger) -> PackTotals:
        """As the protocol says: zeros."""
        return NO_PACKS

    def restart_point(self, ledger: Ledger) -> RestartPoint:
        """As the protocol says: before the oldest lease, or at the next sample."""
        return RestartPoint(*ledger.restart_point()[:2])

    def saved(self, ledger: Ledger) -> msgspec.UnsetType:
        """As the protocol says: nothing."""
        return msgspec.UNSET

    def restored(self, ledger: Ledger, state: PackState) -> Ledger:
        """As the protocol says: the ledger as it is."""
        return ledger

    def batches(self, deliveries: Deliveries, *, runs_on: bool) -> SampleBatches:
        """As the protocol says."""
        share, group_size = share_of_batch(self._config), self._config.n_samples_per_prompt
        return SampleBatches(deliveries, share, self._collate, group_size=group_size, runs_on=runs_on)


class SampleBatches:
    """The batches of one loop.

    :param runs_on: False: the loop covers the epoch in which it begins, even if no samples are left of it.
    """

    def __init__(
        self,
        deliveries: Deliveries,
        share: BatchShare,
        collate: Callable[[list[Any]], Any],
        *,
        group_size: int = 1,
        runs_on: bool = True,
    ) -> None:
        self._deliveries = deliveries
        self._share = share
        self._collate = collate
        self._group_size = group_size
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
            position = self._deliveries.ledger.position
            self._epoch, self._from_start = position.epoch, (position.window, position.row) == (0, 0)
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
