"""A window in the parent: where its rows lie in the slot, in the order of delivery. It never sees their bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from asyncdata.core.messages import Overflow, Scan, Tokenize
from asyncdata.prefetch.windows.base import Arranged, Int32, Placed, Tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Set

    from asyncdata.core.errors import AsyncDataError
    from asyncdata.core.messages import Block, Scanned, Tokenized
    from asyncdata.core.types import SourceLocation
    from asyncdata.sources.base import Blocks

__all__ = ("SLACK_BYTES", "Window")

SLACK_BYTES = 8 * 1024
"""Read beyond a block, so that most rows that cross its end need no second read."""

_MIN_BLOCKS_PER_SCAN, _MAX_BLOCKS_PER_SCAN = 8, 64
_SCAN_BYTES = 64 * 41 * 1024


class Window:
    """The rows of some blocks, once their scans are back.

    :param arrange: from a number of rows to their order, int64 of shape (num_rows,).
    :param tokens: what the token cache does for it; None without one.
    :ivar slot: where the bytes are.
    :ivar is_last: whether it is the epoch's last one.
    :ivar num_rows: known when :meth:`add` has returned True.
    :ivar is_placed: whether all of them are samples already.
    :ivar fault: why it cannot be read; to be raised at its turn.
    """

    def __init__(
        self,
        source: Blocks,
        blocks: list[Block],
        slot: int,
        stride: int,
        arrange: Callable[[int], Any],
        tokens: Tokens | None = None,
    ) -> None:
        self.slot = slot
        self.is_last = False
        self.num_rows = 0
        self.num_blank = 0
        self.is_placed = False
        self.fault: AsyncDataError | None = None
        self._source = source
        self._blocks = blocks
        self._stride = stride
        self._arrange = arrange
        self._tokens = tokens
        self._starts = self._lengths = self._offsets = np.empty(0, np.int32)
        self._order = self._ends = np.empty(0, np.int64)
        # Small scans, so that all workers share in the first window; of one at least, as many as there are canaries.
        text_bytes = stride - (tokens.room_bytes if tokens is not None else 0)
        self._per_scan = max(_MIN_BLOCKS_PER_SCAN, min(_MAX_BLOCKS_PER_SCAN, _SCAN_BYTES // text_bytes))
        self._parts: list[Scanned | None] = [None] * len(range(0, len(blocks), self._per_scan))

    def scans(self) -> Iterator[Scan]:
        """The requests that read the window; their replies go to :meth:`add`."""
        for first in range(0, len(self._blocks), self._per_scan):
            scan = Scan(self.slot, first * self._stride, self._blocks[first : first + self._per_scan])
            yield scan if self._tokens is None else self._tokens.scan(scan, first)

    def add(self, part: int, reply: Scanned) -> bool:
        """Take the reply to scan number ``part``; whether it was the last one missing."""
        self._parts[part] = reply
        if self._tokens is not None:
            self._tokens.scanned(part * self._per_scan, reply)
        parts = [found for found in self._parts if found is not None]
        if len(parts) < len(self._parts):
            return False

        self._ends = np.cumsum(_joined([found.counts for found in parts]), dtype=np.int64)
        self._order = order = self._arrange(int(self._ends[-1]) if len(self._ends) else 0)
        starts, lengths = _joined([found.starts for found in parts]), _joined([found.lengths for found in parts])
        offsets = _joined([found.offsets for found in parts])
        self._starts, self._lengths, self._offsets = starts[order], lengths[order], offsets[order]
        self.num_rows, self.num_blank = len(order), sum(found.num_blank for found in parts)
        if self._tokens is not None:
            blanks = _joined([found.blanks for found in parts])
            sums = np.frombuffer(b"".join([found.sums for found in parts]), np.uint64)
            self._tokens.arranged(Arranged(self._ends, order, starts, lengths, offsets, blanks, sums))
            self.is_placed = self._tokens.is_placed
        self._parts.clear()
        return True

    @property
    def is_ready(self) -> bool:
        """Whether its rows are known."""
        return not self._parts

    def request(self, first: int, stop: int) -> Tokenize:
        """What a worker needs to tokenize the rows ``[first, stop)``."""
        request = self.request_of(np.arange(first, stop))
        return request if self._tokens is None else self._tokens.request(request, first)

    def placed(self, first: int, stop: int) -> Placed | None:
        """The rows ``[first, stop)``, where all of them are samples already; None where a worker must be asked."""
        return None if self._tokens is None else self._tokens.placed(self.slot, first, stop)

    def answered(self, first: int, num_rows: int, reply: Tokenized) -> None:
        """What became of rows from ``first`` on is known."""
        if self._tokens is not None:
            self._tokens.answered(first, num_rows, reply)

    def request_of(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> Tokenize:
        """What a worker needs to tokenize ``rows``."""
        starts, lengths = self._starts[rows], self._lengths[rows]
        beyond = np.flatnonzero((starts == -1) & (lengths >= 0)).tolist()
        overflow = [Overflow(row, *self.key(int(rows[row]))) for row in beyond]
        return Tokenize(self.slot, starts.tobytes(), lengths.tobytes(), overflow)

    def key(self, row: int) -> tuple[int, int]:
        """The number of the row's file, and its offset there."""
        block = self._blocks[int(np.searchsorted(self._ends, self._order[row], side="right"))]
        return block.file_id, block.start + int(self._offsets[row])

    def location(self, row: int) -> SourceLocation:
        """The row's place."""
        return self._source.location(*self.key(row), int(self._lengths[row]))

    def find(self, keys: Set[tuple[int, int]]) -> list[int]:
        """The rows of the window that ``keys`` name, rising."""
        ids = {block.file_id for block in self._blocks}
        wanted = [key for key in keys if key[0] in ids]
        if not wanted:
            return []

        numbers = np.searchsorted(self._ends, self._order, side="right")
        file_ids = np.array([block.file_id for block in self._blocks])[numbers]
        offsets = np.array([block.start for block in self._blocks])[numbers] + self._offsets
        return sorted(
            {int(row) for key in wanted for row in np.flatnonzero((file_ids == key[0]) & (offsets == key[1]))}
        )


def _joined(parts: list[bytes]) -> Int32:
    return np.frombuffer(b"".join(parts), np.int32)
