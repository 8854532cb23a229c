"""One epoch as an iterator. A class, not a generator: an abandoned loop leaves nothing suspended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from asyncdata.core.errors import EndOfData, NoSamplesError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from typing import Self

    from asyncdata.core.types import Position, Sample

    Batch = tuple[Any, ...]  # of one, or of none where samples are no batch
    Finish = Callable[[list[Sample]], Batch]

__all__ = (
    "AsyncEpoch",
    "Batches",
    "Epoch",
    "LockedAsyncEpoch",
    "LockedEpoch",
    "NotTaken",
    "SampleBatches",
    "SampleSource",
    "Share",
    "StatefulBatches",
)


class NotTaken(Exception):  # noqa: N818 - flow between ``finish`` and the loop
    """The samples are not taken: something else is to be asked for."""


class Batches(Protocol):
    """The batches of one epoch: what to ask for next, and what becomes of it."""

    def next_request(self) -> tuple[int, int] | None:
        """How many groups of which epoch to ask for; None when it is over."""
        ...

    def finish(self, samples: list[Sample]) -> Batch:
        """The batch that ``samples`` complete, if they do.

        :raises NotTaken: if they are to stay where they are.
        """
        ...

    def end(self, end: EndOfData) -> Batch:
        """The data is at its end; the batch that is left."""
        ...


class StatefulBatches(Batches, Protocol):
    """Batches that commit what they deliver themselves, beside the samples that are taken."""

    def begin(self) -> None:
        """A batch is asked for: the caller has the ones before it."""
        ...

    def take_back(self) -> None:
        """The caller did not get what was delivered since :meth:`begin`: it is the next batch again."""
        ...


class Epoch:
    """Batches to the end of the epoch that the loader is in.

    :param take: gives what ``finish`` makes of samples; if that fails, they count as not taken.
    """

    def __init__(self, batches: Batches, take: Callable[[int, int, Finish], Batch]) -> None:
        self._batches = batches
        self._take = take

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        batch = self._next()
        if batch:
            return batch[0]

        raise StopIteration

    def _next(self) -> Batch:
        batches = self._batches
        while (request := batches.next_request()) is not None:
            num_groups, epoch = request
            try:
                batch = self._take(num_groups, epoch, batches.finish)
            except NotTaken:
                continue
            except EndOfData as end:
                batch = batches.end(end)
            if batch:
                return batch

        return ()


class LockedEpoch(Epoch):
    """The same where one batch must be made after the other.

    :param lock: held while a batch is made.
    """

    def __init__(
        self,
        batches: StatefulBatches,
        take: Callable[[int, int, Finish], Batch],
        lock: AbstractContextManager[Any],
    ) -> None:
        super().__init__(batches, take)
        self._stateful = batches
        self._lock = lock

    def __next__(self) -> Any:
        is_begun = False
        try:
            with self._lock:
                self._stateful.begin()
                is_begun = True
                batch = self._next()
        except BaseException:  # also an interrupt while the lock is given back, behind the commit
            if is_begun:
                self._stateful.take_back()
            raise
        if batch:
            return batch[0]

        raise StopIteration


class AsyncEpoch:
    """Batches to the end of the epoch that the loader is in; parameters are those of :class:`Epoch`."""

    def __init__(self, batches: Batches, take: Callable[[int, int, Finish], Awaitable[Batch]]) -> None:
        self._batches = batches
        self._take = take

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        batch = await self._next()
        if batch:
            return batch[0]

        raise StopAsyncIteration

    async def _next(self) -> Batch:
        batches = self._batches
        while (request := batches.next_request()) is not None:
            num_groups, epoch = request
            try:
                batch = await self._take(num_groups, epoch, batches.finish)
            except NotTaken:
                continue
            except EndOfData as end:
                batch = batches.end(end)
            if batch:
                return batch

        return ()


class LockedAsyncEpoch(AsyncEpoch):
    """As :class:`LockedEpoch`."""

    def __init__(
        self,
        batches: StatefulBatches,
        take: Callable[[int, int, Finish], Awaitable[Batch]],
        lock: AbstractAsyncContextManager[Any],
    ) -> None:
        super().__init__(batches, take)
        self._stateful = batches
        self._lock = lock

    async def __anext__(self) -> Any:
        is_begun = False
        try:
            async with self._lock:
                self._stateful.begin()
                is_begun = True
                batch = await self._next()
        except BaseException:
            if is_begun:
                self._stateful.take_back()
            raise
        if batch:
            return batch[0]

        raise StopAsyncIteration


class Share(NamedTuple):
    """What one rank has of a batch of all ranks: every ``world_size``-th item, from ``rank`` on.

    :ivar size: items of the batch of all ranks.
    """

    rank: int
    world_size: int
    size: int
    rounds_up: bool

    def of(self, num_items: int) -> Sequence[int]:
        """Which of ``num_items`` items this rank has; fewer than ``size`` may be repeated, to be as many."""
        if num_items < self.size and num_items and self.rounds_up:
            return [number % num_items for number in range(self.rank, self.size, self.world_size)]

        return range(self.rank, num_items, self.world_size)


class SampleSource(Protocol):
    """Where batches of samples come from: a loader, as far as that is concerned."""

    @property
    def share(self) -> Share:
        """This rank's, of batches of groups."""
        ...

    @property
    def group_size(self) -> int:
        """Samples of a group."""
        ...

    def position(self) -> Position:
        """The place of the next sample."""
        ...

    def collate(self, samples: list[Sample]) -> Any:
        """What the loop is given."""
        ...


class SampleBatches:
    """Batches of samples as they come; as :class:`Batches`.

    :param runs_on: False: the loop is over the epoch in which it begins, even if nothing is left of it.
    """

    def __init__(self, loader: SampleSource, *, runs_on: bool = True) -> None:
        self._loader = loader
        self._runs_on = runs_on
        self._share = loader.share
        self._epoch: int | None = None
        self._from_start = False
        self._num_batches = 0
        self._is_over = False

    def next_request(self) -> tuple[int, int] | None:
        """A batch of all ranks, of the epoch that the loader is in at the first one."""
        if self._is_over:
            return None

        if self._epoch is None:
            position = self._loader.position()
            self._epoch, self._from_start = position.epoch, (position.window, position.row) == (0, 0)
        return self._share.size, self._epoch

    def finish(self, samples: list[Sample]) -> Batch:
        """The batch that ``samples`` are. None at all end the epoch, unless nothing of it was left to begin with.

        A run that is resumed behind the last batch of an epoch goes on with the next one, as the first run did.
        """
        if samples:
            return self._batch(samples)

        if self._num_batches or self._is_over or not (self._runs_on or self._from_start):
            self._is_over = True
            return ()

        if self._from_start:
            raise NoSamplesError(
                f"AD406 epoch {self._epoch} has fewer samples than one batch, and drop_last=True drops them all; lower "
                "batch_size or set drop_last=False"
            )

        self._epoch = None
        return ()

    def _batch(self, samples: list[Sample]) -> Batch:
        """This rank's share, collated. There is none of a last batch that has fewer groups than there are ranks."""
        size = self._loader.group_size
        if self._share.world_size > 1 or len(samples) < self._share.size * size:
            numbers = self._share.of(len(samples) // size)
            samples = [sample for number in numbers for sample in samples[number * size : (number + 1) * size]]
        batch = (self._loader.collate(samples),) if samples else ()
        self._num_batches += 1
        return batch

    def end(self, end: EndOfData) -> Batch:
        """The data is at its end; the batch that is left."""
        self._is_over = True
        return self.finish(end.samples)
