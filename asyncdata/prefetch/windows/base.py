"""What windows have in common: the protocols, and where the rows of a chunk come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from asyncdata.core.errors import SnapshotError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set

    from asyncdata.checkpoint.snapshot import StreamState
    from asyncdata.core.errors import AsyncDataError
    from asyncdata.core.messages import Block, Scan, Scanned, Tokenize, Tokenized
    from asyncdata.core.types import Position, SourceLocation
    from asyncdata.delivery.chunk import Chunk, Origin
__all__ = (
    "AnywhereWindows",
    "Arranged",
    "CachedTokens",
    "ChunkOrigin",
    "OpenWindow",
    "Placed",
    "Tokens",
    "Windows",
    "no_such_place",
)


class Windows(Protocol):
    """Opens windows, in the order in which they are wanted.

    :ivar num_blank: blank lines passed over so far.
    :ivar restart_point: tells the first position that a restart would need now; set by who knows it.
    :ivar on_ready: called, in the service's thread, when a window became ready, or has a fault, other than by the reply
        to a request; after a reply, everybody looks again anyway (:meth:`~asyncdata.workers.base.Executor.watch`).
    :ivar read_s: seconds for which a window is being read here already, in the trainer's process; 0 for none.
    """

    num_blank: int
    restart_point: Callable[[], Position]
    on_ready: Callable[[], object]

    @property
    def read_s(self) -> float: ...

    async def run(self) -> None:
        """Do what must be done here, in the trainer's process, until cancelled; return at once if that is nothing."""
        ...

    async def finish(self) -> None:
        """The loader is closing: what was read is put where later runs find it. Soon, or it is cancelled."""
        ...

    def restart(self) -> None:
        """What was opened before is given up, and its slots are free."""
        ...

    def open(self, epoch: int, number: int) -> OpenWindow | None:
        """Begin to read window ``number`` of ``epoch``; None where there is no room yet.

        :raises SourceChangedError: if the data is not what it was.
        """
        ...

    def state_at(self, position: Position) -> StreamState | None:
        """What a snapshot keeps besides ``position``, so that its window is found again soon.

        Any thread may ask.
        """
        ...

    def resume_at(self, position: Position, state: StreamState | None) -> None:
        """A restart at ``position`` is about to come, from a snapshot that kept ``state``. Any thread may say so."""
        ...

    def rows_after(self, position: Position) -> int | None:
        """Rows of the epoch from ``position`` on, as far as can be told now; None if it cannot. Any thread may ask."""
        ...


class AnywhereWindows:
    """Windows that workers can read from anywhere: a position is all that a restart needs."""

    restart_point: Callable[[], Position]
    on_ready: Callable[[], object]
    read_s = 0.0

    async def run(self) -> None:
        """As the protocol says: nothing."""

    async def finish(self) -> None:
        """As the protocol says: nothing."""

    def state_at(self, position: Position) -> None:
        """As the protocol says: nothing."""

    def resume_at(self, position: Position, state: StreamState | None) -> None:
        """As the protocol says."""


class CachedTokens(Protocol):
    """The token cache, as windows see it (``token_cache.cache``)."""

    def restart(self) -> None: ...

    def is_ready(self, epoch: int, number: int) -> bool: ...

    def window(self, blocks: Sequence[Block]) -> Tokens: ...

    async def run(self) -> None: ...

    async def finish(self) -> None: ...


Int32 = np.ndarray[Any, np.dtype[np.int32]]


class Placed(Protocol):
    """Rows that are samples already, and lie where this process can reach them.

    :ivar reply: what a worker would have answered, less tokens and columns.
    """

    @property
    def reply(self) -> Tokenized: ...

    def chunk(self, first: Position, num_rows: int, origin: Origin, *, ends_epoch: bool) -> Chunk:
        """The chunk of them."""
        ...


class OpenWindow(Protocol):
    """Rows that are mixed together, as the producer sees them.

    :ivar slot: what is to be given back when all rows are sent.
    :ivar is_last: whether it is the epoch's last one; known when it is ready.
    :ivar num_rows: known when it is ready.
    :ivar is_placed: whether all of them are samples already; likewise.
    :ivar fault: why it cannot be read; to be raised at its turn.
    """

    slot: int
    is_last: bool
    num_rows: int
    is_placed: bool
    fault: AsyncDataError | None

    @property
    def is_ready(self) -> bool:
        """Whether its rows are known."""
        ...

    def request(self, first: int, stop: int) -> Tokenize:
        """What a worker needs to tokenize the rows ``[first, stop)``."""
        ...

    def placed(self, first: int, stop: int) -> Placed | None:
        """The rows ``[first, stop)``, where all of them are samples already; None where a worker must be asked."""
        ...

    def key(self, row: int) -> tuple[int, int]:
        """The number of the row's file, and its offset there."""
        ...

    def location(self, row: int) -> SourceLocation:
        """The row's place."""
        ...

    def find(self, keys: Set[tuple[int, int]]) -> list[int]:
        """The rows of the window that ``keys`` name, rising."""
        ...

    def answered(self, first: int, num_rows: int, reply: Tokenized) -> None:
        """What became of rows from ``first`` on is known."""
        ...


class Arranged(NamedTuple):
    """A window's rows, when its scans are back.

    :ivar ends: int64 of shape (num_blocks,), where the rows of each block stop.
    :ivar order: int64 of shape (num_rows,), the rows in the window's order, numbered as the blocks have them. What
        follows is in the order of the blocks, as in :class:`~asyncdata.core.messages.Scanned`.
    """

    ends: np.ndarray[Any, np.dtype[np.int64]]
    order: np.ndarray[Any, np.dtype[np.int64]]
    starts: Int32
    lengths: Int32
    offsets: Int32
    blanks: Int32
    sums: np.ndarray[Any, np.dtype[np.uint64]]


class Tokens(Protocol):
    """What the token cache has of a window, and is to have of it.

    :ivar room_bytes: of a slot, for each block, beside those for its text.
    :ivar is_placed: whether all rows are samples already.
    """

    room_bytes: int
    is_placed: bool

    def scan(self, scan: Scan, first: int) -> Scan:
        """The scan of the blocks from number ``first`` on, with what of them is cached."""
        ...

    def scanned(self, first: int, reply: Scanned) -> None:
        """The blocks from number ``first`` on are read."""
        ...

    def arranged(self, arranged: Arranged) -> None:
        """The window's rows are known."""
        ...

    def placed(self, slot: int, first: int, stop: int) -> Placed | None:
        """The rows ``[first, stop)``, where all of them lie in the slot as samples."""
        ...

    def request(self, request: Tokenize, first: int) -> Tokenize:
        """The request of rows from ``first`` on, with what of them is cached, and where the others are written to."""
        ...

    def answered(self, first: int, num_rows: int, reply: Tokenized) -> None:
        """Rows from ``first`` on have had their answer: from a worker, or because there will be none."""
        ...


def no_such_place(position: Position, found: str) -> SnapshotError:
    """The error of a restart at a position that does not exist.

    :param found: what there is in its place.
    """
    return SnapshotError(
        f"AD602 the snapshot's position does not exist: it is row {position.row} of window {position.window} of epoch "
        f"{position.epoch}, and {found}. It is damaged, or the data is not that of then: restore an older one, or go "
        "on with the next epoch by set_epoch()"
    )


class ChunkOrigin:
    """Where the rows of a chunk come from: the window's, from ``first`` on."""

    __slots__ = ("_first", "_window")

    def __init__(self, window: OpenWindow, first: int) -> None:
        self._window = window
        self._first = first

    def location(self, row: int) -> SourceLocation:
        """The location of the chunk's row ``row``."""
        return self._window.location(self._first + row)

    def key(self, row: int) -> tuple[int, int]:
        """The number of its file, and its offset there."""
        return self._window.key(self._first + row)
