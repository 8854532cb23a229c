"""The batches of an epoch whose packs are planned. D is the packs' rows in order, so a batch is a slice of D."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from asyncdata.batching.online.progress import PackedSample
from asyncdata.batching.packers.base import Counts, PackState, restored
from asyncdata.core.errors import NoSamplesError
from asyncdata.loader.batches.sample_batches import NotTaken
from asyncdata.order.rank_share import row_of_epoch

if TYPE_CHECKING:
    from asyncdata.batching.planned.plan import PlannedEpoch
    from asyncdata.core.errors import EndOfData
    from asyncdata.core.types import Position, Sample
    from asyncdata.loader.batches.sample_batches import Batch, Share

__all__ = ("PlannedBatches", "PlannedTally", "PlanSource")


class _Tally(NamedTuple):
    """Counters as one immutable value, which is replaced as a whole.

    :ivar counts: samples and tokens that are in no pack.
    """

    counts: Counts
    num_packs: int = 0
    epoch_packs: int = 0
    num_tokens: int = 0


class PlannedTally:
    """Counts the planned packs that were delivered. The position of delivery is in the ledger."""

    num_held = 0

    def __init__(self) -> None:
        self._now = _Tally(Counts())

    @property
    def counts(self) -> Counts:
        """Samples and tokens that are in no pack, of the epochs that have ended."""
        return self._now.counts

    @property
    def num_packs(self) -> int:
        """Packs delivered to all ranks, in this run and in those that it resumed."""
        return self._now.num_packs

    @property
    def num_tokens(self) -> int:
        """Tokens of those packs."""
        return self._now.num_tokens

    @property
    def epoch_packs(self) -> int:
        """Packs delivered in the current epoch."""
        return self._now.epoch_packs

    @property
    def now(self) -> object:
        """The current counters, for :meth:`state` and :meth:`go_back`."""
        return self._now

    def go_back(self, now: object) -> None:
        """Put earlier counters back."""
        assert isinstance(now, _Tally), "a token of a tally"
        self._now = now

    def deliver(self, num_packs: int, num_tokens: int) -> None:
        """Count packs that are delivered, to all ranks together."""
        before = self._now
        self._now = before._replace(
            num_packs=before.num_packs + num_packs,
            epoch_packs=before.epoch_packs + num_packs,
            num_tokens=before.num_tokens + num_tokens,
        )

    def drop(self, reason: str, num_samples: int, num_tokens: int) -> None:
        """Count samples and tokens that are left out."""
        counts = self._now.counts.copy()
        counts.add(reason, samples=num_samples, tokens=num_tokens)
        self._now = self._now._replace(counts=counts)

    def end_epoch(self, plan: PlannedEpoch) -> None:
        """The epoch is delivered: count the samples and tokens that its plan has in no pack."""
        for reason in plan.packs.counts.samples.keys() | plan.packs.counts.tokens.keys():
            found = plan.packs.counts
            self.drop(reason, found.samples.get(reason, 0), found.tokens.get(reason, 0))
        if plan.num_left_out:
            self.drop("left_out", *plan.left_out)
        self._now = self._now._replace(epoch_packs=0)

    def restart(self) -> None:
        """Another epoch begins."""
        self._now = self._now._replace(epoch_packs=0)

    @staticmethod
    def state(now: object, epoch: int, dealt: tuple[int, int] | None) -> PackState:
        """What a snapshot keeps besides the position.

        :param now: the counters at the time of the snapshot.
        :param dealt: the ranks for which the packs of the epoch are grouped, and the packs of each in a step.
        """
        assert isinstance(now, _Tally), "a token of a tally"
        world_size, accumulation = dealt or (0, 0)
        return PackState(
            epoch=epoch,
            last=None,
            packer={"counts": msgspec.to_builtins(now.counts)},
            packs=[],
            num_gone=0,
            window=0,
            world_size=world_size,
            accumulation=accumulation,
            num_packs=now.num_packs,
            epoch_packs=now.epoch_packs,
            num_tokens=now.num_tokens,
        )

    def restore(self, state: PackState) -> tuple[int, int] | None:
        """Continue from ``state``; return how the packs of its epoch are dealt, if it says so.

        :raises SnapshotError: if it is not a state of planned packs.
        """
        counts = restored(state.packer.get("counts", {}), Counts)
        self._now = _Tally(counts, state.num_packs, state.epoch_packs, state.num_tokens)
        return (state.world_size, state.accumulation) if state.world_size else None


class _Before(NamedTuple):
    """The state that :meth:`PlannedBatches.take_back` restores."""

    moment: Any
    position: Position
    tally: object
    has_batches: bool


class PlanSource(Protocol):
    """The loader, as far as these batches need it."""

    @property
    def share(self) -> Share:
        """This rank's share of a batch of packs."""
        ...

    def position(self) -> Position:
        """The position of the next sample."""
        ...

    def plan(self, epoch: int) -> PlannedEpoch | None:
        """The packs of an epoch, once a sample of it is ready."""
        ...

    def collate_packs(self, packs: list[list[PackedSample]]) -> Any:
        """The batch of these packs."""
        ...


class Undoable(Protocol):
    """The coordinator, as far as these batches need it to undo a delivery."""

    def moment(self) -> Any:
        """The current state of delivery."""
        ...

    def go_back(self, before: Any, after: Any) -> None:
        """Undo the deliveries between two moments, if there were none after the second one."""
        ...


class PlannedBatches:
    """Batches of planned packs; see :class:`~asyncdata.loader.batches.sample_batches.StatefulBatches`.

    The position of its samples in D decides what a batch is.

    :param drop_last: leave out packs that fill no batch of all ranks; they are counted.
    :param runs_on: False: the loop covers the epoch in which it begins, even if no samples are left of it.
    """

    def __init__(
        self, loader: PlanSource, delivered: Undoable, tally: PlannedTally, *, drop_last: bool, runs_on: bool = True
    ) -> None:
        self._loader = loader
        self._delivered = delivered
        self._tally = tally
        self._share = loader.share
        self._drop_last = drop_last
        self._epoch: int | None = None
        self._runs_on = runs_on
        self._has_batches = self._is_over = False
        self._after: Any = None

    def begin(self) -> None:
        """A new batch is requested: the caller has all earlier ones."""
        self._before = _Before(self._delivered.moment(), self._loader.position(), self._tally.now, self._has_batches)
        self._after = None

    def take_back(self) -> None:
        """Make the last batch the next one again. If its samples are put back already, only the counters go back."""
        before = self._before
        if self._after is not None:
            self._delivered.go_back(before.moment, self._after)
        if self._loader.position() == before.position:
            self._tally.go_back(before.tally)
            self._has_batches = before.has_batches

    def next_request(self) -> tuple[int, int] | None:
        """The number of rows of the next batch's packs, and their epoch; one row while the plan is not known."""
        position = self._loader.position()
        if self._epoch is None or (position.epoch > self._epoch and self._runs_on and not self._has_batches):
            self._epoch = position.epoch
        if self._is_over or position.epoch > self._epoch:
            return None

        plan = self._loader.plan(self._epoch)
        if plan is None:
            return 1, self._epoch

        row = row_of_epoch(position)
        return max(1, int(plan.offsets[self._packs_from(plan, row).stop]) - row), self._epoch

    def _packs_from(self, plan: PlannedEpoch, row: int) -> range:
        """The packs of the batch whose first row is ``row``."""
        first = plan.first_pack_from(row)
        return range(first, min(first + self._share.size, plan.num_packs))

    def finish(self, samples: list[Sample]) -> Batch:
        """This rank's packs of the batch, collated.

        :raises NotTaken: for a sample that was requested only to get the plan, and for samples that form no batch,
            because another thread has taken the samples before them.
        """
        if not samples:
            self._end_epoch()
            return ()

        position = samples[0].position
        plan = self._loader.plan(position.epoch) if position is not None else None
        if plan is None or position is None:
            raise NotTaken

        row = row_of_epoch(position)
        packs = self._packs_from(plan, row)
        if len(samples) != int(plan.offsets[packs.stop]) - row:
            raise NotTaken

        self._after = self._delivered.moment()
        return self._batch(plan, packs, row, samples)

    def _end_epoch(self) -> None:
        """No row of the epoch is left: count its end, if batches of it were delivered before a restart."""
        plan = self._loader.plan(self._epoch or 0)
        if plan is not None and self._tally.epoch_packs:
            self._tally.end_epoch(plan)

    def _batch(self, plan: PlannedEpoch, packs: range, row: int, samples: list[Sample]) -> Batch:
        pieces = plan.pieces(int(plan.offsets[packs.start]), int(plan.offsets[packs.stop]))
        num_tokens = int((pieces.stops - pieces.starts).sum())
        if len(packs) < self._share.size and self._drop_last:
            self._check_kept(packs)
            self._tally.drop("drop_last", len(pieces.rows), num_tokens)
            self._tally.end_epoch(plan)
            return ()

        own = [self._pack(plan, number, row, samples) for number in self._numbers(packs)]
        batch = (self._loader.collate_packs(own),) if own else ()
        self._has_batches = True
        self._tally.deliver(len(packs), num_tokens)
        if packs.stop == plan.num_packs:
            self._tally.end_epoch(plan)
        return batch

    def _check_kept(self, packs: range) -> None:
        if packs.start == 0:
            raise NoSamplesError(
                f"AD406 epoch {self._epoch} has {len(packs)} packs, fewer than a batch of all ranks "
                f"({self._share.size}), and drop_last=True drops them all; lower batch_size or set drop_last=False"
            )

    def _numbers(self, packs: range) -> list[int]:
        """The numbers of this rank's packs. A pack's number decides its rank, except in a short last batch."""
        rank, world_size = self._share.rank, self._share.world_size
        if len(packs) < self._share.size:
            return [packs[number] for number in self._share.of(len(packs))]

        return [number for number in packs if number % world_size == rank]

    @staticmethod
    def _pack(plan: PlannedEpoch, number: int, row: int, samples: list[Sample]) -> list[PackedSample]:
        """The pieces of one pack. Bad rows that are passed over have no tokens, and are left out."""
        first, stop = int(plan.offsets[number]), int(plan.offsets[number + 1])
        _, starts, stops = plan.pieces(first, stop)
        cuts = zip(samples[first - row : stop - row], starts.tolist(), stops.tolist(), strict=True)
        return [PackedSample(sample, start, end) for sample, start, end in cuts if len(sample.tokens)]

    def end(self, end: EndOfData) -> Batch:
        """Called on EndOfData; return (), as a batch has only whole packs."""
        self._is_over = True
        return ()
