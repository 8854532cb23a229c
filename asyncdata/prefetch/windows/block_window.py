"""A window of blocks, in the parent process: the offsets of its rows in the slot, in delivery order, without bytes."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from asyncdata.core.messages import Overflow, Scan, Tokenize
from asyncdata.core.row_codes import NOT_IN_SLOT, TOO_LONG
from asyncdata.prefetch.windows.base import Arranged, Int32, Int64, Placed, Tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Set

    from asyncdata.core.cache_messages import RowsRefused
    from asyncdata.core.errors import AsyncDataError
    from asyncdata.core.messages import Block, Scanned, Tokenized
    from asyncdata.core.types import SourceLocation
    from asyncdata.prefetch.windows.ready_rows import ReadyRows
    from asyncdata.sources.base import Blocks

__all__ = ("SLACK_BYTES", "Window")

SLACK_BYTES = 8 * 1024
"""Bytes read beyond a block's end, so that most rows that cross it need no second read."""

_MIN_BLOCKS_PER_SCAN, _MAX_BLOCKS_PER_SCAN = 8, 64
_SCAN_BYTES = 64 * 41 * 1024
_SCANS_OF_CACHED = 4
"""A window that is cached is read by few requests: while the trainer holds the GIL, each reply waits for it."""


class Window:
    """The rows of some blocks. They are known when all scans are answered.

    :param arrange: returns the order of so many rows, int64 of shape (num_rows,).
    :param tokens: the token cache of this window; None without one.
    :param ready: takes the samples that the scans are answered with; None: they are answered with text only.
    :param max_per_scan: blocks of a scan at most, if that is not too few.
    :ivar slot: the slot that has the bytes.
    :ivar is_last: whether it is the epoch's last window.
    :ivar num_rows: known when :meth:`add` has returned True.
    :ivar is_placed: whether all rows are cached and in the slot.
    :ivar fault: why it cannot be read; raised when its rows are next in the order.
    """

    def __init__(
        self,
        source: Blocks,
        blocks: list[Block],
        slot: int,
        stride: int,
        arrange: Callable[[int], Any],
        tokens: Tokens | None = None,
        ready: ReadyRows | None = None,
        max_per_scan: int = _MAX_BLOCKS_PER_SCAN,
    ) -> None:
        self._ready = ready
        self.slot = slot
        self.is_last = False
        self.num_rows = 0
        self.num_blank = 0
        self.is_placed, self.is_recorded = False, tokens is not None
        self.fault: AsyncDataError | None = None
        self._source = source
        self._blocks = blocks
        self._stride = stride
        self._arrange = arrange
        self._tokens = tokens
        self._starts = self._lengths = self._offsets = np.empty(0, np.int32)
        self._order = self._ends = np.empty(0, np.int64)
        # Small scans, so that all workers take part in the first window; but at least as many blocks as canaries have.
        text_bytes = stride - (tokens.room_bytes if tokens is not None else 0)
        most = min(_MAX_BLOCKS_PER_SCAN, max_per_scan)
        self._per_scan = max(_MIN_BLOCKS_PER_SCAN, min(most, _SCAN_BYTES // text_bytes))
        if tokens is not None and tokens.is_found:
            self._per_scan = max(self._per_scan, -(-len(blocks) // _SCANS_OF_CACHED))
        if getattr(source, "stores", None):  # one request, so that all blocks are read at once
            self._per_scan = len(blocks)
        self._parts: list[Scanned | None] = [None] * len(range(0, len(blocks), self._per_scan))

    def scans(self) -> Iterator[Scan]:
        """The requests that read the window; their replies go to :meth:`add`."""
        for first in range(0, len(self._blocks), self._per_scan):
            blocks = self._blocks[first : first + self._per_scan]
            scan = Scan(self.slot, first * self._stride, blocks, with_samples=self._ready is not None)
            yield scan if self._tokens is None else self._tokens.scan(scan, first)

    def add(self, part: int, reply: Scanned) -> bool:
        """Take the reply to scan number ``part``; return whether all replies are there now."""
        if self._ready is not None:
            self._ready.add(part, len(reply.starts) // 4, reply.samples)
            reply = msgspec.structs.replace(reply, samples=None)
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
            zeros = [bytes(len(found.starts)) for found in parts]  # where nothing was cached
            of_cached = ("num_tokens", "num_bytes")
            sizes = [_joined([getattr(f, name) or z for f, z in zip(parts, zeros, strict=True)]) for name in of_cached]
            self._tokens.arranged(Arranged(self._ends, order, starts, lengths, offsets, blanks, sums, *sizes))
            self.is_placed = self._tokens.is_placed
        if self._ready is not None:
            self._ready.arrange(order)
            self.is_placed = self._ready.are_all
        self._parts.clear()
        return True

    @property
    def is_ready(self) -> bool:
        """Whether its rows are known."""
        return not self._parts

    def request(self, first: int, stop: int) -> Tokenize:
        """What a worker needs to tokenize the rows ``[first, stop)``."""
        request = self.request_of(np.arange(first, stop))
        if self._ready is not None:
            return self._ready.left_out(request, first)

        return request if self._tokens is None else self._tokens.request(request, first)

    def placed(self, first: int, stop: int) -> Placed | None:
        """The rows ``[first, stop)``, if all of them are cached; None if a worker must tokenize them."""
        if self._ready is not None:
            return self._ready.placed(first, stop)

        return None if self._tokens is None else self._tokens.placed(self.slot, first, stop)

    def answered(self, first: int, num_rows: int, reply: Tokenized) -> None:
        """Take the reply for the rows ``[first, first + num_rows)``."""
        if self._tokens is not None:
            self._tokens.answered(first, num_rows, reply)

    def completed(self, first: int, num_rows: int, reply: Tokenized) -> Tokenized:
        """The reply, with the samples that the scans were answered with."""
        return reply if self._ready is None else self._ready.reply(first, num_rows, reply)

    def refused(self, first: int, num_rows: int, refusal: RowsRefused) -> None:
        """As the protocol says: never called, as rows are cached by blocks or not at all."""

    def request_of(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> Tokenize:
        """What a worker needs to tokenize ``rows``."""
        starts, lengths = self._starts[rows], self._lengths[rows]
        beyond = np.flatnonzero((starts == NOT_IN_SLOT) & (lengths != TOO_LONG)).tolist()
        overflow = [Overflow(row, *self.key(int(rows[row]))) for row in beyond]
        return Tokenize(self.slot, starts.tobytes(), lengths.tobytes(), overflow)

    def key(self, row: int) -> tuple[int, int]:
        """The number of the row's file, and its offset there."""
        block = self._blocks[int(np.searchsorted(self._ends, self._order[row], side="right"))]
        return block.file_id, block.start + int(self._offsets[row])

    def keys(self, first: int, stop: int) -> tuple[Int64, Int64]:
        """The numbers of the files of the rows ``[first, stop)``, and their offsets there."""
        numbers = np.searchsorted(self._ends, self._order[first:stop], side="right")
        file_ids, starts = self._places[:, numbers]
        return file_ids, starts + self._offsets[first:stop]

    @cached_property
    def _places(self) -> Int64:
        """The number of each block's file, and where it begins there: of shape (2, num_blocks)."""
        return np.array([(block.file_id, block.start) for block in self._blocks], np.int64).reshape(-1, 2).T

    def location(self, row: int) -> SourceLocation:
        """The row's location."""
        return self._source.location(*self.key(row), int(self._lengths[row]))

    def find(self, keys: Set[tuple[int, int]]) -> list[int]:
        """The rows of the window that ``keys`` name, in ascending order."""
        ids = {block.file_id for block in self._blocks}
        wanted = [key for key in keys if key[0] in ids]
        if not wanted:
            return []

        file_ids, offsets = self.keys(0, self.num_rows)
        return sorted(
            {int(row) for key in wanted for row in np.flatnonzero((file_ids == key[0]) & (offsets == key[1]))}
        )


def _joined(parts: list[bytes]) -> Int32:
    return np.frombuffer(b"".join(parts), np.int32)
