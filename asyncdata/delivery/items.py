"""What the channel has, in the order of D: runs of samples, and what comes between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set

import msgspec

from asyncdata.core.errors import AsyncDataError
from asyncdata.core.threads import no_op
from asyncdata.core.types import Position
from asyncdata.delivery.chunk import BadRow, Chunk


class Bell:
    """Rung from any thread when the read-ahead may go on: there is room, or memory. Until it runs, nothing happens.

    :ivar ring: rings it; who listens sets it.
    """

    def __init__(self) -> None:
        self.ring: Callable[[], object] = no_op


class Run(msgspec.Struct, frozen=True, eq=False):
    """Samples ``[start, stop)`` of a chunk, to be delivered."""

    chunk: Chunk
    start: int
    stop: int


class AlreadyAcked(msgspec.Struct, frozen=True, eq=False):
    """A sample that was acknowledged before a restart, or is excluded now: it is counted, but not delivered again."""

    chunk: Chunk
    sample: int


class ChunkEnd(msgspec.Struct, frozen=True, eq=False):
    """The end of a chunk: all its rows are delivered, dropped or passed over."""

    chunk: Chunk


class Failure(msgspec.Struct, frozen=True, eq=False):
    """The error that ends the stream here; no item follows it."""

    error: AsyncDataError


Item = Run | AlreadyAcked | BadRow | ChunkEnd | Failure


def items_of(chunk: Chunk, bad_rows: list[BadRow], acked: Set[Position]) -> Iterator[Item]:
    """The chunk's samples and bad rows in their order, then its end."""
    marks: list[tuple[int, Item | None]] = [
        (chunk.samples_before(error.row), bad) for error, bad in zip(chunk.errors, bad_rows, strict=True)
    ]
    served = set(chunk.served.tolist())
    if acked:
        served.update(i for i in range(chunk.num_samples) if chunk.position(i) in acked)
    marks += [(i, AlreadyAcked(chunk, i)) for i in served.difference(chunk.excluded.tolist())]
    marks += [(sample, None) for sample in chunk.excluded.tolist()]
    if len(marks) > len(bad_rows):
        # A bad row comes before the sample that it precedes.
        marks.sort(key=lambda mark: (mark[0], not isinstance(mark[1], BadRow)))
    start = 0
    for sample, item in marks:
        if start < sample:
            yield Run(chunk, start, sample)
        if item is not None:
            yield item
        start = sample if isinstance(item, BadRow) else sample + 1
    if start < chunk.num_samples:
        yield Run(chunk, start, chunk.num_samples)
    yield ChunkEnd(chunk)
