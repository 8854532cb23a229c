"""One epoch as an iterator. It is a class, not a generator: an abandoned loop leaves no suspended frame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from asyncdata.core.errors import EndOfData, NoSamplesError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from typing import Self

    from asyncdata.core.types import Position, Sample

    Batch = tuple[Any, ...]  # one batch, or empty if samples form no batch
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


class NotTaken(Exception):  # noqa: N818 - control flow between ``finish`` and the loop
    """The samples are put back; the next request is another one."""


class Batches(Protocol):
    """The batches of one epoch: which samples to request next, and the batch made from them."""

    def next_request(self) -> tuple[int, int] | None:
        """The number of groups to request, and their epoch; None at the end."""
        ...

    def finish(self, samples: list[Sample]) -> Batch:
        """The batch that ``samples`` complete, if they do.

        :raises NotTaken: if the samples must be put back.
        """
        ...

    def end(self, end: EndOfData) -> Batch:
        """Called on EndOfData; return the final short batch, or ()."""
        ...


class StatefulBatches(Batches, Protocol):
    """Batches that have state of their own, which must be committed and rolled back with the samples."""

    def begin(self) -> None:
        """A new batch is requested: the caller has all earlier ones."""
        ...

    def take_back(self) -> None:
        """The caller did not get the batch made since :meth:`begin`: make it the next batch again."""
        ...


class Epoch:
    """Batches until the end of the loader's current epoch.

    :param take: takes samples and returns ``finish(samples)``; if that raises, the samples count as not taken.
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
    """The same for batches with state, which must be made one after the other.

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
        except BaseException:  # also an interrupt after the commit, while the lock is released
            if is_begun:
                self._stateful.take_back()
            raise
        if batch:
            return batch[0]

        raise StopIteration


class AsyncEpoch:
    """Batches until the end of the loader's current epoch; parameters are those of :class:`Epoch`."""

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
    """Like :class:`LockedEpoch`."""

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
    """One rank's part of a batch of all ranks: every ``world_size``-th item, from ``rank`` on.

    :ivar size: items of the batch of all ranks.
    """

    rank: int
    world_size: int
    size: int
    rounds_up: bool

    def of(self, num_items: int) -> Sequence[int]:
        """This rank's items of ``num_items``. With ``rounds_up``, items are repeated to fill a batch of ``size``."""
        if num_items < self.size and num_items and self.rounds_up:
            return [number % num_items for number in range(self.rank, self.size, self.world_size)]

        return range(self.rank, num_items, self.world_size)


class SampleSource(Protocol):
    """The loader, as far as these batches need it."""

    @property
    def share(self) -> Share:
        """This rank's share of a batch of groups."""
        ...

    @property
    def group_size(self) -> int:
        """Samples of a group."""
        ...

    def position(self) -> Position:
        """The position of the next sample."""
        ...

    def collate(self, samples: list[Sample]) -> Any:
        """The batch of these samples."""
        ...


class SampleBatches:
    """Batches of samples as they come; see :class:`Batches`.

    :param runs_on: False: the loop covers the epoch in which it begins, even if no samples are left of it.
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
        """The groups of a batch of all ranks, and the epoch in which the loop began."""
        if self._is_over:
            return None

        if self._epoch is None:
            position = self._loader.position()
            self._epoch, self._from_start = position.epoch, (position.window, position.row) == (0, 0)
        return self._share.size, self._epoch

    def finish(self, samples: list[Sample]) -> Batch:
        """The batch of ``samples``. No samples end the loop, unless there were none left at its start.

        So a run that is resumed after the last batch of an epoch continues with the next one, as the first run did.
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
        """This rank's share, collated; () if a short last batch has no group for this rank."""
        size = self._loader.group_size
        if self._share.world_size > 1 or len(samples) < self._share.size * size:
            numbers = self._share.of(len(samples) // size)
            samples = [sample for number in numbers for sample in samples[number * size : (number + 1) * size]]
        batch = (self._loader.collate(samples),) if samples else ()
        self._num_batches += 1
        return batch

    def end(self, end: EndOfData) -> Batch:
        """Called on EndOfData; return the final short batch, or ()."""
        self._is_over = True
        return self.finish(end.samples)
