"""Batches of packs that are made from samples as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import structs

from asyncdata.batching.online.packs import OnlinePacks
from asyncdata.core.errors import ConfigError, NoSamplesError
from asyncdata.delivery.ledger import RestartPoint
from asyncdata.loader.batches.base import PackTotals, share_of_batch
from asyncdata.loader.batches.pack_batches import PackBatches

if TYPE_CHECKING:
    from asyncdata.batching.online.progress import OnlineProgress
    from asyncdata.batching.online.rules import PackRules
    from asyncdata.batching.packers.base import PackState
    from asyncdata.core.types import Sample
    from asyncdata.delivery.ledger import Ledger
    from asyncdata.delivery.requests import Request
    from asyncdata.loader.batches.base import BatchShare, Deliveries
    from asyncdata.loader.batches.epoch import Batch
    from asyncdata.loader.batches.pack_batches import CollatePacks
    from asyncdata.loader.config import LoaderConfig

__all__ = ("OnlineBatches", "OnlineBatching")

_SAMPLES_PER_PUSH = 64


class OnlineBatching:
    """Packing of samples as they come; see :class:`~asyncdata.loader.batches.batching.Batching`.

    Also length grouping without packing, where each sample is a pack.
    """

    is_packed = True
    loops_only = "packs samples"

    def __init__(self, rules: PackRules, config: LoaderConfig, collate: CollatePacks) -> None:
        self._packs = OnlinePacks(rules)
        self._config = config
        self._collate = collate

    def description(self) -> dict[str, Any]:
        """As the protocol says."""
        return self._packs.rules.description()

    def begin(self) -> OnlineProgress:
        """As the protocol says."""
        return self._packs.begin()

    def at_epoch(self, ledger: Ledger, epoch: int) -> Ledger:
        """As the protocol says."""
        return structs.replace(ledger.at_epoch(epoch), packs=self._packs.begin(epoch, ledger.packs))

    def epoch(self, ledger: Ledger) -> int:
        """As the protocol says."""
        progress: OnlineProgress = ledger.packs
        return progress.epoch

    def totals(self, ledger: Ledger) -> PackTotals:
        """As the protocol says."""
        progress: OnlineProgress = ledger.packs
        return PackTotals(progress.num_packs, progress.num_tokens, progress.counts, progress.num_held)

    def restart_point(self, ledger: Ledger) -> RestartPoint:
        """As the protocol says: before the samples of packs that are not delivered."""
        progress: OnlineProgress = ledger.packs
        return progress.restart_point or RestartPoint(ledger.position, ledger.counters)

    def saved(self, ledger: Ledger) -> PackState:
        """As the protocol says."""
        return self._packs.saved(ledger.packs)

    def restored(self, ledger: Ledger, state: PackState) -> Ledger:
        """As the protocol says."""
        return structs.replace(ledger, packs=self._packs.restored(state))

    def batches(self, deliveries: Deliveries, *, runs_on: bool) -> OnlineBatches:
        """As the protocol says."""
        config = self._config
        return OnlineBatches(
            self._packs,
            deliveries,
            share_of_batch(config),
            self._collate,
            epochs=config.epochs,
            max_push=max(1, config.capacity // 2),
            drop_last=config.drop_last,
            runs_on=runs_on,
        )


class OnlineBatches(PackBatches):
    """The batches of one loop.

    An epoch ends when all its samples are pushed to the packer and no further batch is full. Samples that then wait in
    the packer become packs at once if each epoch is packed on its own, at the end of the data, and in an epoch that
    filled no batch at all (it has less data than the packer collects). Otherwise they are packed in the next epoch.

    :param epochs: the number of epochs; None: no end.
    :param max_push: the largest number of samples to take at once.
    """

    def __init__(
        self,
        packs: OnlinePacks,
        deliveries: Deliveries,
        share: BatchShare,
        collate: CollatePacks,
        *,
        epochs: int | None,
        max_push: int,
        drop_last: bool,
        runs_on: bool,
    ) -> None:
        super().__init__(deliveries, share, collate, drop_last=drop_last, runs_on=runs_on)
        self._packs = packs
        self._epochs, self._max_push = epochs, max_push
        self._first_kept, self._from_start = 0, False

    def _epoch_of(self, ledger: Ledger) -> int:
        progress: OnlineProgress = ledger.packs
        return progress.epoch

    def _enter(self, ledger: Ledger) -> None:
        progress: OnlineProgress = ledger.packs
        self._first_kept, self._from_start = progress.num_kept, progress.epoch_packs == 0

    def _wanted(self, ledger: Ledger) -> tuple[int, int]:
        """No samples while there are packs for a batch, or none are left of the epoch."""
        progress: OnlineProgress = ledger.packs
        is_enough = progress.num_ready >= self._share.size or _is_drained(ledger, progress)
        return 0 if is_enough else min(_SAMPLES_PER_PUSH, self._max_push), progress.epoch

    def finish(self, request: Request, samples: list[Sample]) -> Batch:
        """Push ``samples`` to the packer; the next batch, if there are enough packs for it."""
        before, after = request.before, request.after
        progress: OnlineProgress = before.packs
        if samples:
            progress = self._packs.pushed(progress, samples, RestartPoint(before.position, before.counters))
        if progress.num_ready < self._share.size and _is_drained(after, progress):
            return self._end_epoch(request, progress)

        num_packs = self._share.size if progress.num_ready >= self._share.size else 0
        return self._deliver(request, progress, num_packs)

    def _deliver(self, request: Request, progress: OnlineProgress, num_packs: int) -> Batch:
        """Commit the delivery of ``num_packs`` packs, and return this rank's share of them, collated."""
        batch = self._collated(progress, num_packs)
        return self._commit(request, self._packs.delivered(progress, num_packs), batch)

    def _collated(self, progress: OnlineProgress, num_packs: int) -> Batch:
        numbers = self._share.of(num_packs)
        return (self._collate(self._packs.packs(progress, numbers)),) if numbers else ()

    def _end_epoch(self, request: Request, progress: OnlineProgress) -> Batch:
        """All samples of the epoch are pushed, and no batch is full."""
        is_alone = self._is_alone(progress)
        if is_alone:
            self._check_filled(progress)
            progress = self._packs.flushed(progress)
            if progress.num_ready >= self._share.size:
                return self._deliver(request, progress, self._share.size)

        if self._from_start and progress.num_kept == self._first_kept:
            raise NoSamplesError(_nothing_kept(progress))

        num_packs = progress.num_ready if is_alone else 0
        if num_packs and self._drop_last:
            self._check_not_all(progress)
            progress, num_packs = self._packs.dropped(progress, num_packs, "drop_last"), 0
        batch = self._collated(progress, num_packs)
        progress = self._packs.delivered(progress, num_packs)
        return self._commit(request, self._packs.at_next_epoch(progress), batch)

    def _check_filled(self, progress: OnlineProgress) -> None:
        """Refuse data with fewer tokens than one pack has: all epochs would be without a batch."""
        rules = self._packs.rules
        across, epoch = rules.across_epochs, progress.epoch
        num_packs = progress.num_ready + (progress.num_packs if across else progress.epoch_packs)
        num_tokens = progress.waiting_tokens
        if num_packs or not num_tokens or progress.has_rest:
            return

        whose = f"all samples of {epoch + 1} epochs" if across and epoch else "all its samples"
        raise ConfigError(
            f"AD453 epoch {epoch}: {whose} together have {num_tokens} tokens and fill no pack of "
            f"max_length={rules.packing.max_length}; lower it, or set keep_tail=True"
        )

    def _is_alone(self, progress: OnlineProgress) -> bool:
        """Whether to pack all samples of the epoch now, so that none wait for the next epoch."""
        is_last = self._epochs is not None and progress.epoch >= self._epochs - 1
        if is_last or progress.is_alone or not self._packs.rules.across_epochs:
            return True

        # With drop_last these samples would be dropped. Let them wait, unless there has been no pack at all.
        is_kept = not self._drop_last or progress.num_packs == 0
        return progress.epoch_packs == 0 and is_kept and progress.has_rest

    def _check_not_all(self, progress: OnlineProgress) -> None:
        """Refuse to drop all packs of an epoch: the next epochs would be the same."""
        if progress.epoch_packs == 0 and not (self._packs.rules.across_epochs and progress.num_packs):
            self._refuse_to_drop_all(progress.epoch, progress.num_ready)


def _is_drained(ledger: Ledger, progress: OnlineProgress) -> bool:
    """Whether all samples of the epoch were taken from the stream."""
    return ledger.position.epoch > progress.epoch


def _nothing_kept(progress: OnlineProgress) -> str:
    """The message for an epoch without a pack: all later epochs would be the same."""
    dropped = ", ".join(f"{number} by {reason}" for reason, number in sorted(progress.counts.samples.items()))
    return f"AD401 epoch {progress.epoch}: no sample could be packed: {dropped or 'there was none'}"
