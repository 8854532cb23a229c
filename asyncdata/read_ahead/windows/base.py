"""Windows: rows that are read and shuffled together; what the read-ahead and the service know of all kinds of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from asyncdata.core.errors import SnapshotError
from asyncdata.core.messages import EXCLUDED, NO_SLOT, Tokenize, Tokenized

if TYPE_CHECKING:
    from collections.abc import Set

    from asyncdata.checkpoint.snapshot import StreamState
    from asyncdata.core.types import Position, SourceLocation
    from asyncdata.delivery.channel import Channel, Entry
    from asyncdata.delivery.chunk import Chunk
    from asyncdata.delivery.items import Failure
    from asyncdata.delivery.ledger import DeliveryRules
    from asyncdata.read_ahead.windows.shared_scans import SharedScans

Int32 = np.ndarray[Any, np.dtype[np.int32]]
Int64 = np.ndarray[Any, np.dtype[np.int64]]


class Feed(Protocol):
    """Where rows go: the coordinator, or a part of a mixture. A restart makes a new channel.

    :ivar lock: held while anything of the channel changes.
    """

    rules: DeliveryRules
    lock: Any

    @property
    def channel(self) -> Channel: ...

    def restart_position(self) -> Position:
        """The first position that a restart would need now."""

    def is_awaited(self, channel: Channel) -> bool:
        """Whether a call waits for a sample, and none is left."""

    def reserve(self, channel: Channel, max_rows: int, min_rows: int) -> Entry | None:
        """A place for at most ``max_rows`` rows; None if there is no room for ``min_rows``."""

    def fill(self, channel: Channel, entry: Entry, content: Chunk | Failure) -> None:
        """Set the content of ``entry``."""

    def fail(self, channel: Channel, failure: Failure) -> None:
        """End with an error, after everything that is entered."""


class Windows:
    """Opens windows, in the order in which they are needed. Workers read them, so a restart needs only the position.

    :ivar num_blank: blank lines passed over so far.
    :ivar leaves_out: whether rows are left out from the next restart on.
    :ivar is_padded: whether this process has left out fields that Arrow added.
    :ivar is_late: whether an epoch is opened after all rows before it are sent, and not while they are.
    """

    num_blank = 0
    leaves_out = is_padded = is_late = False

    def begin(self, feed: Feed) -> None:
        """The service runs, in whose loop this is called: from now on, other ranks may wait for this one.

        :param feed: where the rows go, which knows what a restart would need.
        """
        self._feed = feed

    def restart(self) -> None:
        """The read-ahead begins anew: no window that was opened is needed any more."""

    def share(self, scans: SharedScans, part: int) -> bool:
        """From the start on, divide what is read among ranks; return False where it cannot be divided.

        :param part: the number of the part of the mixture.
        """
        return False

    async def opened(self, epoch: int, number: int) -> OpenWindow:
        """Read window ``number`` of ``epoch``, of which at least the first rows are known then.

        :raises SourceChangedError: if the data has changed.
        :raises AsyncDataError: if it cannot be read.
        """
        raise NotImplementedError

    async def more(self, window: OpenWindow) -> None:
        """Wait until more rows of a window are known. It does not know who opened it, as chunks hold it long.

        :raises AsyncDataError: if they cannot be.
        """

    def rows_after(self, position: Position) -> int | None:
        """Rows of the epoch from ``position`` on, maybe estimated; None if that is not known. From any thread."""
        return None

    def share_before(self, position: Position) -> float:
        """How much of its epoch is before ``position``, 0 to 1, maybe estimated; 0 if unknown. From any thread."""
        return 0.0

    def state_at(self, position: Position) -> StreamState | None:
        """What a snapshot keeps besides ``position``, so that its window is found quickly. From any thread."""
        return None

    def resume_at(self, position: Position, state: StreamState | None) -> None:
        """Prepare for a restart at ``position``, from a snapshot that kept ``state``. From any thread."""

    @property
    def read_s(self) -> float:
        """Seconds for which the trainer's process has been reading the current window; 0 if it is not reading."""
        return 0.0

    async def run(self) -> None:
        """Do the work that this process must do itself, until cancelled; return at once if there is none."""


class OpenWindow:
    """Rows that are shuffled together.

    :ivar slot: the slot to release when all rows are sent.
    :ivar is_ready: whether all rows are known; else :meth:`Windows.more` waits for some.
    :ivar is_last: whether it is the epoch's last window; known when it is ready.
    :ivar num_rows: number of rows that are known so far; of all when it is ready.
    :ivar is_placed: whether no row needs a worker; known when it is ready.
    """

    slot = NO_SLOT
    is_ready = is_last = is_placed = False
    num_rows = 0

    def sent(self) -> None:
        """All rows are sent. Chunks may hold the window for long after that, to name their rows."""

    def request(self, first: int, stop: int) -> Tokenize:
        """What a worker needs to tokenize the rows ``[first, stop)``."""
        raise NotImplementedError

    def placed(self, first: int, stop: int) -> Tokenized | None:
        """The samples of the rows ``[first, stop)``, if none of them needs a worker; None if one does."""
        return None

    def answered(self, reply: Tokenized) -> None:
        """A worker has answered a request for rows."""

    def keys(self, first: int, stop: int) -> tuple[Int64, Int64]:
        """The numbers of the files of the rows ``[first, stop)``, and their offsets there; of shape (stop - first,)."""
        raise NotImplementedError

    def location(self, row: int) -> SourceLocation:
        """The row's location."""
        raise NotImplementedError

    def key(self, row: int) -> tuple[int, int]:
        """The number of the row's file, and its offset there."""
        file_ids, offsets = self.keys(row, row + 1)
        return int(file_ids[0]), int(offsets[0])

    def find(self, keys: Set[tuple[int, int]]) -> list[int]:
        """The rows of the window that ``keys`` name, in ascending order."""
        if not keys:
            return []

        file_ids, offsets = self.keys(0, self.num_rows)
        rows = np.flatnonzero(np.isin(offsets, [offset for _, offset in keys])).tolist()
        return [row for row in rows if (int(file_ids[row]), int(offsets[row])) in keys]


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
