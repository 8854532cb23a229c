"""The progress of packing samples as they come: one immutable value, which the ledger holds."""

from __future__ import annotations

from bisect import bisect_right
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from asyncdata.batching.packers.base import Counts, Pack, Packer, Place
    from asyncdata.core.types import Sample
    from asyncdata.delivery.ledger import RestartPoint

__all__ = ("OnlineProgress", "Window", "WindowStart")


class WindowStart(NamedTuple):
    """The state at the start of a window of packs. After a restart, the packs of the window are made again from here.

    :ivar packer: never changed; the packer in use is a copy.
    :ivar packs: packs that were closed before, and belong to the window.
    :ivar last: the last sample that was taken in before; None: none was.
    :ivar window: the window's number.
    :ivar world_size: the ranks that the window is grouped for.
    :ivar accumulation: packs of each rank in an optimizer step.
    """

    packer: Packer
    packs: list[Pack]
    last: Place | None
    window: int
    world_size: int
    accumulation: int

    @property
    def waiting(self) -> dict[Place, int]:
        """The samples that were waiting, and the token before which the last piece of each ends."""
        return {place: stop for place, _, stop in chain(self.packer.waiting(), *self.packs)}


class Window(NamedTuple):
    """The packs of a full window, in the order of delivery."""

    start: WindowStart
    packs: list[Pack]


class OnlineProgress(NamedTuple):
    """Which samples were taken in, which packs they became, and which of these are delivered.

    :ivar packer: has the samples that are in no pack yet. It is never changed, but replaced by a changed copy.
    :ivar start: the start of the window that is being filled.
    :ivar packs: the packs of that window so far.
    :ivar last: the last sample that was taken in.
    :ivar ready: windows that are full.
    :ivar num_gone: delivered packs of ``ready``. After a restart this may be more packs than were made again so far.
    :ivar samples: the samples that packs still need, and perhaps others. Samples are added to this dict in place, so
        earlier values see them, too.
    :ivar num_stale: about how many of ``samples`` no pack needs any more.
    :ivar points: the first sample of each push, and where D was read from to get it.
    :ivar missing: samples that waited before a restart and have not come again, and where their last pieces end.
    :ivar epoch: the epoch that is being delivered.
    :ivar num_packs: packs delivered to all ranks, in this run and in those that it resumed.
    :ivar epoch_packs: packs delivered of the epoch.
    :ivar num_tokens: tokens of the delivered packs.
    :ivar num_kept: samples that the packer took in, in this run.
    :ivar is_alone: whether what waited at the epoch's end was packed by itself.
    """

    packer: Packer
    start: WindowStart
    samples: dict[Place, Sample]
    packs: list[Pack] = []
    last: Place | None = None
    ready: tuple[Window, ...] = ()
    num_gone: int = 0
    points: tuple[tuple[Place, RestartPoint], ...] = ()
    missing: dict[Place, int] = {}
    epoch: int = 0
    num_packs: int = 0
    epoch_packs: int = 0
    num_tokens: int = 0
    num_kept: int = 0
    num_stale: int = 0
    is_alone: bool = False

    @property
    def counts(self) -> Counts:
        """What was not packed."""
        return self.packer.counts

    @property
    def num_held(self) -> int:
        """Samples in memory."""
        return len(self.samples)

    @property
    def num_ready(self) -> int:
        """Packs that can be delivered."""
        return 0 if self.missing else max(0, sum(len(window.packs) for window in self.ready) - self.num_gone)

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

    def next_packs(self, number: int) -> list[Pack]:
        """The first ``number`` packs that are ready; all of them, if there are fewer."""
        found: list[Pack] = []
        num_gone = self.num_gone
        for window in self.ready:
            found += window.packs[num_gone : num_gone + number - len(found)]
            num_gone = max(0, num_gone - len(window.packs))
            if len(found) == number:
                break
        return found

    def without_delivered_windows(self) -> OnlineProgress:
        """The same progress, without the windows that are fully delivered."""
        num_gone, ready = self.num_gone, self.ready
        while ready and num_gone >= len(ready[0].packs):
            num_gone -= len(ready[0].packs)
            ready = ready[1:]
        return self._replace(num_gone=num_gone, ready=ready)

    @property
    def needed_point(self) -> int:
        """The number of the first push that a restart needs again; the number of all pushes if it needs none."""
        start = self.first_start
        firsts = [first for first, _ in self.points]
        waiting = start.waiting
        if waiting:
            return max(0, bisect_right(firsts, min(waiting)) - 1)

        if start.last == self.last:
            return len(firsts)

        return 0 if start.last is None else max(0, bisect_right(firsts, start.last) - 1)

    @property
    def restart_point(self) -> RestartPoint | None:
        """Where D must be read from after a restart; None: from the ledger's position, as no earlier sample waits."""
        number = self.needed_point
        return self.points[number][1] if number < len(self.points) else None
