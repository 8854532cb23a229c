"""One epoch as an iterator. It is a class, not a generator: an abandoned loop leaves no suspended frame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Self

__all__ = ("AsyncEpoch", "Batch", "Epoch")

Batch = tuple[Any, ...]
"""One batch, or empty if samples form no batch."""

BatchesT = TypeVar("BatchesT")


class Epoch(Generic[BatchesT]):
    """Batches until the end of the loader's current epoch.

    :param step: takes the samples that ``batches`` requests next, and returns the batch made of them; None at the end.
    """

    def __init__(self, batches: BatchesT, step: Callable[[BatchesT], Batch | None]) -> None:
        self._batches = batches
        self._step = step

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        # An interrupt after the step would lose the batch. CPython can raise one after a call of a C function, so there
        # is none here.
        while (batch := self._step(self._batches)) is not None:
            if batch:
                return batch[0]

        raise StopIteration


class AsyncEpoch(Generic[BatchesT]):
    """The same for ``async for``."""

    def __init__(self, batches: BatchesT, step: Callable[[BatchesT], Awaitable[Batch | None]]) -> None:
        self._batches = batches
        self._step = step

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        while (batch := await self._step(self._batches)) is not None:
            if batch:
                return batch[0]

        raise StopAsyncIteration
