"""Windows: rows that are read and shuffled together; what the read-ahead and the service know of all kinds of them."""

from __future__ import annotations

from collections import deque
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from asyncdata.core.errors import SnapshotError
from asyncdata.core.messages import (
    EXCLUDED,
    NO_SLOT,
    NOT_IN_SLOT,
    TOO_LONG,
    Block,
    Failed,
    Overflow,
    Reply,
    Scan,
    Scanned,
    Tokenize,
    Tokenized,
)
from asyncdata.core.types import Position, SourceLocation
from asyncdata.read_ahead.calls import Calls, checked
from asyncdata.workers.base import Crashed
from asyncdata.workers.changes import SENT, Promise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Set

    from asyncdata.checkpoint.snapshot import StreamState
    from asyncdata.delivery.channel import Channel, Entry
    from asyncdata.delivery.chunk import Chunk
    from asyncdata.delivery.items import Failure
    from asyncdata.delivery.ledger import DeliveryRules
    from asyncdata.order.order import Order
    from asyncdata.read_ahead.ranks import SharedScans
    from asyncdata.read_ahead.ready_rows import ReadyRows
    from asyncdata.sources.base import Blocks


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


SLACK_BYTES = 8 * 1024
"""Bytes read beyond a block's end, so that most rows that cross it need no second read."""

_MIN_BLOCKS_PER_SCAN, _MAX_BLOCKS_PER_SCAN = 8, 64
_SCAN_BYTES = 64 * 41 * 1024
_SCANS_OF_EACH = 3
"""Scans of a window for each worker of a cluster: each is answered with samples."""

_SCANS_OF_RANKS = 2
"""Scans of a window for each rank of those that divide them."""

_RANKS_AT_START = 16
"""So many ranks divide the window that a start begins with, too. Fewer need longer for it than for its first rows."""

_MAX_LOSSES_WITH_SAMPLES = 2
_KEPT_SIZES = 15


class BlockWindow(OpenWindow):
    """The rows of some blocks. They are known when all scans are answered.

    :param arrange: returns the order of so many rows, int64 of shape (num_rows,).
    :param ready: takes the samples that the scans are answered with; None: they are answered with text only.
    :param per_scan: blocks of a scan; None: so many that all workers take part in the first window.
    """

    def __init__(
        self,
        source: Blocks,
        blocks: list[Block],
        slot: int,
        stride: int,
        arrange: Callable[[int], Any],
        ready: ReadyRows | None = None,
        per_scan: int | None = None,
    ) -> None:
        self.blocks = blocks
        self.slot = slot
        self.num_blank = 0
        self._ready = ready
        self._source = source
        self._stride = stride
        self._arrange = arrange
        self._starts = self._lengths = self._offsets = np.empty(0, np.int32)
        self._order = self._ends = np.empty(0, np.int64)
        if per_scan is None and getattr(source, "stores", None):  # one request, so that all blocks are read at once
            per_scan = len(blocks)
        most = min(_MAX_BLOCKS_PER_SCAN, _SCAN_BYTES // stride)
        self._per_scan = max(_MIN_BLOCKS_PER_SCAN, most if per_scan is None else per_scan)  # canaries have so many
        self.num_scans = len(range(0, len(blocks), self._per_scan))
        self._parts: list[Scanned | None] = [None] * self.num_scans

    def scans(self) -> Iterator[Scan]:
        """The requests that read the window; their replies go to :meth:`add`."""
        for first in range(0, len(self.blocks), self._per_scan):
            yield Scan(
                self.slot,
                first * self._stride,
                self.blocks[first : first + self._per_scan],
                with_samples=self._ready is not None,
                has_slot=len(self._parts) == 1,
            )

    def add(self, part: int, reply: Scanned, *, is_elsewhere: bool = False) -> bool:
        """Take the reply to scan number ``part``; return whether all replies are there now.

        :param is_elsewhere: whether another rank tokenized the rows.
        """
        if self._ready is not None:
            self._ready.add(part, len(reply.lengths) // 4, reply.samples, is_elsewhere=is_elsewhere)
            reply = msgspec.structs.replace(reply, samples=None)
        self._parts[part] = reply
        parts = [found for found in self._parts if found is not None]
        if len(parts) < len(self._parts):
            return False

        self._ends = np.cumsum(_joined([found.counts for found in parts]), dtype=np.int64)
        self._order = order = self._arrange(int(self._ends[-1]) if len(self._ends) else 0)
        self._starts = _joined([found.starts for found in parts])[order]
        self._lengths = _joined([found.lengths for found in parts])[order]
        self._offsets = _joined([found.offsets for found in parts])[order]
        self.num_rows, self.num_blank = len(order), sum(found.num_blank for found in parts)
        if self._ready is not None:
            self._ready.arrange(order)
            self.is_placed = self._ready.are_all
        self._parts.clear()
        self.is_ready = True
        return True

    def sent(self) -> None:
        if self.is_placed:  # else rows may still be asked for
            self._ready = None

    def request(self, first: int, stop: int) -> Tokenize:
        return self.request_of(np.arange(first, stop))

    def placed(self, first: int, stop: int) -> Tokenized | None:
        return None if self._ready is None else self._ready.placed(first, stop)

    def request_of(self, rows: Int64) -> Tokenize:
        """What a worker needs to tokenize ``rows``."""
        starts, lengths = self._starts[rows], self._lengths[rows]
        beyond = np.flatnonzero((starts == NOT_IN_SLOT) & (lengths != TOO_LONG)).tolist()
        overflow = [Overflow(row, *self.key(int(rows[row]))) for row in beyond]
        return Tokenize(self.slot, starts.tobytes(), lengths.tobytes(), overflow)

    def keys(self, first: int, stop: int) -> tuple[Int64, Int64]:
        numbers = np.searchsorted(self._ends, self._order[first:stop], side="right")
        file_ids, starts = self._places[:, numbers]
        return file_ids, starts + self._offsets[first:stop]

    @cached_property
    def _places(self) -> Int64:
        """The number of each block's file, and where it begins there: of shape (2, num_blocks)."""
        return np.array([(block.file_id, block.start) for block in self.blocks], np.int64).reshape(-1, 2).T

    def location(self, row: int) -> SourceLocation:
        return self._source.location(*self.key(row), int(self._lengths[row]))


def _joined(parts: list[bytes]) -> Int32:
    return np.frombuffer(b"".join(parts), np.int32)


class BlockWindows(Windows):
    """Windows of blocks, which workers scan into slots.

    Where there are many, scans are sent only as fast as workers take them: until then, they would keep workers from the
    rows that are needed sooner.

    :param stride: bytes of a slot that one block takes.
    """

    def __init__(self, source: Blocks, order: Order, calls: Calls, stride: int) -> None:
        self.num_blank = 0
        self._source = source
        self._order = order
        self._calls = calls
        self._buffers: list[bytearray] = []
        self._stride = stride
        self._is_at_start = True
        self._sizes: dict[tuple[int, int], int] = {}
        self._shared: SharedScans | None = None
        self._part = 0

    def share(self, scans: SharedScans, part: int) -> bool:
        self._shared, self._part = scans, part
        return True

    def restart(self) -> None:
        self._is_at_start = True

    async def opened(self, epoch: int, number: int) -> BlockWindow:
        if number == 0 and epoch > 0:
            self._source.check_unchanged()
        if number >= self._order.num_windows:
            raise no_such_place(Position(epoch, number), f"an epoch has {self._order.num_windows} windows")

        window = self._window(epoch, number, await self._calls.slot())
        window.is_last = number + 1 == self._order.num_windows
        self._is_at_start = False
        scans = deque(window.scans())
        if len(scans) == 1 or scans[0].with_samples:
            later = [self._calls.later(self._scan, window, (epoch, number), *scan) for scan in enumerate(scans)]
            for scan in later:
                await scan
        else:
            for part, reply in enumerate(await self._calls.turn(partial(self._send_next, scans, []))):
                window.add(part, checked(await reply, Scanned))
        self.num_blank += window.num_blank
        recent = list(self._sizes.items())[-_KEPT_SIZES:]
        self._sizes = dict([*recent, ((epoch, number), window.num_rows)])  # a new dict, as other threads read it
        return window

    def _window(self, epoch: int, number: int, slot: int) -> BlockWindow:
        """The window, which is not scanned yet."""
        blocks = self._source.blocks(self._order.blocks(epoch, number))
        num_ranks = 0 if self._shared is None else self._shared.world_size
        is_divided = num_ranks and not (self._is_at_start and num_ranks < _RANKS_AT_START)
        ready, per_scan = None, None
        if self._calls.executor.answers_with_samples or is_divided:
            from asyncdata.read_ahead.ready_rows import ReadyRows  # only where samples come with their window

            num_scans = _SCANS_OF_RANKS * num_ranks or _SCANS_OF_EACH * self._calls.num_workers
            ready, per_scan = ReadyRows(self._buffers), min(_MAX_BLOCKS_PER_SCAN, -(-len(blocks) // num_scans))
        arrange = partial(self._order.rows, epoch, number)
        return BlockWindow(self._source, blocks, slot, self._stride, arrange, ready, per_scan)

    def _send_next(self, scans: deque[Scan], replies: list[Promise[Reply | Crashed]]) -> list[Promise[Reply | Crashed]]:
        """Send one scan at a time: meanwhile rows of the window before are sent, which are needed sooner."""
        replies.append(self._calls.submit(scans.popleft()))
        return SENT if scans else replies

    async def _scan(self, window: BlockWindow, place: tuple[int, int], part: int, scan: Scan) -> None:
        reply: Reply | Crashed | None = None
        is_elsewhere = False
        if scan.with_samples:
            make = partial(self._samples, scan)
            if self._shared is None:
                reply = await make()
            else:
                key = self._part, *place, part
                reply, is_elsewhere = await self._shared.scanned(key, window.num_scans, make)
        if reply is None or isinstance(reply, Crashed) or (isinstance(reply, Failed) and reply.row >= 0):
            # Of samples, a row is to blame. With their text here, they are tokenized at their turn, and it is found.
            reply = await self._calls.submit(msgspec.structs.replace(scan, with_samples=False))
        window.add(part, checked(reply, Scanned), is_elsewhere=is_elsewhere)

    async def _samples(self, scan: Scan) -> Reply | Crashed:
        return await (await self._calls.turn(lambda: self._calls.submit(scan, _MAX_LOSSES_WITH_SAMPLES)))

    def rows_after(self, position: Position) -> int | None:
        """Windows that are not read yet are estimated by the size of the current one."""
        number = position.window if position.row else position.window - 1
        size = self._sizes.get((position.epoch, number))
        if size is None:
            return None

        return max(0, size - position.row if position.row else 0) + size * (self._order.num_windows - number - 1)

    def share_before(self, position: Position) -> float:
        """All windows count as equally large. One that is not known is as large as any that is."""
        sizes = self._sizes
        size = sizes.get((position.epoch, position.window)) or max(sizes.values(), default=0)
        return (position.window + (min(1.0, position.row / size) if size else 0.0)) / self._order.num_windows
