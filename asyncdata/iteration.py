"""One epoch as an iterator. A class, not a generator: an abandoned loop leaves nothing suspended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from asyncdata.errors import EndOfData, NoSamplesError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Self

    from asyncdata.types import Position, Sample

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

    def ended(self, end: EndOfData) -> list[Sample]:
        """The data is at its end; the samples that were left."""
        self._is_over = True
        return end.samples

    def accept(self, samples: list[Sample]) -> bool:
        """Whether ``samples`` are a batch. None at all end the epoch, unless nothing of it was left to begin with.

        A run that is resumed behind the last batch of an epoch goes on with the next one, as the first run did.
        """
        if samples:
            self._num_batches += 1
            return True

        if self._num_batches or self._is_over:
            self._is_over = True
            return False

        if self._from_start:
            raise NoSamplesError(
                f"AD402 epoch {self._epoch} has fewer samples than one batch, and drop_last=True drops them all; lower "
                "batch_size or set drop_last=False"
            )

        self._epoch = None
        return False


class Epoch:
    """Batches to the end of the epoch that the loader is in."""

    def __init__(self, loader: BatchSource, take: Callable[[int, int], list[Sample]]) -> None:
        self._loader = loader
        self._take = take
        self._progress = _Progress(loader)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        while (request := self._progress.next_request()) is not None:
            try:
                samples = self._take(*request)
            except EndOfData as end:
                samples = self._progress.ended(end)
            if self._progress.accept(samples):
                return self._loader.collate(samples)

        raise StopIteration


class AsyncEpoch:
    """Batches to the end of the epoch that the loader is in."""

    def __init__(self, loader: BatchSource, take: Callable[[int, int], Awaitable[list[Sample]]]) -> None:
        self._loader = loader
        self._take = take
        self._progress = _Progress(loader)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        while (request := self._progress.next_request()) is not None:
            try:
                samples = await self._take(*request)
            except EndOfData as end:
                samples = self._progress.ended(end)
            if self._progress.accept(samples):
                return self._loader.collate(samples)

        raise StopAsyncIteration
