"""What a :class:`~asyncdata.batching.online.packs.PackStage` holds, as one immutable value."""

from __future__ import annotations

from bisect import bisect_right
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from asyncdata.core.types import Position
from asyncdata.delivery.ledger import Counters

if TYPE_CHECKING:
    from asyncdata.batching.packers.base import Pack, Packer, Place
    from asyncdata.core.types import Sample

__all__ = ("Mark", "Now", "PackedSample", "RestartPoint", "Window")


class PackedSample(NamedTuple):
    """Tokens ``[start, stop)`` of a sample, in a pack."""

    sample: Sample
    start: int
    stop: int


class RestartPoint(NamedTuple):
    """Where D is to be read from, and what was counted there."""

    position: Position = Position()
    counters: Counters = Counters()


class Mark(NamedTuple):
    """What there was when a window of packs was begun: from here on its packs can be made again.

    :ivar packer: never changed; the packer in use is a copy.
    :ivar packs: closed before, and belonging to the window.
    """

    packer: Packer
    packs: list[Pack]
    last: Place | None
    window: int
    world_size: int
    accumulation: int

    @property
    def stops(self) -> dict[Place, int]:
        """Behind which token the piece of each ends that was waiting."""
        return {place: stop for place, _, stop in chain(self.packer.waiting(), *self.packs)}


class Window(NamedTuple):
    """Packs in the order of delivery."""

    mark: Mark
    packs: list[Pack]


class Now(NamedTuple):
    """Everything that changes.

    :ivar mark: where the window that is being filled was begun.
    :ivar packs: its packs so far.
    :ivar last: the last sample that was taken in.
    :ivar ready: windows that are full.
    :ivar num_gone: packs of them that are delivered; more than they have, where a restart has to make them again.
    :ivar samples: those that a pack still needs, and perhaps others: what is added is seen by earlier values as well.
    :ivar num_stale: about how many of them no pack needs any more.
    :ivar points: the first sample of each push, and where D was read from to get it.
    :ivar tip: position of the next sample of D; None if begin() was never called.
    :ivar missing: samples that waited before a restart and have not come again, and where their pieces end.
    :ivar num_kept: samples that the packer took in.
    """

    packer: Packer
    mark: Mark
    samples: dict[Place, Sample]
    packs: list[Pack] = []
    last: Place | None = None
    ready: tuple[Window, ...] = ()
    num_gone: int = 0
    points: tuple[tuple[Place, RestartPoint], ...] = ()
    tip: RestartPoint | None = None
    missing: dict[Place, int] = {}
    epoch: int = 0
    num_packs: int = 0
    epoch_packs: int = 0
    num_tokens: int = 0
    num_kept: int = 0
    num_stale: int = 0
    is_alone: bool = False

    @property
    def num_ready(self) -> int:
        """Packs that can be delivered."""
        return 0 if self.missing else max(0, sum(len(window.packs) for window in self.ready) - self.num_gone)

    @property
    def first_mark(self) -> Mark:
        """The start of the oldest window that is not fully delivered."""
        return self.ready[0].mark if self.ready else self.mark

    def next_packs(self, number: int) -> list[Pack]:
        """The first so many packs that are ready; all of them, if there are fewer."""
        found: list[Pack] = []
        num_gone = self.num_gone
        for window in self.ready:
            found += window.packs[num_gone : num_gone + number - len(found)]
            num_gone = max(0, num_gone - len(window.packs))
            if len(found) == number:
                break
        return found

    def settled(self) -> Now:
        """The state without windows that are fully delivered."""
        num_gone, ready = self.num_gone, self.ready
        while ready and num_gone >= len(ready[0].packs):
            num_gone -= len(ready[0].packs)
            ready = ready[1:]
        return self._replace(num_gone=num_gone, ready=ready)

    @property
    def needed_point(self) -> int:
        """The number of the push from which on D is needed again; as many as there are: none is."""
        mark = self.first_mark
        firsts = [first for first, _ in self.points]
        waiting = mark.stops
        if waiting:
            return max(0, bisect_right(firsts, min(waiting)) - 1)

        if mark.last == self.last:
            return len(firsts)

        return 0 if mark.last is None else max(0, bisect_right(firsts, mark.last) - 1)

    @property
    def restart_point(self) -> RestartPoint | None:
        """Position to resume reading from, or None if begin() was never called."""
        number = self.needed_point
        return self.points[number][1] if number < len(self.points) else self.tip
