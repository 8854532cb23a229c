"""Packs samples in the order of D, as they come, and groups packs of similar cost.

A sample is taken from D and pushed. It waits in the packer until its pack is closed. The pack waits in a window of
packs until the window is full and can be ordered. Then the pack is ready, and is delivered with a batch. As soon as the
order is known, a rank drops the samples that only other ranks need. Nothing here waits and nothing is random: packs
follow from D alone.

All methods of :class:`OnlinePacks` are functions of an :class:`OnlineProgress`, and return the next one. The ledger
holds the current one, so that a delivery commits samples and packs by one assignment.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import chain, groupby, islice, repeat
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from asyncdata.batching.packs import (
    Counts,
    Delivered,
    Pack,
    PackState,
    Piece,
    Place,
    PlacedPiece,
    refuse_wrong_pieces,
    restored,
    wrong_state,
)
from asyncdata.batching.planned import Dealt, PackRules
from asyncdata.core.errors import ConfigError, SnapshotError
from asyncdata.core.types import Position, Sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from asyncdata.batching.packers import Packer
    from asyncdata.delivery.ledger import RestartPoint

    Arrived = list[tuple[Place, int, Sample]]  # place in D, number of tokens

_COUNT_LINES_S = 5.0
"""Longest time for which counting the lines of a file may delay an error."""

_OTHER_SAMPLES = (
    "a tokenize function must give the same each time, and the data be those of then; or the snapshot is of another "
    "build of asyncdata"
)


class Arrival:
    """A sample of D, as the packer refers to it. It is freed with the last pack that needs it.

    :ivar point: where D was read from to get it.
    :ivar sample: None after a restart, until it comes again.
    """

    __slots__ = ("place", "point", "sample")

    def __init__(self, place: Place, point: RestartPoint, sample: Sample | None = None) -> None:
        self.place = place
        self.point = point
        self.sample = sample

    def __repr__(self) -> str:
        return str(self.place)


class WindowStart(NamedTuple):
    """The state at the start of a window of packs. After a restart, the packs of the window are made again from here.

    :ivar packer: never changed; the packer in use is a copy.
    :ivar packs: packs that were closed before, and belong to the window.
    :ivar last: the last sample that was taken in before; None: none was.
    :ivar point: where D is read from to get all samples that waited, and those after ``last``.
    :ivar window: the window's number.
    :ivar dealt: the ranks that the window is grouped for.
    """

    packer: Packer
    packs: list[Pack]
    last: Place | None
    point: RestartPoint
    window: int
    dealt: Dealt

    def waiting(self) -> Iterator[Piece]:
        """What was waiting, the oldest sample's piece first."""
        return chain(*self.packs, self.packer.waiting())


class Window(NamedTuple):
    """The packs of a full window, in the order of delivery. Those that were delivered are empty.

    :ivar is_dealt: whether those of other ranks are without their samples.
    """

    start: WindowStart
    packs: list[Pack]
    is_dealt: bool = False


class OnlineProgress(NamedTuple):
    """Which samples were taken in, which packs they became, and which of these are delivered.

    :ivar packer: has the samples that are in no pack yet. It is never changed, but replaced by a changed copy.
    :ivar start: the start of the window that is being filled.
    :ivar point: where D was read from to get the samples that came last.
    :ivar packs: the packs of that window so far.
    :ivar last: the last sample that was taken in.
    :ivar ready: windows that are full.
    :ivar num_gone: delivered packs of ``ready``. After a restart this may be more packs than were made again so far.
    :ivar missing: samples that waited before a restart and have not come again, and where their last pieces end.
    :ivar epoch: the epoch that is being delivered.
    :ivar num_kept: samples that the packer took in, in this run.
    :ivar is_alone: whether what waited at the epoch's end was packed by itself.
    :ivar settled: the ledger after the last batch, if samples were taken since then.
    """

    packer: Packer
    start: WindowStart
    point: RestartPoint
    packs: list[Pack] = []
    last: Place | None = None
    ready: tuple[Window, ...] = ()
    num_gone: int = 0
    missing: dict[Place, tuple[Arrival, int]] = {}
    epoch: int = 0
    delivered: Delivered = Delivered()
    num_kept: int = 0
    is_alone: bool = False
    settled: Any = None

    @property
    def counts(self) -> Counts:
        """What was not packed."""
        return self.packer.counts

    @property
    def num_held(self) -> int:
        """Samples in memory."""
        packs = chain(*(window.packs for window in self.ready), self.packs, [self.packer.waiting()])
        return len({arrival for arrival, _, _ in chain.from_iterable(packs) if arrival.sample is not None})

    @property
    def num_made(self) -> int:
        """Packs of full windows that are not delivered; after a restart, less those that are to be made again."""
        return sum(len(window.packs) for window in self.ready) - self.num_gone

    @property
    def num_ready(self) -> int:
        """Packs that can be delivered."""
        return 0 if self.missing else max(0, self.num_made)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that are in no pack yet."""
        return sum(stop - start for _, start, stop in self.packer.waiting())

    @property
    def has_rest(self) -> bool:
        """Whether packing all that waits would make a pack."""
        return bool(self.packs or self.packer.copy().flush())

    @property
    def first_start(self) -> WindowStart:
        """The start of the oldest window that is not fully delivered."""
        return self.ready[0].start if self.ready else self.start

    @property
    def restart_point(self) -> RestartPoint | None:
        """Where D must be read from after a restart; None: from the ledger's position, as no earlier sample waits."""
        start = self.first_start
        return None if start.last == self.last and next(start.waiting(), None) is None else start.point

    def next_packs(self, number: int) -> list[Pack]:
        """The first ``number`` packs that are ready; all of them, if there are fewer."""
        packs = chain.from_iterable(window.packs for window in self.ready)
        return list(islice(packs, self.num_gone, self.num_gone + number))

    def without(self, num_packs: int) -> OnlineProgress:
        """The same progress after the first ``num_packs`` ready packs are gone, and windows that are fully gone."""
        num_gone, ready = self.num_gone + num_packs, list(self.ready)
        while ready and num_gone >= len(ready[0].packs):
            num_gone -= len(ready.pop(0).packs)
        if ready:  # its samples are not needed any more
            ready[0] = ready[0]._replace(packs=[*repeat([], num_gone), *ready[0].packs[num_gone:]])
        return self._replace(num_gone=num_gone, ready=tuple(ready))


class OnlinePacks:
    """The packs of D for all ranks together. Only one thread at a time may push samples."""

    def __init__(self, rules: PackRules) -> None:
        self.rules = rules

    def begin(self, point: RestartPoint, before: OnlineProgress | None = None) -> OnlineProgress:
        """The progress at the start of an epoch. What waits in ``before`` is dropped; what it counted stays.

        :param point: where D is read from.
        """
        packer = self.rules.packing.open()
        start = WindowStart(packer, [], None, point, 0, self.rules.dealt)
        now = OnlineProgress(packer, start, point, epoch=point.position.epoch)
        if before is None:
            return now

        packer.counts = before.counts.copy()
        return now._replace(delivered=before.delivered._replace(epoch_packs=0))

    # Samples come.

    def pushed(
        self, progress: OnlineProgress, arrived: Arrived, point: RestartPoint, until: float = inf
    ) -> OnlineProgress:
        """The progress after the next samples of D. Samples that were taken in before a restart are passed over.

        :param arrived: the samples, :func:`~asyncdata.core.types.measured`.
        :param point: where D was read from to get them.
        :param until: after the sample with which so many packs are ready, no more are taken in; ``last`` is that one.
        :raises ConfigError: AD450, for a sample that cannot be packed.
        :raises SnapshotError: if samples that waited before a restart do not come again.
        """
        now = progress._replace(point=point)
        for _, some in groupby(arrived, _epoch_of):
            if now.num_ready < until:
                now = self._with_samples(now, until, list(some))
        is_ordered = now.start.window > progress.start.window
        return self._without_others(now) if is_ordered and self.rules.world_size > 1 else now

    def _with_samples(self, now: OnlineProgress, until: float, arrived: Arrived) -> OnlineProgress:
        """The progress after samples of one epoch."""
        if not self.rules.across_epochs and now.last is not None and now.last[0] < arrived[0][0][0]:
            now = self._all_packed(now)
        num_known = num_until(arrived, now.last)
        missing = now.missing.copy()
        for place, num_tokens, sample in arrived[:num_known]:
            if place in missing:
                self._come_again(*missing.pop(place), num_tokens, sample)
        num_kept = now.num_kept + len(now.missing) - len(missing)
        now = now._replace(missing=missing, num_kept=num_kept)
        if num_known == len(arrived):
            return now

        _require_all(now.missing)
        fresh = arrived[num_known:]
        while fresh and now.num_made < until:
            now, fresh = self._with_fresh(now, fresh, until)
        return now

    def _come_again(self, arrival: Arrival, stop: int, num_tokens: int, sample: Sample) -> None:
        """A sample that waited before a restart, and of which the last piece ended at ``stop``, is there again."""
        packing = self.rules.packing
        if num_tokens < stop or (not packing.cuts and min(num_tokens, packing.max_length) != stop):
            raise SnapshotError(
                f"AD604 the sample at {Position(*arrival.place)} waited to be packed when the snapshot was taken, and "
                f"has {num_tokens} tokens now, not {stop} as then: {_OTHER_SAMPLES}"
            )

        arrival.sample = sample

    def _with_fresh(self, now: OnlineProgress, fresh: Arrived, until: float) -> tuple[OnlineProgress, Arrived]:
        """The progress after samples that fill a window, or make ``until`` packs ready; and the samples after them."""
        packer, number, num_kept = now.packer.copy(), 0, now.num_kept
        packs: list[Pack] = []
        window = self._window_size(now) or inf
        num_missing = until - now.num_made if self.rules.grouping is None else window - len(now.packs)
        while number < len(fresh) and len(packs) < num_missing:
            place, length, sample = fresh[number]
            number += 1
            try:
                packs += packer.take_in([(length, Arrival(place, now.point, sample))])
            except ConfigError as error:
                where = "" if sample.source is None else f": {sample.source.described(_COUNT_LINES_S)}"
                raise ConfigError(f"{error}{where}") from None

            num_kept += self.rules.packing.keeps(length)
        now = now._replace(packer=packer, last=fresh[number - 1][0], num_kept=num_kept)
        return self._with_packs(now, packs), fresh[number:]

    def flushed(self, progress: OnlineProgress) -> OnlineProgress:
        """The progress after the epoch's end, where all that waits is packed by itself."""
        return self._all_packed(progress)._replace(is_alone=True)

    def _all_packed(self, now: OnlineProgress) -> OnlineProgress:
        _require_all(now.missing)
        packer = now.packer.copy()
        packs = packer.flush()
        now = self._with_packs(now._replace(packer=packer), packs)
        return self._with_full_window(now, len(now.packs)) if now.packs else now

    def _with_packs(self, now: OnlineProgress, packs: list[Pack]) -> OnlineProgress:
        now = now._replace(packs=now.packs + packs)
        while now.packs:
            size = self._window_size(now)
            if size is None or len(now.packs) < size:
                return now

            now = self._with_full_window(now, size)
        # The window has no pack yet, so it can begin here: then a restart needs fewer samples.
        return now._replace(start=_start_of(now, now.start.window, now.start.dealt))

    def _window_size(self, now: OnlineProgress) -> int | None:
        """The number of packs of the window; None: all packs of the epoch."""
        if self.rules.grouping is None:
            return len(now.packs)

        world_size, accumulation = now.start.dealt
        steps = self.rules.grouping.steps_of_window(now.start.window, accumulation)
        return None if steps is None else steps * world_size * accumulation

    def _with_full_window(self, now: OnlineProgress, size: int) -> OnlineProgress:
        window = Window(now.start, self._ordered(now.packs[:size], now.start))
        now = now._replace(ready=(*now.ready, window), packs=now.packs[size:]).without(0)
        return now._replace(start=_start_of(now, now.start.window + 1, self.rules.dealt))

    def _ordered(self, packs: list[Pack], start: WindowStart) -> list[Pack]:
        """The window's packs, in the order of delivery."""
        grouping = self.rules.grouping
        if grouping is None:
            return packs

        costs = [grouping.cost([stop - start for _, start, stop in pack]) for pack in packs]
        epoch = packs[0][0][0].place[0] if self.rules.has_xtuners_order else 0
        settings = {**start.dealt._asdict(), "seed": self.rules.seed, "epoch": epoch, "window": start.window}
        return [packs[number] for number in grouping.order(costs, **settings).tolist()]

    def _without_others(self, now: OnlineProgress) -> OnlineProgress:
        """Without the samples that only other ranks need."""
        rank, world_size = self.rules.rank, self.rules.world_size
        # Packs that fill no batch of all ranks may be dealt in another way at the epoch's end.
        num_dealt = now.num_ready // self.rules.global_batch * self.rules.global_batch
        ready, first = [], -now.num_gone
        for window in now.ready:
            stop = first + len(window.packs)
            if window.is_dealt or num_dealt <= first:
                ready.append(window)
                first = stop
                continue

            packs = window.packs.copy()
            for number in range(max(0, -first), min(len(packs), num_dealt - first)):
                if (first + number) % world_size != rank:
                    packs[number] = [(_OF_ANOTHER_RANK, start, stop) for _, start, stop in packs[number]]
                    continue

                for arrival, _, _ in packs[number]:
                    arrival.sample.detach()  # else it would keep its chunk, with the samples of all the other ranks
            ready.append(window._replace(packs=packs, is_dealt=stop <= num_dealt))
            first = stop
        return now._replace(ready=tuple(ready))

    # Packs go.

    @staticmethod
    def packs(progress: OnlineProgress, numbers: Sequence[int]) -> list[Pack]:
        """The ready packs of these numbers; their references are the samples."""
        ready = progress.next_packs(max(numbers, default=-1) + 1)
        return [[(arrival.sample, start, stop) for arrival, start, stop in ready[number]] for number in numbers]

    @staticmethod
    def delivered(progress: OnlineProgress, num_packs: int, bad_rows: Mapping[str, int] = {}) -> OnlineProgress:
        """The progress after ``num_packs`` ready packs are delivered, to all ranks together.

        :param bad_rows: samples in them whose media could not be loaded, by reason.
        """
        pieces = chain.from_iterable(progress.next_packs(num_packs))
        num_tokens = sum(stop - start for _, start, stop in pieces)
        delivered = progress.delivered.plus(num_packs, num_tokens, bad_rows)
        return progress.without(num_packs)._replace(delivered=delivered)

    @staticmethod
    def dropped(progress: OnlineProgress, num_packs: int, reason: str) -> OnlineProgress:
        """The progress after ``num_packs`` ready packs are left out, and counted."""
        pieces = list(chain.from_iterable(progress.next_packs(num_packs)))
        packer, start = progress.packer.copy(), progress.start
        num_samples = len({arrival for arrival, _, _ in pieces})
        packer.counts.add(reason, samples=num_samples, tokens=sum(stop - start for _, start, stop in pieces))
        if start.packer is progress.packer:
            start = start._replace(packer=packer)
        return progress.without(num_packs)._replace(packer=packer, start=start)

    @staticmethod
    def at_next_epoch(progress: OnlineProgress) -> OnlineProgress:
        """The progress after the epoch is delivered."""
        delivered = progress.delivered._replace(epoch_packs=0)
        return progress._replace(epoch=progress.epoch + 1, delivered=delivered, is_alone=False)

    # What a snapshot keeps.

    @staticmethod
    def saved(progress: OnlineProgress) -> PackState:
        """What a snapshot keeps of it."""
        start = progress.first_start
        return PackState(
            epoch=progress.epoch,
            last=start.last,
            packer=_with_places(start.packer.state()),
            packs=_with_places(start.packs),
            num_gone=progress.num_gone,
            window=start.window,
            **start.dealt._asdict(),
            **{**progress.delivered._asdict(), "bad_rows": progress.delivered.bad_rows or msgspec.UNSET},
            is_alone=progress.is_alone,
        )

    def restored(self, state: PackState, point: RestartPoint) -> OnlineProgress:
        """The progress that ``state`` was saved from. Samples that waited then are missing until they come again.

        :param point: where D is read from.
        :raises SnapshotError: if it is not a state of this packing.
        """
        if not (state.world_size and state.accumulation):
            raise wrong_state()

        arrivals: dict[Place, Arrival] = {}

        def arrival(place: Place) -> Arrival:
            return arrivals.setdefault(place, Arrival(place, point))

        def pack(pieces: list[PlacedPiece]) -> Pack:
            return [(arrival(place), start, stop) for place, start, stop in pieces]

        places, packing = restored(state.packer, _Places), self.rules.packing
        referring = {"open_pack": pack(places.open_pack), "references": list(map(arrival, places.references))}
        packer = packing.open({name: referring.get(name, value) for name, value in state.packer.items()})
        packs = list(map(pack, state.packs))
        refuse_wrong_pieces(chain.from_iterable(packs), packing.max_length)
        # If nothing of the window is delivered, it may be grouped for the ranks there are now.
        dealt = Dealt(state.world_size, state.accumulation) if state.num_gone else self.rules.dealt
        start = WindowStart(packer, packs, state.last, point, state.window, dealt)
        progress = OnlineProgress(
            packer,
            start,
            point,
            last=state.last,
            num_gone=state.num_gone,
            missing={waited.place: (waited, stop) for waited, _, stop in start.waiting()},
            epoch=state.epoch,
            delivered=state.delivered,
            is_alone=state.is_alone,
        )
        return self._with_packs(progress, packs)


_OF_ANOTHER_RANK = Arrival((0, 0, 0), None)  # type: ignore[arg-type]
"""In place of a sample that only another rank needs."""


def _start_of(now: OnlineProgress, window: int, dealt: Dealt) -> WindowStart:
    """The start of a window that begins now."""
    start = WindowStart(now.packer, now.packs, now.last, now.point, window, dealt)
    oldest = next(start.waiting(), None)
    return start if oldest is None else start._replace(point=oldest[0].point)


def _epoch_of(item: tuple[Place, int, Sample]) -> int:
    return item[0][0]


def num_until(arrived: Arrived, last: Place | None) -> int:
    """How many of the samples come before the place ``last`` or are at it."""
    return 0 if last is None else bisect_right(arrived, last, key=itemgetter(0))


class _Places(msgspec.Struct):
    """What of a packer's state refers to samples."""

    open_pack: list[PlacedPiece] = []
    references: list[Place] = []


def _with_places(packs: Any) -> Any:
    """Packs, or a packer's state, with the positions of samples in place of the samples, as builtins."""
    return msgspec.to_builtins(packs, enc_hook=lambda arrival: arrival.place)


def _require_all(missing: dict[Place, Any]) -> None:
    if missing:
        raise SnapshotError(
            f"AD604 the sample at {Position(*min(missing))} waited to be packed when the snapshot was taken, and "
            f"does not come again: {_OTHER_SAMPLES}"
        )
