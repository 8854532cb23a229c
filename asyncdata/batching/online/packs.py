"""Packs samples in the order of D, as they come, and groups packs of similar cost.

A sample is taken from D and pushed. It waits in the packer until its pack is closed. The pack waits in a window of
packs until the window is full and can be ordered. Then the pack is ready, and is delivered with a batch. As soon as the
order is known, a rank drops the samples that only other ranks need. Nothing here waits and nothing is random: packs
follow from D alone.

All methods are functions of an :class:`~asyncdata.batching.online.progress.OnlineProgress`, and return the next one.
The ledger holds the current one, so that a delivery commits samples and packs by one assignment.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.batching.online.progress import OnlineProgress, Window, WindowStart
from asyncdata.batching.packed_sample import PackedSample
from asyncdata.batching.packers.base import PackState, Place, PlacedPiece, refuse_wrong_pieces, restored, wrong_state
from asyncdata.core.errors import ConfigError, SnapshotError
from asyncdata.core.types import Position

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.batching.online.rules import PackRules
    from asyncdata.batching.packers.base import Pack
    from asyncdata.core.types import Sample, SourceLocation
    from asyncdata.delivery.ledger import RestartPoint

__all__ = ("OnlinePacks",)

_STALE_SHARE = 4  # stale samples are dropped when one in four is stale, as a look at all samples takes time


class OnlinePacks:
    """The packs of D for all ranks together. Only one thread at a time may push samples."""

    def __init__(self, rules: PackRules) -> None:
        self.rules = rules

    @property
    def _accumulation(self) -> int:
        """Packs of each rank in an optimizer step."""
        return self.rules.batch_size * self.rules.accumulation

    def begin(self, epoch: int = 0, before: OnlineProgress | None = None) -> OnlineProgress:
        """The progress at the start of ``epoch``. What waits in ``before`` is dropped; what it counted stays."""
        packer = self.rules.packing.open()
        start = WindowStart(packer, [], None, 0, self.rules.world_size, self._accumulation)
        if before is None:
            return OnlineProgress(packer, start, samples={}, epoch=epoch)

        packer.counts = before.counts.copy()
        num_packs, num_tokens = before.num_packs, before.num_tokens
        return OnlineProgress(packer, start, samples={}, epoch=epoch, num_packs=num_packs, num_tokens=num_tokens)

    # Samples come.

    def pushed(self, progress: OnlineProgress, samples: Sequence[Sample], point: RestartPoint) -> OnlineProgress:
        """The progress after the next samples of D. Samples that were taken in before a restart are passed over.

        :param point: where D was read from to get them.
        :raises ConfigError: AD450, for a sample that cannot be packed.
        :raises SnapshotError: if samples that waited before a restart do not come again.
        """
        now = progress
        for _, some in groupby(zip(map(_place, samples), samples, strict=True), _epoch_of):
            now = self._with_samples(now, point, *zip(*some, strict=True))
        is_ordered = self.rules.world_size > 1 and now.start.window > progress.start.window
        if is_ordered or now.num_stale * _STALE_SHARE > len(now.samples):
            now = self._pruned(now)
        return now

    def _with_samples(
        self, now: OnlineProgress, point: RestartPoint, places: tuple[Place, ...], samples: tuple[Sample, ...]
    ) -> OnlineProgress:
        """The progress after samples of one epoch."""
        if not self.rules.across_epochs and now.last is not None and now.last[0] < places[0][0]:
            now = self._all_packed(now)
        num_known = 0 if now.last is None else bisect_right(places, now.last)
        now = self._with_missing(now, dict(zip(places[:num_known], samples, strict=False)))
        if not now.points or now.points[-1][0] < places[0]:
            now = now._replace(points=(*now.points, (places[0], point)))
        if num_known == len(samples):
            return now

        _require_all(now.missing)
        return self._with_fresh(now, places[num_known:], samples[num_known:])

    def _with_missing(self, now: OnlineProgress, known: dict[Place, Sample]) -> OnlineProgress:
        """The samples that waited before a restart come again."""
        found = {place: sample for place, sample in known.items() if place in now.missing}
        if not found:
            return now

        for place, sample in found.items():
            self._check_length(place, len(sample.tokens), now.missing[place])
        now.samples.update(found)
        missing = {place: stop for place, stop in now.missing.items() if place not in found}
        return now._replace(missing=missing, num_kept=now.num_kept + len(found))

    def _check_length(self, place: Place, num_tokens: int, stop: int) -> None:
        packing = self.rules.packing
        if num_tokens < stop or (not packing.cuts and min(num_tokens, packing.max_length) != stop):
            raise SnapshotError(
                f"AD604 the sample at {Position(*place)} waited to be packed when the snapshot was taken, and has "
                f"{num_tokens} tokens now, not {stop} as then. A tokenize function must give the same each time"
            )

    def _with_fresh(self, now: OnlineProgress, places: tuple[Place, ...], fresh: tuple[Sample, ...]) -> OnlineProgress:
        lengths = [len(sample.tokens) for sample in fresh]
        packer = now.packer.copy()
        try:
            packs = packer.extend(lengths, places)
        except ConfigError as error:
            longest = fresh[lengths.index(max(lengths))].source
            where = "" if longest is None else f": {_row(longest)}"
            raise ConfigError(f"{error}{where}") from None

        keeps = self.rules.packing.keeps
        kept = {place: sample for place, sample, length in zip(places, fresh, lengths, strict=True) if keeps(length)}
        now.samples.update(kept)
        now = now._replace(packer=packer, last=places[-1], num_kept=now.num_kept + len(kept))
        return self._with_packs(now, packs)

    def flushed(self, progress: OnlineProgress) -> OnlineProgress:
        """The progress after the epoch's end, where all that waits is packed by itself."""
        return self._all_packed(progress)._replace(is_alone=True)

    def _all_packed(self, now: OnlineProgress) -> OnlineProgress:
        _require_all(now.missing)
        packer = now.packer.copy()
        packs = packer.flush()
        now = self._with_packs(now._replace(packer=packer), packs)
        return self._with_full_window(now, now.packs, []) if now.packs else now

    def _with_packs(self, now: OnlineProgress, packs: list[Pack]) -> OnlineProgress:
        packs = now.packs + packs
        while packs:
            size = self.rules.window_size(now.start) if self.rules.grouping is not None else len(packs)
            if size is None or len(packs) < size:
                return now._replace(packs=packs)

            now = self._with_full_window(now, packs[:size], packs[size:])
            packs = packs[size:]
        # The window has no pack yet, so it can begin here: then a restart needs fewer samples.
        return now._replace(packs=[], start=now.start._replace(packer=now.packer, packs=[], last=now.last))

    def _with_full_window(self, now: OnlineProgress, packs: list[Pack], rest: list[Pack]) -> OnlineProgress:
        window = Window(now.start, self.rules.ordered(packs, now.start))
        world_size, accumulation = self.rules.world_size, self._accumulation
        start = WindowStart(now.packer, rest, now.last, now.start.window + 1, world_size, accumulation)
        return now._replace(ready=(*now.ready, window), start=start, packs=rest).without_delivered_windows()

    def _pruned(self, now: OnlineProgress) -> OnlineProgress:
        """Without the samples that only other ranks need, and without points that no restart needs."""
        ready = now.next_packs(now.num_ready)
        # Packs that fill no batch of all ranks may be dealt in another way at the epoch's end.
        num_dealt = len(ready) // self.rules.global_batch * self.rules.global_batch
        ready = ready[self.rules.rank : num_dealt : self.rules.world_size] + ready[num_dealt:]
        own = {place for pack in ready for place, _, _ in pack}
        waiting = {place for place, _, _ in chain(now.packer.waiting(), *now.packs)}
        needed = own | waiting | now.missing.keys()
        samples = {place: sample for place, sample in now.samples.items() if place in needed}
        if self.rules.world_size > 1:  # else each would keep its chunk, with the samples of all the other ranks
            for place in own:
                samples[place].detach()
        return now._replace(samples=samples, points=now.points[max(0, now.needed_point - 1) :], num_stale=0)

    # Packs go.

    @staticmethod
    def packs(progress: OnlineProgress, numbers: Sequence[int]) -> list[list[PackedSample]]:
        """The ready packs of these numbers."""
        ready = progress.next_packs(max(numbers, default=-1) + 1)
        samples = progress.samples
        return [
            [PackedSample(samples[place], start, stop) for place, start, stop in ready[number]] for number in numbers
        ]

    def delivered(self, progress: OnlineProgress, num_packs: int) -> OnlineProgress:
        """The progress after ``num_packs`` ready packs are delivered, to all ranks together."""
        ready = progress.next_packs(num_packs)
        num_tokens = sum(stop - start for pack in ready for _, start, stop in pack)
        own = ready[self.rules.rank :: self.rules.world_size]
        return progress._replace(
            num_gone=progress.num_gone + num_packs,
            num_packs=progress.num_packs + num_packs,
            epoch_packs=progress.epoch_packs + num_packs,
            num_tokens=progress.num_tokens + num_tokens,
            num_stale=progress.num_stale + sum(map(len, own)),
        ).without_delivered_windows()

    @staticmethod
    def dropped(progress: OnlineProgress, num_packs: int, reason: str) -> OnlineProgress:
        """The progress after ``num_packs`` ready packs are left out, and counted."""
        pieces = [piece for pack in progress.next_packs(num_packs) for piece in pack]
        packer, window = progress.packer.copy(), progress.start
        packer.counts.add(
            reason,
            samples=len({place for place, _, _ in pieces}),
            tokens=sum(stop - start for _, start, stop in pieces),
        )
        if window.packer is progress.packer:
            window = window._replace(packer=packer)
        num_gone = progress.num_gone + num_packs
        return progress._replace(packer=packer, start=window, num_gone=num_gone).without_delivered_windows()

    @staticmethod
    def at_next_epoch(progress: OnlineProgress) -> OnlineProgress:
        """The progress after the epoch is delivered."""
        return progress._replace(epoch=progress.epoch + 1, epoch_packs=0, is_alone=False)

    # What a snapshot keeps.

    @staticmethod
    def saved(progress: OnlineProgress) -> PackState:
        """What a snapshot keeps of it."""
        start = progress.first_start
        return PackState(
            epoch=progress.epoch,
            last=start.last,
            packer=start.packer.state(),
            packs=start.packs,
            num_gone=progress.num_gone,
            window=start.window,
            world_size=start.world_size,
            accumulation=start.accumulation,
            num_packs=progress.num_packs,
            epoch_packs=progress.epoch_packs,
            num_tokens=progress.num_tokens,
            is_alone=progress.is_alone,
        )

    def restored(self, state: PackState) -> OnlineProgress:
        """The progress that ``state`` was saved from. Samples that waited then are missing until they come again.

        :raises SnapshotError: if it is not a state of this packing.
        """
        if not (state.world_size and state.accumulation):
            raise wrong_state()

        packer = self.rules.packing.open(_with_places(state.packer))
        packs = [list(pack) for pack in state.packs]
        for pack in packs:
            refuse_wrong_pieces(pack, longest=self.rules.packing.max_length)
        sizes = (state.world_size, state.accumulation)
        if not state.num_gone:  # nothing of the window is delivered: it may be grouped for the ranks there are now
            sizes = (self.rules.world_size, self._accumulation)
        start = WindowStart(packer, packs, state.last, state.window, *sizes)
        progress = OnlineProgress(
            packer,
            start,
            last=state.last,
            samples={},
            num_gone=state.num_gone,
            missing=start.waiting,
            epoch=state.epoch,
            num_packs=state.num_packs,
            epoch_packs=state.epoch_packs,
            num_tokens=state.num_tokens,
            is_alone=state.is_alone,
        )
        return self._with_packs(progress, packs)


def _epoch_of(item: tuple[Place, Sample]) -> int:
    return item[0][0]


def _place(sample: Sample) -> Place:
    position = sample.position
    if position is None:
        raise ValueError("a sample of D has a position")

    return position.epoch, position.window, position.row


class _Places(msgspec.Struct):
    """What of a packer's state refers to samples."""

    open_pack: list[PlacedPiece] = []
    references: list[Place] = []


def _with_places(packer: dict[str, Any]) -> dict[str, Any]:
    """A packer's state as it was, its references being tuples again.

    :raises SnapshotError: if they are not positions.
    """
    lists = msgspec.structs.asdict(restored(packer, _Places))
    return packer | {name: values for name, values in lists.items() if name in packer}


def _row(source: SourceLocation) -> str:
    line = source.line_number()
    if line is None:
        return f"row {source.row_number} of {source.path}"

    return f"{source.path}:{line} (byte offset {source.byte_offset})"


def _require_all(missing: dict[Place, int]) -> None:
    if missing:
        raise SnapshotError(
            f"AD604 the sample at {Position(*min(missing))} waited to be packed when the snapshot was taken, and "
            "does not come again: its row yields no sample now. A tokenize function must give the same each time"
        )
