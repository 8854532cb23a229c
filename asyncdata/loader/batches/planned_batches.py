"""Batches of packs that were planned. D is the packs' rows in their order, so a batch is a slice of D."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
from msgspec import structs

from asyncdata.batching.packed_sample import PackedSample
from asyncdata.batching.packers.base import Counts, PackState, restored
from asyncdata.core.types import Position
from asyncdata.delivery.ledger import RestartPoint
from asyncdata.loader.batches.base import PackTotals, share_of_batch
from asyncdata.loader.batches.pack_batches import PackBatches
from asyncdata.order.rank_share import row_of_epoch

if TYPE_CHECKING:
    from asyncdata.batching.planned.plan import Dealt, PlannedEpoch
    from asyncdata.core.types import Sample
    from asyncdata.delivery.ledger import Ledger
    from asyncdata.delivery.requests import Request
    from asyncdata.loader.batches.base import BatchShare, Deliveries
    from asyncdata.loader.batches.epoch import Batch
    from asyncdata.loader.batches.pack_batches import CollatePacks
    from asyncdata.loader.config import LoaderConfig

__all__ = ("PlannedBatches", "PlannedBatching", "PlannedProgress", "PlannedWindows")


class PlannedWindows(Protocol):
    """The windows of planned packs, as far as batches need them."""

    def plan(self, epoch: int) -> PlannedEpoch | None:
        """The planned packs of an epoch; known once a sample of it is ready."""
        ...

    def dealt_at(self, position: Position) -> Dealt | None:
        """For which ranks the packs of the epoch at ``position`` are grouped, if it has begun and has groups."""
        ...

    def resume_dealt(self, position: Position, dealt: tuple[int, int] | None) -> None:
        """Prepare for a restart at ``position``, from a snapshot that kept ``dealt``."""
        ...


class PlannedProgress(NamedTuple):
    """How many planned packs were delivered. Which ones follows from the ledger's position.

    :ivar counts: samples and tokens that are in no pack, of the epochs that have ended.
    :ivar num_packs: packs delivered to all ranks, in this run and in those that it resumed.
    :ivar epoch_packs: packs delivered of the current epoch.
    :ivar num_tokens: tokens of the delivered packs.
    """

    counts: Counts
    num_packs: int = 0
    epoch_packs: int = 0
    num_tokens: int = 0

    def delivered(self, num_packs: int, num_tokens: int) -> PlannedProgress:
        """The progress after packs are delivered, to all ranks together."""
        return self._replace(
            num_packs=self.num_packs + num_packs,
            epoch_packs=self.epoch_packs + num_packs,
            num_tokens=self.num_tokens + num_tokens,
        )

    def dropped(self, reason: str, num_samples: int, num_tokens: int) -> PlannedProgress:
        """The progress after samples and tokens are left out, and counted."""
        counts = self.counts.copy()
        counts.add(reason, samples=num_samples, tokens=num_tokens)
        return self._replace(counts=counts)

    def at_next_epoch(self, plan: PlannedEpoch) -> PlannedProgress:
        """The progress after the epoch is delivered: what its plan has in no pack is counted."""
        found, progress = plan.packs.counts, self
        for reason in found.samples.keys() | found.tokens.keys():
            progress = progress.dropped(reason, found.samples.get(reason, 0), found.tokens.get(reason, 0))
        if plan.num_left_out:
            progress = progress.dropped("left_out", *plan.left_out)
        return progress._replace(epoch_packs=0)


class PlannedBatching:
    """Planned packs, or planned groups of single samples; see :class:`~asyncdata.loader.batches.batching.Batching`."""

    is_packed = True
    loops_only = "packs samples"

    def __init__(self, windows: PlannedWindows, config: LoaderConfig, collate: CollatePacks) -> None:
        self._windows = windows
        self._config = config
        self._collate = collate

    def description(self) -> dict[str, Any]:
        """As the protocol says: nothing, as the plan is a part of the source's order."""
        return {}

    def begin(self) -> PlannedProgress:
        """As the protocol says."""
        return PlannedProgress(Counts())

    def at_epoch(self, ledger: Ledger, epoch: int) -> Ledger:
        """As the protocol says."""
        progress: PlannedProgress = ledger.packs
        self._windows.resume_dealt(Position(epoch), None)
        return structs.replace(ledger.at_epoch(epoch), packs=progress._replace(epoch_packs=0))

    def epoch(self, ledger: Ledger) -> int:
        """As the protocol says."""
        return ledger.position.epoch

    def totals(self, ledger: Ledger) -> PackTotals:
        """As the protocol says."""
        progress: PlannedProgress = ledger.packs
        return PackTotals(progress.num_packs, progress.num_tokens, progress.counts)

    def restart_point(self, ledger: Ledger) -> RestartPoint:
        """As the protocol says: no sample waits, so at the next one."""
        return RestartPoint(ledger.position, ledger.counters)

    def saved(self, ledger: Ledger) -> PackState:
        """As the protocol says. The packs follow from the position, and from the ranks they are grouped for."""
        progress: PlannedProgress = ledger.packs
        world_size, accumulation = self._windows.dealt_at(ledger.position) or (0, 0)
        return PackState(
            epoch=ledger.position.epoch,
            last=None,
            packer={"counts": msgspec.to_builtins(progress.counts)},
            packs=[],
            num_gone=0,
            window=0,
            world_size=world_size,
            accumulation=accumulation,
            num_packs=progress.num_packs,
            epoch_packs=progress.epoch_packs,
            num_tokens=progress.num_tokens,
        )

    def restored(self, ledger: Ledger, state: PackState) -> Ledger:
        """As the protocol says."""
        counts = restored(state.packer.get("counts", {}), Counts)
        dealt = (state.world_size, state.accumulation) if state.world_size else None
        self._windows.resume_dealt(ledger.position, dealt)
        progress = PlannedProgress(counts, state.num_packs, state.epoch_packs, state.num_tokens)
        return structs.replace(ledger, packs=progress)

    def batches(self, deliveries: Deliveries, *, runs_on: bool) -> PlannedBatches:
        """As the protocol says."""
        config = self._config
        share = share_of_batch(config)
        return PlannedBatches(
            self._windows, deliveries, share, self._collate, drop_last=config.drop_last, runs_on=runs_on
        )


class PlannedBatches(PackBatches):
    """The batches of one loop."""

    def __init__(
        self,
        windows: PlannedWindows,
        deliveries: Deliveries,
        share: BatchShare,
        collate: CollatePacks,
        *,
        drop_last: bool,
        runs_on: bool,
    ) -> None:
        super().__init__(deliveries, share, collate, drop_last=drop_last, runs_on=runs_on)
        self._windows = windows

    def _epoch_of(self, ledger: Ledger) -> int:
        return ledger.position.epoch

    def _wanted(self, ledger: Ledger) -> tuple[int, int]:
        """The rows of the next batch's packs; one row while the plan is not known."""
        position = ledger.position
        plan = self._windows.plan(position.epoch)
        if plan is None:
            return 1, position.epoch

        row = row_of_epoch(position)
        return max(1, int(plan.offsets[self._packs_from(plan, row).stop]) - row), position.epoch

    def _packs_from(self, plan: PlannedEpoch, row: int) -> range:
        """The packs of the batch whose first row is ``row``."""
        first = plan.first_pack_from(row)
        return range(first, min(first + self._share.size, plan.num_packs))

    def finish(self, request: Request, samples: list[Sample]) -> Batch:
        """The batch of ``samples``.

        Nothing is committed, and the samples are requested again, if they do not form a batch: a sample that was
        requested only to get the plan, or samples before which another thread has taken some.
        """
        progress: PlannedProgress = request.before.packs
        if not samples:
            return self._commit(request, self._at_end_of_epoch(request, progress))

        position = samples[0].position
        plan = None if position is None else self._windows.plan(position.epoch)
        if plan is None or position is None:
            return ()

        row = row_of_epoch(position)
        packs = self._packs_from(plan, row)
        if len(samples) != int(plan.offsets[packs.stop]) - row:
            return ()

        progress, batch = self._batch(progress, plan, packs, row, samples)
        return self._commit(request, progress, batch)

    def _at_end_of_epoch(self, request: Request, progress: PlannedProgress) -> PlannedProgress:
        """No row of the epoch is left: count its end, if batches of it were delivered before a restart."""
        epoch = request.before.position.epoch
        plan = self._windows.plan(epoch) if epoch == request.last_epoch else None
        return progress if plan is None or not progress.epoch_packs else progress.at_next_epoch(plan)

    def _batch(
        self, progress: PlannedProgress, plan: PlannedEpoch, packs: range, row: int, samples: list[Sample]
    ) -> tuple[PlannedProgress, Batch]:
        """The progress after these packs are delivered, and this rank's share of them, collated."""
        pieces = plan.pieces(int(plan.offsets[packs.start]), int(plan.offsets[packs.stop]))
        num_tokens = int((pieces.stops - pieces.starts).sum())
        batch: Batch = ()
        if len(packs) < self._share.size and self._drop_last:
            if packs.start == 0:
                self._refuse_to_drop_all(self._epoch or 0, len(packs))
            progress = progress.dropped("drop_last", len(pieces.rows), num_tokens)
        else:
            own = [_pack(plan, number, row, samples) for number in self._numbers(packs)]
            batch = (self._collate(own),) if own else ()
            progress = progress.delivered(len(packs), num_tokens)
        return progress.at_next_epoch(plan) if packs.stop == plan.num_packs else progress, batch

    def _numbers(self, packs: range) -> list[int]:
        """The numbers of this rank's packs. A pack's number decides its rank, except in a short last batch."""
        rank, world_size = self._share.rank, self._share.world_size
        if len(packs) < self._share.size:
            return [packs[number] for number in self._share.of(len(packs))]

        return [number for number in packs if number % world_size == rank]


def _pack(plan: PlannedEpoch, number: int, row: int, samples: list[Sample]) -> list[PackedSample]:
    """The pieces of one pack, cut from ``samples``, the first of which is the epoch's row ``row``.

    Bad rows that are passed over have no tokens, and are left out.
    """
    first, stop = int(plan.offsets[number]), int(plan.offsets[number + 1])
    _, starts, stops = plan.pieces(first, stop)
    cuts = zip(samples[first - row : stop - row], starts.tolist(), stops.tolist(), strict=True)
    return [PackedSample(sample, start, end) for sample, start, end in cuts if len(sample.tokens)]
