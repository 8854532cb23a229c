"""Turns samples of D into packs, in delivery order: packs them, and groups packs of similar cost.

The way of a sample: it is taken from D and pushed; it waits in the packer until its pack is closed; the pack waits in a
window of packs until that can be ordered; then it is ready, and goes with a batch. What a rank has no use for is let go
of as soon as the order is known. Nothing here waits, and nothing is random: packs follow from D alone.

All of it is one immutable value, replaced by one assignment. So whatever interrupts a call finds it done or not done,
and a state may be taken at any instant and by any thread.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.batching.online.progress import Mark, Now, PackedSample, Window
from asyncdata.batching.packers.base import PackState, Place, PlacedPiece, refuse_wrong_pieces, restored, wrong_state
from asyncdata.core.errors import ConfigError, SnapshotError
from asyncdata.core.types import Position

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.batching.online.progress import RestartPoint
    from asyncdata.batching.online.rules import PackRules
    from asyncdata.batching.packers.base import Counts, Pack
    from asyncdata.core.types import Sample, SourceLocation

__all__ = ("PackStage",)

_STALE_SHARE = 4  # samples are let go of when one in so many is stale, as that costs time for each that is held


class PackStage:
    """The packs of D for all ranks together. Only one thread at a time may push samples."""

    def __init__(self, rules: PackRules) -> None:
        self.rules = rules
        self._now = self._start(0)

    def _start(self, epoch: int) -> Now:
        rules = self.rules
        packer = rules.packing.open()
        mark = Mark(packer, [], None, 0, rules.world_size, self._accumulation)
        return Now(packer, mark, samples={}, epoch=epoch)

    @property
    def _accumulation(self) -> int:
        """Packs of each rank in an optimizer step."""
        return self.rules.batch_size * self.rules.accumulation

    def restart(self, epoch: int) -> None:
        """Go on at the start of ``epoch``. What waits is dropped; what was counted stays."""
        now, start = self._now, self._start(epoch)
        start.packer.counts = now.packer.counts.copy()
        self._now = start._replace(num_packs=now.num_packs, num_tokens=now.num_tokens)

    # What there is.

    @property
    def now(self) -> object:
        """A token of this moment, for :meth:`go_back`."""
        return self._now

    def go_back(self, now: object, after: object) -> None:
        """Undo the change from ``now`` to ``after``; do nothing if there was another change since."""
        if self._now is after and isinstance(now, Now):
            self._now = now

    @property
    def epoch(self) -> int:
        """The epoch that is being delivered."""
        return self._now.epoch

    @property
    def num_ready(self) -> int:
        """Packs that can be delivered."""
        return self._now.num_ready

    @property
    def num_held(self) -> int:
        """Samples in memory."""
        return len(self._now.samples)

    @property
    def num_packs(self) -> int:
        """Packs delivered to all ranks, in this run and those it resumed."""
        return self._now.num_packs

    @property
    def epoch_packs(self) -> int:
        """Packs of the current epoch."""
        return self._now.epoch_packs

    @property
    def num_tokens(self) -> int:
        """Tokens of the packs delivered."""
        return self._now.num_tokens

    @property
    def num_kept(self) -> int:
        """Samples that were taken in and not dropped, in this run."""
        return self._now.num_kept

    @property
    def counts(self) -> Counts:
        """What was not packed."""
        return self._now.packer.counts

    # Samples come.

    def begin(self, tip: RestartPoint) -> None:
        """Set the position of the next sample of D to ``tip``, unless it is known."""
        if self._now.tip is None:
            self._now = self._now._replace(tip=tip)

    def push(self, samples: Sequence[Sample], tip: RestartPoint) -> None:
        """Take in the next samples of D; those that were taken in already are passed over.

        :param tip: the position in D after them.
        :raises ConfigError: AD450, for a sample that cannot be packed; none is taken in then.
        :raises SnapshotError: if samples that waited before a restart do not come again.
        """
        now = self._now
        for _, some in groupby(zip(map(_place, samples), samples, strict=True), _epoch_of):
            now = self._pushed(now, *zip(*some, strict=True))
        is_ordered = self.rules.world_size > 1 and now.mark.window > self._now.mark.window
        if is_ordered or now.num_stale * _STALE_SHARE > len(now.samples):
            now = self._pruned(now)
        self._now = now._replace(tip=tip)

    def _pushed(self, now: Now, references: tuple[Place, ...], samples: tuple[Sample, ...]) -> Now:
        if not self.rules.across_epochs and now.last is not None and now.last[0] < references[0][0]:
            now = self._flushed(now)
        num_known = 0 if now.last is None else bisect_right(references, now.last)
        now = self._with_missing(now, dict(zip(references[:num_known], samples, strict=False)))
        now = self._with_point(now, references[0])
        if num_known == len(samples):
            return now

        _require_all(now.missing)
        return self._with_fresh(now, references[num_known:], samples[num_known:])

    def _with_missing(self, now: Now, known: dict[Place, Sample]) -> Now:
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

    @staticmethod
    def _with_point(now: Now, first: Place) -> Now:
        if now.tip is None or (now.points and now.points[-1][0] >= first):
            return now

        return now._replace(points=(*now.points, (first, now.tip)))

    def _with_fresh(self, now: Now, references: tuple[Place, ...], fresh: tuple[Sample, ...]) -> Now:
        lengths = [len(sample.tokens) for sample in fresh]
        packer = now.packer.copy()
        try:
            packs = packer.extend(lengths, references)
        except ConfigError as error:
            longest = fresh[lengths.index(max(lengths))].source
            where = "" if longest is None else f": {_row(longest)}"
            raise ConfigError(f"{error}{where}") from None

        keeps = self.rules.packing.keeps
        kept = {
            place: sample for place, sample, length in zip(references, fresh, lengths, strict=True) if keeps(length)
        }
        now.samples.update(kept)
        now = now._replace(packer=packer, last=references[-1], num_kept=now.num_kept + len(kept))
        return self._with_packs(now, packs)

    def flush(self) -> None:
        """The epoch is at its end, and what waits is packed by itself."""
        self._now = self._flushed(self._now)._replace(is_alone=True)

    @property
    def is_alone(self) -> bool:
        """Whether what waited of the epoch was packed by itself."""
        return self._now.is_alone

    @property
    def has_rest(self) -> bool:
        """Whether :meth:`flush` would make a pack."""
        return bool(self._now.packs or self._now.packer.copy().flush())

    @property
    def waiting_tokens(self) -> int:
        """Tokens that are in no pack yet."""
        return sum(stop - start for _, start, stop in self._now.packer.waiting())

    def _flushed(self, now: Now) -> Now:
        _require_all(now.missing)
        packer = now.packer.copy()
        now = self._with_packs(now._replace(packer=packer), packer.flush())
        return self._closed(now, now.packs, []) if now.packs else now

    def _with_packs(self, now: Now, packs: list[Pack]) -> Now:
        packs = now.packs + packs
        while packs:
            size = self.rules.window_size(now.mark) if self.rules.grouping is not None else len(packs)
            if size is None or len(packs) < size:
                return now._replace(packs=packs)

            now = self._closed(now, packs[:size], packs[size:])
            packs = packs[size:]
        # Nothing of the window is there yet: it may as well begin here.
        return now._replace(packs=[], mark=now.mark._replace(packer=now.packer, packs=[], last=now.last))

    def _closed(self, now: Now, packs: list[Pack], rest: list[Pack]) -> Now:
        """The window is full."""
        window = Window(now.mark, self.rules.ordered(packs, now.mark))
        world_size, accumulation = self.rules.world_size, self._accumulation
        mark = Mark(now.packer, rest, now.last, now.mark.window + 1, world_size, accumulation)
        return now._replace(ready=(*now.ready, window), mark=mark, packs=rest).settled()

    def _pruned(self, now: Now) -> Now:
        """Without the samples that only other ranks need, and without points that no restart needs."""
        ready = now.next_packs(now.num_ready)
        # What fills no batch of all ranks may be dealt otherwise at an end.
        num_dealt = len(ready) // self.rules.global_batch * self.rules.global_batch
        ready = ready[self.rules.rank : num_dealt : self.rules.world_size] + ready[num_dealt:]
        own = {place for pack in ready for place, _, _ in pack}
        waiting = {place for place, _, _ in chain(now.packer.waiting(), *now.packs)}
        needed = own | waiting | now.missing.keys()
        samples = {place: sample for place, sample in now.samples.items() if place in needed}
        if self.rules.world_size > 1:  # or each would keep its chunk, with the samples of all the other ranks
            for place in own:
                samples[place].detach()
        return now._replace(samples=samples, points=now.points[max(0, now.needed_point - 1) :], num_stale=0)

    # Packs go.

    def packs(self, numbers: Sequence[int]) -> list[list[PackedSample]]:
        """The ready packs of these numbers; they stay here until :meth:`deliver`."""
        now = self._now
        ready = now.next_packs(max(numbers, default=-1) + 1)
        return [
            [PackedSample(now.samples[place], start, stop) for place, start, stop in ready[number]]
            for number in numbers
        ]

    def deliver(self, num_packs: int) -> object:
        """So many ready packs are delivered, to all ranks together; a token of that moment."""
        now = self._now
        ready = now.next_packs(num_packs)
        num_tokens = sum(stop - start for pack in ready for _, start, stop in pack)
        own = ready[self.rules.rank :: self.rules.world_size]
        self._now = now._replace(
            num_gone=now.num_gone + num_packs,
            num_packs=now.num_packs + num_packs,
            epoch_packs=now.epoch_packs + num_packs,
            num_tokens=now.num_tokens + num_tokens,
            num_stale=now.num_stale + sum(map(len, own)),
        ).settled()
        return self._now

    def drop(self, num_packs: int, reason: str) -> None:
        """So many ready packs are left out, and counted."""
        now = self._now
        pieces = [piece for pack in now.next_packs(num_packs) for piece in pack]
        packer = now.packer.copy()
        packer.counts.add(
            reason,
            samples=len({place for place, _, _ in pieces}),
            tokens=sum(stop - start for _, start, stop in pieces),
        )
        mark = now.mark._replace(packer=packer) if now.mark.packer is now.packer else now.mark
        self._now = now._replace(packer=packer, mark=mark, num_gone=now.num_gone + num_packs).settled()

    def end_epoch(self) -> object:
        """The epoch is delivered; a token of that moment."""
        self._now = self._now._replace(epoch=self._now.epoch + 1, epoch_packs=0, is_alone=False)
        return self._now

    # What a snapshot keeps.

    def state(self) -> tuple[PackState, RestartPoint | None]:
        """The state of this moment, and where D is to be read from again; None: nothing was read."""
        now = self._now
        mark = now.first_mark
        state = PackState(
            epoch=now.epoch,
            last=mark.last,
            packer=mark.packer.state(),
            packs=mark.packs,
            num_gone=now.num_gone,
            window=mark.window,
            world_size=mark.world_size,
            accumulation=mark.accumulation,
            num_packs=now.num_packs,
            epoch_packs=now.epoch_packs,
            num_tokens=now.num_tokens,
            is_alone=now.is_alone,
        )
        return state, now.restart_point

    def restart_point(self) -> RestartPoint | None:
        """Position to resume reading from, or None if :meth:`begin` was never called."""
        return self._now.restart_point

    def restore(self, state: PackState, tip: RestartPoint) -> None:
        """Go on from ``state``; D will be read from ``tip`` on.

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
        mark = Mark(packer, packs, state.last, state.window, *sizes)
        now = Now(
            packer,
            mark,
            last=state.last,
            samples={},
            num_gone=state.num_gone,
            tip=tip,
            missing=mark.stops,
            epoch=state.epoch,
            num_packs=state.num_packs,
            epoch_packs=state.epoch_packs,
            num_tokens=state.num_tokens,
            is_alone=state.is_alone,
        )
        self._now = self._with_packs(now, packs)


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
