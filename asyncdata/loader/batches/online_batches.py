"""The batches of an epoch if samples are packed, or grouped by length, as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from asyncdata.core.errors import ConfigError, NoSamplesError

if TYPE_CHECKING:
    from asyncdata.batching.online.packs import PackStage
    from asyncdata.batching.online.progress import PackedSample, RestartPoint
    from asyncdata.core.errors import EndOfData
    from asyncdata.core.types import Sample
    from asyncdata.loader.batches.sample_batches import Batch, Share

__all__ = ("PackBatches", "PackSource")

_SAMPLES_PER_PUSH = 64


class PackSource(Protocol):
    """The loader, as far as these batches need it."""

    @property
    def share(self) -> Share:
        """This rank's share of a batch of packs."""
        ...

    def tip(self) -> RestartPoint:
        """The position and counters of the next sample of the stream."""
        ...

    def collate_packs(self, packs: list[list[PackedSample]]) -> Any:
        """The batch of these packs."""
        ...


class PackBatches:
    """Batches of packs; see :class:`~asyncdata.loader.batches.sample_batches.StatefulBatches`.

    An epoch ends when all its samples are pushed to the packer and no further batch is full. Samples that then wait in
    the packer become packs at once if each epoch is packed on its own, at the end of the data, and in an epoch that
    filled no batch at all (it has less data than the packer collects). Otherwise they are packed in the next epoch.

    If no samples were left of an epoch, the loop covers the next one. So a run that is resumed after the last batch of
    an epoch continues as the first run did.

    :param epochs: the number of epochs; None: no end.
    :param runs_on: False: the loop covers this epoch only, even if no samples are left of it.
    :param max_push: the largest number of samples to take at once.
    """

    def __init__(
        self,
        loader: PackSource,
        stage: PackStage,
        *,
        epochs: int | None,
        drop_last: bool,
        max_push: int,
        runs_on: bool = True,
    ) -> None:
        self._loader = loader
        self._stage = stage
        self._share = loader.share
        self._epochs, self._drop_last, self._max_push = epochs, drop_last, max_push
        self._epoch: int | None = None
        self._first_pack = self._first_kept = 0
        self._from_start = False
        self._runs_on = runs_on
        self._before: object = None
        self._after: object = None
        self._is_over = False

    def begin(self) -> None:
        """A new batch is requested: the caller has all earlier ones."""
        self._after = None

    def next_request(self) -> tuple[int, int] | None:
        """The number of samples to take, and their epoch; 0 samples while there are packs for a batch."""
        stage = self._stage
        if self._epoch is None:
            self._epoch, self._from_start = stage.epoch, stage.epoch_packs == 0
            self._first_pack, self._first_kept = stage.num_packs, stage.num_kept
        elif stage.epoch > self._epoch:
            self._is_over = self._is_over or not self._runs_on or stage.num_packs > self._first_pack
            self._epoch, self._from_start, self._first_kept = stage.epoch, True, stage.num_kept
        if self._is_over:
            return None

        tip = self._loader.tip()
        stage.begin(tip)
        if stage.num_ready >= self._share.size or self._is_drained(tip):
            return 0, stage.epoch

        return min(_SAMPLES_PER_PUSH, self._max_push), stage.epoch

    def _is_drained(self, tip: RestartPoint) -> bool:
        """Whether all samples of the epoch are pushed."""
        return tip.position.epoch > self._stage.epoch

    def finish(self, samples: list[Sample]) -> Batch:
        """Push ``samples``; the next batch, if there are enough packs for it."""
        stage, tip = self._stage, self._loader.tip()
        if samples:
            stage.push(samples, tip)
        if stage.num_ready >= self._share.size:
            return self._deliver(self._share.size)

        return self._end_epoch(stage) if self._is_drained(tip) else ()

    def _deliver(self, num_packs: int) -> Batch:
        """This rank's share of so many packs, collated."""
        self._before = self._stage.now
        numbers = self._share.of(num_packs)
        batch = (self._loader.collate_packs(self._stage.packs(numbers)),) if numbers else ()
        self._after = self._stage.deliver(num_packs)
        return batch

    def _end_epoch(self, stage: PackStage) -> Batch:
        is_alone = self._is_alone(stage)
        if is_alone:
            self._check_filled()
            stage.flush()
            if stage.num_ready >= self._share.size:
                return self._deliver(self._share.size)

        if self._from_start and stage.num_kept == self._first_kept:
            raise NoSamplesError(_nothing_kept(stage))

        before = stage.now
        batch = self._last_batch(stage) if is_alone else ()
        after = stage.end_epoch()
        if batch:
            self._before, self._after = before, after
        return batch

    def _check_filled(self) -> None:
        """Refuse data with fewer tokens than one pack has: all epochs would be without a batch."""
        stage, across = self._stage, self._stage.rules.across_epochs
        num_packs = stage.num_ready + (stage.num_packs if across else stage.epoch_packs)
        num_tokens = stage.waiting_tokens
        if num_packs or not num_tokens or stage.has_rest:
            return

        whose = f"all samples of {stage.epoch + 1} epochs" if across and stage.epoch else "all its samples"
        raise ConfigError(
            f"AD453 epoch {stage.epoch}: {whose} together have {num_tokens} tokens and fill no pack of "
            f"max_length={stage.rules.packing.max_length}; lower it, or set keep_tail=True"
        )

    def _is_alone(self, stage: PackStage) -> bool:
        """Whether to pack all samples of the epoch now, so that none wait for the next epoch."""
        is_last = self._epochs is not None and stage.epoch >= self._epochs - 1
        if is_last or stage.is_alone or not stage.rules.across_epochs:
            return True

        # With drop_last these samples would be dropped. Let them wait, unless there has been no pack at all.
        is_kept = not self._drop_last or stage.num_packs == 0
        return stage.epoch_packs == 0 and is_kept and stage.has_rest

    def _last_batch(self, stage: PackStage) -> Batch:
        """The last batch, with fewer packs than a batch of all ranks has."""
        num_packs = stage.num_ready
        if not num_packs:
            return ()

        if not self._drop_last:
            return self._deliver(num_packs)

        if stage.epoch_packs == 0 and not (stage.rules.across_epochs and stage.num_packs):
            raise NoSamplesError(
                f"AD406 epoch {stage.epoch} has {num_packs} packs, fewer than a batch of all ranks "
                f"({self._share.size}), and drop_last=True drops them all; lower batch_size or set drop_last=False"
            )

        stage.drop(num_packs, "drop_last")
        return ()

    def end(self, end: EndOfData) -> Batch:
        """Called on EndOfData; return (), as all samples are packed before."""
        self._is_over = True
        return ()

    def take_back(self) -> None:
        """The packs of the last batch are ready again."""
        if self._after is not None:
            self._stage.go_back(self._before, self._after)


def _nothing_kept(stage: PackStage) -> str:
    """The message for an epoch without a pack: all later epochs would be the same."""
    dropped = ", ".join(f"{number} by {reason}" for reason, number in sorted(stage.counts.samples.items()))
    return f"AD401 epoch {stage.epoch}: no sample could be packed: {dropped or 'there was none'}"
