"""The protocols of windows and of the token cache, as the producer and the windows see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np

from asyncdata.core.errors import SnapshotError
from asyncdata.core.row_codes import EXCLUDED
from asyncdata.delivery.outcomes.rows import row_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set

    from asyncdata.checkpoint.snapshot import StreamState
    from asyncdata.core.cache_messages import CachedPlaces, RowsRefused
    from asyncdata.core.errors import AsyncDataError
    from asyncdata.core.messages import Block, Scan, Scanned, Tokenize, Tokenized
    from asyncdata.core.types import Position, SourceLocation
    from asyncdata.delivery.chunk import Chunk, Origin
    from asyncdata.delivery.outcomes.policy import Ids

__all__ = (
    "AnywhereWindows",
    "Arranged",
    "CachedRows",
    "CachedTokens",
    "ChunkOrigin",
    "OpenWindow",
    "Placed",
    "Reading",
    "Tokens",
    "Windows",
    "leaving_out",
    "no_such_place",
)


class Reading(Protocol):
    """What runs in the service's loop while windows are read: those of a source, or of all parts of a mixture.

    :ivar read_s: seconds for which the trainer's process has been reading the current window; 0 if it is not reading.
    """

    @property
    def read_s(self) -> float: ...

    async def run(self) -> None:
        """Do the work that this process must do itself, until cancelled; return at once if there is none."""
        ...

    async def finish(self) -> None:
        """The loader is closing: store what later runs can use. It is cancelled after a few seconds."""
        ...


class Windows(Reading, Protocol):
    """Opens windows, in the order in which they are needed.

    :ivar num_blank: blank lines passed over so far.
    """

    num_blank: int

    def restart(self) -> None:
        """Give up all windows that were opened, and free their slots."""
        ...

    def open(self, epoch: int, number: int) -> OpenWindow | None:
        """Begin to read window ``number`` of ``epoch``; None if there is no room yet.

        :raises SourceChangedError: if the data has changed.
        """
        ...

    def state_at(self, position: Position) -> StreamState | None:
        """What a snapshot keeps besides ``position``, so that its window is found quickly. From any thread."""
        ...

    def resume_at(self, position: Position, state: StreamState | None) -> None:
        """Prepare for a restart at ``position``, from a snapshot that kept ``state``. From any thread."""
        ...

    def rows_after(self, position: Position) -> int | None:
        """Rows of the epoch from ``position`` on, maybe estimated; None if that is not known. From any thread."""
        ...


class WritingCache(Protocol):
    """A token cache, as far as it writes while the loader runs."""

    async def run(self) -> None: ...

    async def finish(self) -> None: ...


class AnywhereWindows:
    """Windows that workers can read at any position, so that a restart needs only the position."""

    read_s = 0.0
    _cache: WritingCache | None = None

    async def run(self) -> None:
        """As the protocol says: the token cache writes in a thread."""
        if self._cache is not None:
            await self._cache.run()

    async def finish(self) -> None:
        """As the protocol says: in the token cache."""
        if self._cache is not None:
            await self._cache.finish()

    def state_at(self, position: Position) -> None:
        """As the protocol says: nothing."""

    def resume_at(self, position: Position, state: StreamState | None) -> None:
        """As the protocol says."""


class CachedRows(Protocol):
    """The token cache, as windows of single rows see it (``token_cache.row_cache``).

    :ivar on_listed: called when :meth:`is_ready` may have changed.
    """

    on_listed: Callable[[], object]

    def restart(self) -> None: ...

    def is_ready(self, epoch: int, number: int) -> bool:
        """Whether window ``number`` of ``epoch`` may be filled."""
        ...

    def numbers(self, file_ids: Int64, starts: Int64) -> Int64:
        """The cache's numbers of the rows with these numbers in these files."""
        ...

    def find(self, rows: Int64) -> CachedPlaces | None:
        """Where those of the rows are that are cached; None if none is."""
        ...

    def spill(self) -> str:
        """A name for the file of the next reply; empty if it is not to be stored."""
        ...

    def answered(self, rows: Int64, are_cached: np.ndarray[Any, np.dtype[np.bool_]], reply: Tokenized) -> None:
        """Take the reply for ``rows``, of which some were cached when they were requested."""
        ...

    def refused_rows(self, rows: Int64, refusal: RowsRefused) -> None:
        """Cached rows could not be used; they are tokenized. ``rows`` are those of the request."""
        ...

    def flush(self) -> None:
        """Store the rows that were answered so far."""
        ...

    async def run(self) -> None: ...

    async def finish(self) -> None: ...


class CachedTokens(Protocol):
    """The token cache, as windows see it (``token_cache.cache``)."""

    def restart(self) -> None: ...

    def is_ready(self, epoch: int, number: int) -> bool: ...

    def window(self, blocks: Sequence[Block]) -> Tokens: ...

    async def run(self) -> None: ...

    async def finish(self) -> None: ...


Int32 = np.ndarray[Any, np.dtype[np.int32]]
Int64 = np.ndarray[Any, np.dtype[np.int64]]


class Placed(Protocol):
    """Cached rows in a slot, which need no worker.

    :ivar reply: what a worker would have answered, without tokens and columns.
    """

    @property
    def reply(self) -> Tokenized: ...

    def chunk(self, first: Position, num_rows: int, origin: Origin, *, ends_epoch: bool) -> Chunk:
        """The chunk of these rows."""
        ...


class OpenWindow(Protocol):
    """Rows that are shuffled together, as the producer sees them.

    :ivar slot: the slot to release when all rows are sent.
    :ivar is_last: whether it is the epoch's last window; known when it is ready.
    :ivar num_rows: number of rows that are known so far; of all when it is ready.
    :ivar is_placed: whether all rows are cached and in the slot; known when it is ready.
    :ivar is_recorded: whether replies are written to the token cache, so that every row must be tokenized.
    :ivar fault: why it cannot be read; raised when its rows are next in the order.
    """

    slot: int
    is_last: bool
    num_rows: int
    is_placed: bool
    is_recorded: bool
    fault: AsyncDataError | None

    @property
    def is_ready(self) -> bool:
        """Whether all its rows are known."""
        ...

    def request(self, first: int, stop: int) -> Tokenize:
        """What a worker needs to tokenize the rows ``[first, stop)``."""
        ...

    def placed(self, first: int, stop: int) -> Placed | None:
        """The rows ``[first, stop)``, if all of them are cached; None if a worker must tokenize them."""
        ...

    def key(self, row: int) -> tuple[int, int]:
        """The number of the row's file, and its offset there."""
        ...

    def location(self, row: int) -> SourceLocation:
        """The row's location."""
        ...

    def find(self, keys: Set[tuple[int, int]]) -> list[int]:
        """The rows of the window that ``keys`` name, in ascending order."""
        ...

    def keys(self, first: int, stop: int) -> tuple[Int64, Int64]:
        """The numbers of the files of the rows ``[first, stop)``, and their offsets there; of shape (stop - first,)."""
        ...

    def answered(self, first: int, num_rows: int, reply: Tokenized) -> None:
        """Take the reply for the rows ``[first, first + num_rows)``."""
        ...

    def completed(self, first: int, num_rows: int, reply: Tokenized) -> Tokenized:
        """A worker's reply for the rows ``[first, first + num_rows)``, with the samples that were there before."""
        ...

    def refused(self, first: int, num_rows: int, refusal: RowsRefused) -> None:
        """Cached rows among ``[first, first + num_rows)`` could not be used: they are requested again, and then
        tokenized.
        """
        ...


class Arranged(NamedTuple):
    """A window's rows, when the replies to its scans are there.

    The fields after ``order`` are in the order of the blocks, as in :class:`~asyncdata.core.messages.Scanned`.

    :ivar ends: int64 of shape (num_blocks,), where the rows of each block stop.
    :ivar order: int64 of shape (num_rows,), the rows in the window's order, numbered as the blocks have them.
    """

    ends: np.ndarray[Any, np.dtype[np.int64]]
    order: np.ndarray[Any, np.dtype[np.int64]]
    starts: Int32
    lengths: Int32
    offsets: Int32
    blanks: Int32
    sums: np.ndarray[Any, np.dtype[np.uint64]]
    num_tokens: Int32
    num_bytes: Int32


class Tokens(Protocol):
    """The token cache of one window: which of its rows are cached, and which will be written.

    :ivar room_bytes: bytes of a slot for each block, in addition to those for its text.
    :ivar is_found: whether all blocks are listed as cached.
    :ivar is_placed: whether all rows are cached and in the slot.
    """

    room_bytes: int
    is_found: bool
    is_placed: bool

    def scan(self, scan: Scan, first: int) -> Scan:
        """The scan of the blocks from number ``first`` on, with the list of those that are cached."""
        ...

    def scanned(self, first: int, reply: Scanned) -> None:
        """The blocks from number ``first`` on are read."""
        ...

    def arranged(self, arranged: Arranged) -> None:
        """Take the window's rows."""
        ...

    def placed(self, slot: int, first: int, stop: int) -> Placed | None:
        """The rows ``[first, stop)``, if all of them are cached and in the slot."""
        ...

    def request(self, request: Tokenize, first: int) -> Tokenize:
        """The request for rows from ``first`` on, with the number of cached ones, and the file for the others."""
        ...

    def answered(self, first: int, num_rows: int, reply: Tokenized) -> None:
        """Take the reply for rows from ``first`` on: of a worker, or made here for a row that no worker tokenizes."""
        ...


def leaving_out(request: Tokenize, is_out: np.ndarray[Any, np.dtype[np.bool_]]) -> Tokenize:
    """The request without the text of the rows that are out, which the reply then counts as excluded."""
    lengths = np.where(is_out, np.int32(EXCLUDED), np.frombuffer(request.lengths, np.int32))
    overflow = [item for item in request.overflow if not is_out[item.row]]
    return msgspec.structs.replace(request, lengths=lengths.tobytes(), overflow=overflow)


def no_such_place(position: Position, found: str) -> SnapshotError:
    """The error of a restart at a position that does not exist.

    :param found: what was found instead, for the message.
    """
    return SnapshotError(
        f"AD602 the snapshot's position does not exist: it is row {position.row} of window {position.window} of epoch "
        f"{position.epoch}, and {found}. It is damaged, or the data has changed: restore an older one, or "
        "continue with the next epoch by set_epoch()"
    )


class ChunkOrigin:
    """The origin of a chunk: the window's rows from ``first`` on."""

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

    def ids(self, num_rows: int) -> Ids:
        """The ids of the first ``num_rows`` rows."""
        return row_ids(*self._window.keys(self._first, self._first + num_rows))
