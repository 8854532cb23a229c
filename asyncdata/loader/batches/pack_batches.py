"""What the batches of packs have in common, whether packs are made online or were planned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from asyncdata.batching.collators.base import Document
from asyncdata.core.errors import NoSamplesError
from asyncdata.delivery.requests import Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.batching.packed_sample import PackedSample
    from asyncdata.core.types import Sample
    from asyncdata.delivery.ledger import Ledger
    from asyncdata.loader.batches.base import BatchShare, Deliveries
    from asyncdata.loader.batches.epoch import Batch

    CollatePacks = Callable[[list[list[PackedSample]]], Any]

__all__ = ("PackBatches", "collating_documents", "collating_samples")


class _Progress(Protocol):
    """What the progress of online and of planned packing both have."""

    @property
    def num_packs(self) -> int: ...


class PackBatches(ABC):
    """The batches of one loop.

    They are made in three steps. A request is served: no sample is delivered yet. The batch is made, and the progress
    of packing after it. Both are committed at once (:meth:`~asyncdata.delivery.coordinator.Coordinator.commit`). So
    whatever fails before the commit has no effect, and a snapshot taken meanwhile continues with this batch.

    If no samples were left of an epoch, the loop covers the next one. So a run that is resumed after the last batch of
    an epoch continues as the first run did.

    :param runs_on: False: the loop covers the epoch in which it begins, even if no samples are left of it.
    """

    def __init__(
        self, deliveries: Deliveries, share: BatchShare, collate: CollatePacks, *, drop_last: bool, runs_on: bool
    ) -> None:
        self._deliveries = deliveries
        self._share = share
        self._collate = collate
        self._drop_last = drop_last
        self._runs_on = runs_on
        self._epoch: int | None = None
        self._first_pack = 0
        self._is_over = False

    def next_request(self) -> Request | None:
        """The samples to take next, possibly none; None at the end of the loop."""
        ledger = self._deliveries.ledger
        epoch, num_packs = self._epoch_of(ledger), ledger.packs.num_packs
        if self._epoch is None:
            self._enter(ledger)
            self._epoch, self._first_pack = epoch, num_packs
        elif epoch > self._epoch:
            self._is_over = self._is_over or not self._runs_on or num_packs > self._first_pack
            self._enter(ledger)
            self._epoch = epoch
        return None if self._is_over else Request(*self._wanted(ledger), is_for_packs=True)

    @abstractmethod
    def finish(self, request: Request, samples: list[Sample]) -> Batch:
        """Commit the batch that ``samples`` complete, and return it; () if they complete none."""

    def end(self) -> Batch:
        """Called on EndOfData: the last batch was made before, so there is none left."""
        self._is_over = True
        return ()

    @abstractmethod
    def _epoch_of(self, ledger: Ledger) -> int:
        """The epoch that is being delivered."""

    def _enter(self, ledger: Ledger) -> None:  # noqa: B027 - planned packs prepare nothing
        """The loop begins an epoch."""

    @abstractmethod
    def _wanted(self, ledger: Ledger) -> tuple[int, int]:
        """The number of samples to take next, and their epoch."""

    def _commit(self, request: Request, progress: _Progress, batch: Batch = ()) -> Batch:
        """Commit, and return the batch. If the state has changed since, as after a restart: (), to try again."""
        return batch if self._deliveries.commit(request, progress) else ()

    def _refuse_to_drop_all(self, epoch: int, num_packs: int) -> None:
        raise NoSamplesError(
            f"AD406 epoch {epoch} has {num_packs} packs, fewer than a batch of all ranks ({self._share.size}), and "
            "drop_last=True drops them all; lower batch_size or set drop_last=False"
        )


def collating_documents(collate_fn: Callable[[list[Any]], Any]) -> CollatePacks:
    """Makes a batch of packs; ``collate_fn`` is given lists of documents."""
    return lambda packs: collate_fn([[_document(piece) for piece in pack] for pack in packs])


def collating_samples(collate_fn: Callable[[list[Any]], Any]) -> CollatePacks:
    """Makes a batch of packs that have one sample each; ``collate_fn`` is given the samples."""
    return lambda packs: collate_fn([pack[0].sample for pack in packs])


def _document(piece: PackedSample) -> Document:
    sample, start, stop = piece
    labels = sample.labels
    return Document(sample.tokens[start:stop], None if labels is None else labels[start:stop], None, sample)
