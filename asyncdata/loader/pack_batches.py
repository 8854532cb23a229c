"""How a loader makes packs, from its settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import structs

from asyncdata.batching.collators import Document
from asyncdata.batching.length_grouping import LengthGrouping
from asyncdata.batching.online import OnlinePacks, OnlineProgress, num_until
from asyncdata.batching.packers import SinglePacking
from asyncdata.batching.packs import Counts, Delivered, Pack, PackState, restored
from asyncdata.batching.planned import PLANNED_PACKINGS, PackRules, PlannedEpoch
from asyncdata.batching.xtuner_packing import LoaderPacking
from asyncdata.core.errors import ConfigError, NoSamplesError, get_logger
from asyncdata.core.messages import is_mass
from asyncdata.core.settings import Description
from asyncdata.core.threads import no_op
from asyncdata.core.types import Position, Sample, measured
from asyncdata.delivery.ledger import Ledger, Request, RestartPoint, RowKey
from asyncdata.loader.sample_batches import Batch, Batching, BatchShare, Making, PackTotals
from asyncdata.order.order import row_of_epoch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from asyncdata.delivery.coordinator import Coordinator
    from asyncdata.loader.config import LoaderConfig
    from asyncdata.read_ahead.indexed_windows import PlannedRows


def rules_of(
    config: LoaderConfig, packing: LoaderPacking | None, grouping: LengthGrouping | None, *, is_filtered: bool
) -> PackRules:
    """How a loader makes packs.

    :raises ConfigError: if settings for rollouts are given, too, or for a packing that cannot be planned.
    """
    is_packing = hasattr(packing, "max_length") and not callable(packing)  # classes and collators can be called
    if packing is not None and not is_packing:
        raise ConfigError(f"packing is SoftPacking(max_length=...) or another packing; got {packing!r}")

    if not isinstance(grouping, LengthGrouping | None):
        raise ConfigError(f"length_grouping is LengthGrouping(...); got {grouping!r}")

    refused = {
        "n_samples_per_prompt": config.n_samples_per_prompt > 1,
        'commit="on_ack"': config.commit == "on_ack",
        "buffer_filter": is_filtered,
    }
    if names := [name for name, is_given in refused.items() if is_given]:
        raise ConfigError(
            f"packing and length_grouping are for training, {', '.join(names)} for rollouts: leave one of them out"
        )

    if config.batch_size is None:
        raise ConfigError("packing and length_grouping need batch_size=...: packs of each rank in a batch")

    has_xtuners_order = grouping is not None and grouping.method == "xtuner"
    return PackRules(
        packing=packing or SinglePacking(),
        grouping=grouping,
        seed=config.seed,
        rank=config.ranks.rank,
        world_size=config.ranks.world_size,
        batch_size=config.batch_size,
        accumulation=config.ranks.gradient_accumulation,
        is_planned=config.plan_packs or has_xtuners_order or isinstance(packing, PLANNED_PACKINGS),
        round_up=not config.drop_last and config.ranks.round_up is not False,
    )


def with_length(collate_fn: Any, packing: LoaderPacking) -> Any:
    """One of our collators of packs with the packing's ``max_length``, and room for its dummy."""
    longest = packing.max_length
    if not isinstance(collate_fn, Description) or isinstance(packing, SinglePacking):
        return collate_fn

    own: int | None = collate_fn.max_length  # type: ignore[attr-defined]
    dummy, multiple = getattr(collate_fn, "dummy", None), getattr(collate_fn, "segment_multiple_of", 1)
    if own is None:
        num_more = 0 if dummy is None else -(-len(dummy.tokens) // multiple) * multiple
        return structs.replace(collate_fn, max_length=longest + num_more)

    if own != longest and (dummy is None or own < longest):
        raise ConfigError(
            f"AD450 {type(packing).__name__} has max_length={longest}, and {type(collate_fn).__name__} has "
            f"max_length={own}: leave it out of the collator, which then takes that of the packing"
        )

    return collate_fn


_log = get_logger(__name__)
_SAMPLES_PER_PUSH = 64
_BATCHES_AHEAD = 2
"""Batches whose media are loaded while the trainer has the one before them, if they have room."""


class PackBatching(Batching):
    """What all batchings of packs have in common.

    :ivar on_packs: called with this rank's packs of a batch, before it is delivered.
    """

    on_packs: Callable[[list[Pack]], object] = staticmethod(no_op)
    is_packed = True
    is_planned = False
    has_told = False
    """Whether the log says that the packing drops samples in mass."""

    def __init__(self, making: Making) -> None:
        super().__init__(making)
        self.loops_only = "packs samples"

    def totals(self, ledger: Ledger) -> PackTotals:
        progress: OnlineProgress | PlannedProgress = ledger.packs
        num_packs, _, num_tokens, bad_rows = progress.delivered
        return PackTotals(num_packs, num_tokens, progress.counts, progress.num_held, bad_rows)

    def collated(self, packs: Iterable[Pack], excluded: Mapping[RowKey, object]) -> Batch:
        """The batch of a rank's packs, whose references are samples; () if there are none.

        :param excluded: rows that are left out of them.
        """
        if excluded:
            packs = self.row_keys.without(packs, excluded)
        packs = list(packs)
        if self.making.packs_samples:
            self.on_packs(packs)
            items: list[Any] = [[_document(*piece) for piece in pack] for pack in packs]
        else:
            items = [pack[0][0] for pack in packs if pack]
        return (self.making.batch(items),) if items else ()


def _document(sample: Sample, start: int, stop: int) -> Document:
    labels = sample.labels
    return Document(sample.tokens[start:stop], None if labels is None else labels[start:stop], None, sample, start)


class PackBatches(ABC):
    """The batches of one loop.

    They are made in three steps. A request is served: no sample is delivered yet. The batch is made, and the progress
    of packing after it. Both are committed at once (:meth:`~asyncdata.delivery.coordinator.Coordinator.commit`). So
    whatever fails before the commit has no effect, and a snapshot taken meanwhile continues with this batch.

    If no samples were left of an epoch, the loop covers the next one. So a run that is resumed after the last batch of
    an epoch continues as the first run did.

    :param runs_on: False: the loop covers the epoch in which it begins, even if no samples are left of it.
    """

    def __init__(self, batching: PackBatching, coordinator: Coordinator, *, runs_on: bool) -> None:
        self._batching = batching
        self._coordinator = coordinator
        self._share = BatchShare.of_config(batching.config)
        self._drop_last = batching.config.drop_last
        self._runs_on = runs_on
        self._epoch: int | None = None
        self._first_pack = 0
        self._is_over = False

    def next_request(self) -> Request | None:
        """The samples to take next, possibly none; None at the end of the loop."""
        ledger = self._coordinator.ledger
        epoch, num_packs = self._batching.epoch(ledger), ledger.packs.delivered.num_packs
        if self._epoch is None:
            self._enter(ledger)
            self._epoch, self._first_pack = epoch, num_packs
        elif epoch > self._epoch:
            self._is_over = self._is_over or not self._runs_on or num_packs > self._first_pack
            self._enter(ledger)
            self._epoch = epoch
        if self._is_over:
            return None

        # Planned packs need all of their samples.
        may_be_fewer = not self._batching.is_planned
        return Request(self._num_wanted(ledger), epoch, is_for_packs=True, may_be_fewer=may_be_fewer)

    @abstractmethod
    def finish(self, request: Request, samples: list[Sample]) -> Batch:
        """Commit the batch that ``samples`` complete, and return it; () if they complete none."""

    def end(self) -> Batch:
        """Called on EndOfData: the last batch was made before, so there is none left."""
        self._is_over = True
        return ()

    def _enter(self, ledger: Ledger) -> None:  # noqa: B027 - planned packs prepare nothing
        """The loop begins an epoch."""

    @abstractmethod
    def _num_wanted(self, ledger: Ledger) -> int:
        """The number of samples to take next."""

    def _commit(self, request: Request, progress: Any, batch: Batch = ()) -> Batch:
        """Commit, and return the batch. If the state has changed since, as after a restart: (), to try again."""
        self._tell_overlong(progress.counts.samples.get("overlong", 0), request.after.counters.num_samples)
        return batch if self._coordinator.commit(request, progress) else ()

    def _tell_overlong(self, num_dropped: int, num_samples: int) -> None:
        num_rows = num_samples + num_dropped * self._batching.is_planned  # a plan has no row that is dropped
        if num_dropped and not self._batching.has_told and is_mass(num_dropped, num_rows):
            self._batching.has_told = True
            _log.warning("rows.dropped", reason="overlong", num_dropped=num_dropped, num_rows=num_rows)

    def _refuse_to_drop_all(self, epoch: int, num_packs: int) -> None:
        raise NoSamplesError(
            f"AD406 epoch {epoch} has {num_packs} packs, fewer than a batch of all ranks ({self._share.size}), and "
            "drop_last=True drops them all; lower batch_size or set drop_last=False"
        )


# Packs of samples as they come.


class OnlineBatching(PackBatching):
    """Packing of samples as they come. Also length grouping without packing, where each sample is a pack."""

    def __init__(self, making: Making, rules: PackRules) -> None:
        super().__init__(making)
        self.packs = OnlinePacks(rules)

    def description(self) -> dict[str, Any]:
        return self.packs.rules.description()

    def begin(self, ledger: Ledger) -> OnlineProgress:
        return self.packs.begin(_point_of(ledger))

    def at_epoch(self, ledger: Ledger, epoch: int) -> Ledger:
        ledger = ledger.at_epoch(epoch)
        return structs.replace(ledger, packs=self.packs.begin(_point_of(ledger), ledger.packs))

    def epoch(self, ledger: Ledger) -> int:
        progress: OnlineProgress = ledger.packs
        return progress.epoch

    def saved(self, ledger: Ledger) -> PackState:
        return self.packs.saved(ledger.packs)

    def restored(self, ledger: Ledger, state: PackState) -> Ledger:
        return structs.replace(ledger, packs=self.packs.restored(state, _point_of(ledger)))

    def batches(self, coordinator: Coordinator, *, runs_on: bool) -> PackBatches:
        return _OnlineBatches(self, coordinator, runs_on=runs_on)


class _OnlineBatches(PackBatches):
    """The batches of one loop.

    If samples have media, packs are made of their plans. A batch whose media are not all loaded is not delivered: what
    was packed is committed, and the next request waits for them.

    An epoch ends when all its samples are pushed to the packer and no further batch is full. Samples that then wait in
    the packer become packs at once if each epoch is packed on its own, at the end of the data, and in an epoch that
    filled no batch at all (it has less data than the packer collects). Otherwise they are packed in the next epoch.
    """

    def __init__(self, batching: OnlineBatching, coordinator: Coordinator, *, runs_on: bool) -> None:
        super().__init__(batching, coordinator, runs_on=runs_on)
        self._packs = batching.packs
        self._epochs = batching.config.epochs
        self._num_taken, self._usual = 0, max(1, batching.config.capacity // 2)  # samples of this batch, of the last
        self._first_kept, self._from_start = 0, False

    def _enter(self, ledger: Ledger) -> None:
        progress: OnlineProgress = ledger.packs
        self._first_kept, self._from_start = progress.num_kept, progress.delivered.epoch_packs == 0

    def _num_wanted(self, ledger: Ledger) -> int:
        """No samples while there are packs for a batch, or none are left of the epoch."""
        progress: OnlineProgress = ledger.packs
        has_enough = progress.num_ready >= self._share.size or _is_drained(ledger, progress)
        return 0 if has_enough else min(_SAMPLES_PER_PUSH, self._usual)

    @property
    def _has_media(self) -> bool:
        return self._coordinator.channel.media is not None

    def next_request(self) -> Request | None:
        request = super().next_request()
        if request is not None and request.num_groups == 0 and self._has_media:
            request.packed = self._next_samples(self._coordinator.ledger)
        return request

    def _next_samples(self, ledger: Ledger) -> tuple[list[Sample], list[Sample]]:
        """This rank's samples of the next batch, and of those after it, as far as these are there."""
        progress, share, size = ledger.packs, self._share, self._share.size
        is_short = progress.num_ready < size and (not progress.is_alone or self._drop_last)
        now = () if is_short else share.of(min(progress.num_ready, size))
        ahead = progress if is_short else self._looked_ahead(ledger, progress)
        num_ahead = min(ahead.num_ready // size, 1 + _BATCHES_AHEAD) * size
        later = range(size + share.rank, num_ahead, share.world_size)
        packs = (self._packs.packs(some, numbers) for some, numbers in ((progress, now), (ahead, later)))
        found = [[sample for pack in some for sample, _, _ in pack] for some in packs]
        return found[0], found[1]

    def _looked_ahead(self, ledger: Ledger, progress: OnlineProgress) -> OnlineProgress:
        """The progress after samples that are there and are not taken yet, so that their media can be loaded."""
        samples = self._coordinator.ahead(_BATCHES_AHEAD * max(self._usual, _SAMPLES_PER_PUSH), progress.epoch)
        point, until = _point_of(ledger), (1 + _BATCHES_AHEAD) * self._share.size
        with suppress(ConfigError):  # of a sample whose turn has not come
            return self._packs.pushed(progress, measured(samples), point, until)
        return progress

    def finish(self, request: Request, samples: list[Sample]) -> Batch:
        """Push ``samples`` to the packer; the next batch, if there are enough packs for it."""
        progress: OnlineProgress = request.before.packs
        if samples:  # up to the one that fills the batch: so the place in D follows from the batches alone
            arrived = measured(samples)
            again = num_until(arrived, progress.last)  # samples that waited before a restart, or came before those
            point = _point_of(request.before.settled())  # where a restart reads follows from them, too
            progress = self._packs.pushed(progress, arrived[: again or None], point, self._share.size)
            number = again or num_until(arrived, progress.last)
            ends_epoch = progress.num_ready >= self._share.size and _is_drained(request.after, progress)
            if number < len(samples) or ends_epoch:  # the end of the epoch is passed with the batch after it
                self._coordinator.shorten(request, number)
            if again:
                return self._commit(request, progress)

            self._num_taken += number
        if progress.num_ready < self._share.size and _is_drained(request.after, progress):
            return self._end_epoch(request, progress)

        is_full = progress.num_ready >= self._share.size and not (samples and self._has_media)  # first, look ahead
        return self._deliver(request, progress, self._share.size if is_full else 0)

    def _deliver(self, request: Request, progress: OnlineProgress, num_packs: int, *, is_end: bool = False) -> Batch:
        """Commit the delivery of ``num_packs`` packs, and return this rank's share of them, collated."""
        packs, bad_rows = self._packs.packs(progress, self._share.of(num_packs)), {}
        if self._has_media:
            samples = [sample for pack in packs for sample, _, _ in pack]
            num_passed = request.after.counters.num_bad_rows + sum(progress.delivered.bad_rows.values())
            given = self._coordinator.give_media(samples, num_passed)
            num_packs, is_end = (0, False) if given is None else (num_packs, is_end)
            found, bad_rows = given or ({}, {})
            packs = [[(found.get(piece[0].position, piece[0]), *piece[1:]) for piece in pack] for pack in packs]
        if not num_packs and not is_end:
            return self._commit(request, progress._replace(settled=request.before.settled()))

        batch = self._batching.collated(packs, request.after.excluded)
        self._usual, self._num_taken = self._num_taken or self._usual, 0
        progress = progress._replace(settled=None)
        progress = self._packs.delivered(progress, num_packs, bad_rows)
        return self._commit(request, self._packs.at_next_epoch(progress) if is_end else progress, batch)

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
            if not self._num_packs_before(progress):  # the next epochs would be the same
                self._refuse_to_drop_all(progress.epoch, num_packs)
            progress, num_packs = self._packs.dropped(progress, num_packs, "drop_last"), 0
        return self._deliver(request, progress, num_packs, is_end=True)

    def _check_filled(self, progress: OnlineProgress) -> None:
        """Refuse data with fewer tokens than one pack has: all epochs would be without a batch."""
        rules, epoch, num_tokens = self._packs.rules, progress.epoch, progress.waiting_tokens
        if progress.num_ready or self._num_packs_before(progress) or not num_tokens or progress.has_rest:
            return

        whose = f"all samples of {epoch + 1} epochs" if rules.across_epochs and epoch else "all its samples"
        raise ConfigError(
            f"AD453 epoch {epoch}: {whose} together have {num_tokens} tokens and fill no pack of "
            f"max_length={rules.packing.max_length}; lower it, or set keep_tail=True"
        )

    def _num_packs_before(self, progress: OnlineProgress) -> int:
        """The delivered packs of the epoch; of all epochs, if packs may hold samples of two."""
        return progress.delivered.num_packs if self._packs.rules.across_epochs else progress.delivered.epoch_packs

    def _is_alone(self, progress: OnlineProgress) -> bool:
        """Whether to pack all samples of the epoch now, so that none wait for the next epoch."""
        is_last = self._epochs is not None and progress.epoch >= self._epochs - 1
        if is_last or progress.is_alone or not self._packs.rules.across_epochs:
            return True

        # With drop_last these samples would be dropped. Let them wait, unless there has been no pack at all.
        is_kept = not self._drop_last or progress.delivered.num_packs == 0
        return progress.delivered.epoch_packs == 0 and is_kept and progress.has_rest


def _point_of(ledger: Ledger) -> RestartPoint:
    return RestartPoint(ledger.position, ledger.counters)


def _is_drained(ledger: Ledger, progress: OnlineProgress) -> bool:
    """Whether all samples of the epoch were taken from the stream."""
    return ledger.position.epoch > progress.epoch


def _nothing_kept(progress: OnlineProgress) -> str:
    """The message for an epoch without a pack: all later epochs would be the same."""
    dropped = ", ".join(f"{number} by {reason}" for reason, number in sorted(progress.counts.samples.items()))
    way_out = "; give the packing a larger max_length" if "overlong" in progress.counts.samples else ""
    return f"AD401 epoch {progress.epoch}: no sample could be packed: {dropped or 'there was none'}{way_out}"


# Packs that were planned. D is the packs' rows in their order, so a batch is a slice of D.


class PlannedProgress(NamedTuple):
    """How many planned packs were delivered. Which ones follows from the ledger's position.

    :ivar counts: samples and tokens that are in no pack, of the epochs that have ended.
    :ivar num_held: samples in memory: none.
    """

    counts: Counts
    delivered: Delivered = Delivered()
    num_held: int = 0

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
        return progress.at_start()

    def at_start(self) -> PlannedProgress:
        """The progress at the start of an epoch."""
        return self._replace(delivered=self.delivered._replace(epoch_packs=0))


class PlannedBatching(PackBatching):
    """Planned packs, or planned groups of single samples. The plan is a part of the source's order.

    :param plans: know the planned packs of an epoch, once a sample of it is ready.
    """

    is_planned = True

    def __init__(self, making: Making, plans: PlannedRows) -> None:
        super().__init__(making)
        self.plans = plans

    def begin(self, ledger: Ledger) -> PlannedProgress:
        return PlannedProgress(Counts())

    def at_epoch(self, ledger: Ledger, epoch: int) -> Ledger:
        progress: PlannedProgress = ledger.packs
        self.plans.resume_dealt(Position(epoch), None)
        return structs.replace(ledger.at_epoch(epoch), packs=progress.at_start())

    def saved(self, ledger: Ledger) -> PackState:
        """The packs follow from the position, and from the ranks they are grouped for."""
        progress: PlannedProgress = ledger.packs
        world_size, accumulation = self.plans.dealt_at(ledger.position) or (0, 0)
        return PackState(
            epoch=ledger.position.epoch,
            last=None,
            packer={"counts": msgspec.to_builtins(progress.counts)},
            packs=[],
            num_gone=0,
            window=0,
            world_size=world_size,
            accumulation=accumulation,
            **progress.delivered._asdict(),
        )

    def restored(self, ledger: Ledger, state: PackState) -> Ledger:
        counts = restored(state.packer.get("counts", {}), Counts)
        dealt = (state.world_size, state.accumulation) if state.world_size else None
        self.plans.resume_dealt(ledger.position, dealt)
        return structs.replace(ledger, packs=PlannedProgress(counts, state.delivered))

    def batches(self, coordinator: Coordinator, *, runs_on: bool) -> PackBatches:
        return _PlannedBatches(self, coordinator, runs_on=runs_on)


class _PlannedBatches(PackBatches):
    """The batches of one loop."""

    def __init__(self, batching: PlannedBatching, coordinator: Coordinator, *, runs_on: bool) -> None:
        super().__init__(batching, coordinator, runs_on=runs_on)
        self._plans = batching.plans

    def _num_wanted(self, ledger: Ledger) -> int:
        """The rows of the next batch's packs; one row while the plan is not known."""
        plan = self._plans.find(ledger.position.epoch)
        if plan is None:
            return 1

        row = row_of_epoch(ledger.position)
        return max(1, int(plan.offsets[self._packs_from(plan, row).stop]) - row)

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
        plan = None if position is None else self._plans.find(position.epoch)
        if plan is None or position is None:
            return ()

        row = row_of_epoch(position)
        packs = self._packs_from(plan, row)
        if len(samples) != int(plan.offsets[packs.stop]) - row:
            return ()

        progress, batch = self._batch(progress, plan, packs, row, samples, request.after.excluded)
        return self._commit(request, progress, batch)

    def _at_end_of_epoch(self, request: Request, progress: PlannedProgress) -> PlannedProgress:
        """No row of the epoch is left: count its end, if batches of it were delivered before a restart."""
        epoch = request.before.position.epoch
        plan = self._plans.find(epoch) if epoch == request.last_epoch else None
        return progress if plan is None or not progress.delivered.epoch_packs else progress.at_next_epoch(plan)

    def _batch(
        self,
        progress: PlannedProgress,
        plan: PlannedEpoch,
        packs: range,
        row: int,
        samples: list[Sample],
        excluded: Mapping[RowKey, object],
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
            found = (_pack(plan, number, row, samples) for number in self._numbers(packs))
            batch = self._batching.collated(found, excluded)
            progress = progress._replace(delivered=progress.delivered.plus(len(packs), num_tokens))
        return progress.at_next_epoch(plan) if packs.stop == plan.num_packs else progress, batch

    def _numbers(self, packs: range) -> list[int]:
        """The numbers of this rank's packs. A pack's number decides its rank, except in a short last batch."""
        rank, world_size = self._share.rank, self._share.world_size
        if len(packs) < self._share.size:
            return [packs[number] for number in self._share.of(len(packs))]

        return [number for number in packs if number % world_size == rank]


def _pack(plan: PlannedEpoch, number: int, row: int, samples: list[Sample]) -> Pack:
    """The pieces of one pack, cut from ``samples``, the first of which is the epoch's row ``row``.

    Bad rows that are passed over have no tokens, and are left out.
    """
    _, starts, stops = plan.pack(number)
    first, stop = int(plan.offsets[number]) - row, int(plan.offsets[number + 1]) - row
    cuts = zip(samples[first:stop], starts.tolist(), stops.tolist(), strict=True)
    return [(sample, start, end) for sample, start, end in cuts if len(sample.tokens)]
