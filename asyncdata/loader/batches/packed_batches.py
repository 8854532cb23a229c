"""The batches of an epoch where samples are packed or grouped by length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from asyncdata.core.errors import ConfigError, NoSamplesError

if TYPE_CHECKING:
    from asyncdata.batching.online.stage import PackStage
    from asyncdata.batching.online.state import PackedSample, RestartPoint
    from asyncdata.core.errors import EndOfData
    from asyncdata.core.types import Sample
    from asyncdata.loader.batches.sample_batches import Batch, Share

__all__ = ("PackBatches", "PackSource")

_SAMPLES_PER_PUSH = 64


class PackSource(Protocol):
    """Where packs come from: a loader, as far as that is concerned."""

    @property
    def share(self) -> Share:
        """This rank's, of batches of packs."""
        ...

    def tip(self) -> RestartPoint:
        """Where D goes on."""
        ...

    def collate_packs(self, packs: list[list[PackedSample]]) -> Any:
        """What the loop is given."""
        ...


class PackBatches:
    """Batches of packs; as :class:`~asyncdata.loader.batches.sample_batches.StatefulBatches`.

    An epoch is over when all its samples are pushed and fill no further batch. Where an epoch is packed by itself, and
    at the end of the data, what waits becomes packs now; else it goes on in the next epoch, but in an epoch that filled
    no batch at all: it has less data than the packer waits for.

    Where nothing was left of an epoch, the loop is over the next one: a run that is resumed behind the last batch of an
    epoch goes on as the first run did.

    :param epochs: how many epochs there are; None for no end.
    :param runs_on: False: the loop is over this epoch alone, even if nothing is left of it.
    :param max_push: samples to take at once, at most.
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
        """Nothing is delivered that the caller does not have."""
        self._after = None

    def next_request(self) -> tuple[int, int] | None:
        """No samples, while there are packs for a batch."""
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
        """The next batch, if the packs that ``samples`` complete suffice for one."""
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
        """Data of fewer tokens than one pack would be an epoch without a batch, and so would be all that follow."""
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
        """Whether nothing of the epoch waits for the next one."""
        is_last = self._epochs is not None and stage.epoch >= self._epochs - 1
        if is_last or stage.is_alone or not stage.rules.across_epochs:
            return True

        # It would only be dropped: better that it waits, unless nothing ever came of it.
        is_kept = not self._drop_last or stage.num_packs == 0
        return stage.epoch_packs == 0 and is_kept and stage.has_rest

    def _last_batch(self, stage: PackStage) -> Batch:
        """What is left at an end is fewer packs than a batch of all ranks has."""
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
        """The data is at its end; everything was packed before."""
        self._is_over = True
        return ()

    def take_back(self) -> None:
        """The packs of the last batch are ready again."""
        if self._after is not None:
            self._stage.go_back(self._before, self._after)


def _nothing_kept(stage: PackStage) -> str:
    """Such an epoch would be followed by others like it, for ever."""
    dropped = ", ".join(f"{number} by {reason}" for reason, number in sorted(stage.counts.samples.items()))
    return f"AD401 epoch {stage.epoch}: no sample could be packed: {dropped or 'there was none'}"
