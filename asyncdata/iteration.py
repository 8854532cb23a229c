"""One epoch as an iterator. A class, not a generator: an abandoned loop leaves nothing suspended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from asyncdata.errors import EndOfData, NoSamplesError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Self

    from asyncdata.types import Position, Sample

    Batch = tuple[Any, ...]  # of one, or of none where samples are no batch
    Finish = Callable[[list[Sample]], Batch]

__all__ = ("AsyncEpoch", "BatchSource", "Epoch")


class BatchSource(Protocol):
    """What an epoch is iterated over: a loader, as far as that is concerned."""

    def batch_groups(self) -> int:
        """Groups per batch."""
        ...

    def position(self) -> Position:
        """The place of the next sample."""
        ...

    def collate(self, samples: list[Sample]) -> Any:
        """What the loop is given."""
        ...


class _Progress:
    """What both iterators decide in the same way: which epoch it is, and whether it is over."""

    def __init__(self, loader: BatchSource) -> None:
        self._loader = loader
        self._num_groups = loader.batch_groups()
        self._epoch: int | None = None
        self._from_start = False
        self._num_batches = 0
        self._is_over = False

    def next_request(self) -> tuple[int, int] | None:
        """How many groups of which epoch to ask for; None when it is over."""
        if self._is_over:
            return None

        if self._epoch is None:
            position = self._loader.position()
            self._epoch, self._from_start = position.epoch, (position.window, position.row) == (0, 0)
        return self._num_groups, self._epoch

    def finish(self, samples: list[Sample]) -> Batch:
        """The batch that ``samples`` are. None at all end the epoch, unless nothing of it was left to begin with.

        A run that is resumed behind the last batch of an epoch goes on with the next one, as the first run did.
        """
        if samples:
            batch = self._loader.collate(samples)
            self._num_batches += 1
            return (batch,)

        if self._num_batches or self._is_over:
            self._is_over = True
            return ()

        if self._from_start:
            raise NoSamplesError(
                f"AD406 epoch {self._epoch} has fewer samples than one batch, and drop_last=True drops them all; lower "
                "batch_size or set drop_last=False"
            )

        self._epoch = None
        return ()

    def end(self, end: EndOfData) -> Batch:
        """The data is at its end; the batch that is left."""
        self._is_over = True
        return self.finish(end.samples)


class Epoch:
    """Batches to the end of the epoch that the loader is in."""

    def __init__(self, loader: BatchSource, take: Callable[[int, int, Finish], Batch]) -> None:
        self._take = take
        self._progress = _Progress(loader)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        progress = self._progress
        while (request := progress.next_request()) is not None:
            num_groups, epoch = request
            try:
                batch = self._take(num_groups, epoch, progress.finish)
            except EndOfData as end:
                batch = progress.end(end)
            if batch:
                return batch[0]

        raise StopIteration


class AsyncEpoch:
    """Batches to the end of the epoch that the loader is in."""

    def __init__(self, loader: BatchSource, take: Callable[[int, int, Finish], Awaitable[Batch]]) -> None:
        self._take = take
        self._progress = _Progress(loader)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        progress = self._progress
        while (request := progress.next_request()) is not None:
            num_groups, epoch = request
            try:
                batch = await self._take(num_groups, epoch, progress.finish)
            except EndOfData as end:
                batch = progress.end(end)
            if batch:
                return batch[0]

        raise StopAsyncIteration
