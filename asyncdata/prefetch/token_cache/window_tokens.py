"""The token cache of one window: which of its blocks are read from the cache, and which will be written to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np

from asyncdata.core.cache_messages import CachedBlock, StorePlan
from asyncdata.core.row_codes import is_cached, record_of
from asyncdata.prefetch.token_cache.segment.layout import NO_SUM

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from asyncdata.core.cache_messages import Refused
    from asyncdata.core.messages import Block, Scan, Scanned, Tokenize, Tokenized
    from asyncdata.prefetch.token_cache.catalog import Catalog, Indices
    from asyncdata.prefetch.token_cache.folder import CacheFolder
    from asyncdata.prefetch.windows.base import Arranged, Placed

__all__ = ("JOURNAL", "MAX_NOTES", "Keeper", "WindowTokens")

JOURNAL = "journal"
MAX_NOTES = 31  # one bit each of a signed int32
_MIN_BLOCKS_PER_PIECE = 64
_PIECE_BYTES = 16 << 20
Int32 = np.ndarray[Any, np.dtype[np.int32]]


class Keeper(Protocol):
    """The cache, as a window sees it.

    :ivar reads_in_place: whether this process reads cached chunks from the slot.
    """

    reads_in_place: bool

    def refused(self, block: Block, item: CachedBlock, refusal: Refused) -> None:
        """A cached block could not be used, and was read from its file."""
        ...

    def read(self, num_rows: int) -> None:
        """Count rows that were read from the cache."""
        ...

    def placed(
        self, slot: int, records: np.ndarray[Any, np.dtype[np.int64]], num_tokens: Int32, num_bytes: Int32
    ) -> Placed:
        """The rows whose records are at these offsets of the slot; ``num_tokens`` and ``num_bytes`` are theirs."""
        ...

    def fail(self, reason: str) -> None:
        """Stop writing: it has failed."""
        ...

    def complete(self, window: WindowTokens) -> None:
        """All rows of the window are answered."""
        ...


class _Spilled(NamedTuple):
    """A reply that a worker wrote to a file: for the rows ``[first, stop)`` in the window's order."""

    name: str
    first: int
    stop: int


class WindowTokens:
    """The token cache of one window; see :class:`~asyncdata.prefetch.windows.base.Tokens`.

    :param found: the blocks that are cached.
    :param room: the folder that replies are written to; empty if the window is not stored.
    :ivar num_bytes: bytes of the samples that were written.
    :ivar is_found: whether all blocks are listed as cached.
    :ivar is_placed: whether all rows are cached and in the slot.
    """

    def __init__(
        self, keeper: Keeper, blocks: Sequence[Block], found: list[CachedBlock], room: str, room_bytes: int
    ) -> None:
        self.room = room
        self.room_bytes = room_bytes
        self._keeper = keeper
        self._blocks = blocks
        self._found = {item.block: item for item in found}
        self._num_spills = 0
        self._num_answered = 0
        self.num_bytes = 0
        self.is_found = len(found) == len(blocks)
        self.is_placed = False
        self._spilled: list[_Spilled] = []
        self._columns: set[str] = set()
        self._reasons: set[str] = set()
        self._notes: set[str] = set()
        self._arranged: Arranged | None = None
        self._is_cached = self._is_kept = np.empty(0, np.bool_)
        self._records = np.empty(0, np.int64)
        self._num_tokens = self._num_bytes = np.empty(0, np.int32)

    # Called by the window.

    def scan(self, scan: Scan, first: int) -> Scan:
        """The scan of the blocks from number ``first`` on, with the list of those that are cached."""
        found = map(self._found.get, range(first, first + len(scan.blocks)))
        cached = [CachedBlock(item.block - first, item.segment, item.entry, item.is_sure) for item in found if item]
        return msgspec.structs.replace(scan, cached=cached, with_sums=bool(self.room))

    def scanned(self, first: int, reply: Scanned) -> None:
        """The blocks from number ``first`` on are read."""
        for refusal in reply.refused:
            number = first + refusal.block
            self._keeper.refused(self._blocks[number], self._found.pop(number), refusal)

    def arranged(self, arranged: Arranged) -> None:
        """Take the window's rows."""
        starts = arranged.starts[arranged.order]
        self._is_cached, self._records = is_cached(starts), record_of(starts.astype(np.int64))
        if self._found:
            order = arranged.order
            self._num_tokens, self._num_bytes = arranged.num_tokens[order], arranged.num_bytes[order]
        self.is_placed = self._keeper.reads_in_place and len(starts) > 0 and bool(self._is_cached.all())
        if self.room:
            self._arranged = arranged
            self._is_kept = np.zeros(len(arranged.order), np.bool_)

    def placed(self, slot: int, first: int, stop: int) -> Placed | None:
        """The rows ``[first, stop)``, if all of them are cached and in the slot."""
        if not (self._keeper.reads_in_place and self._is_cached[first:stop].all()):
            return None

        sizes = self._num_tokens[first:stop], self._num_bytes[first:stop]
        return self._keeper.placed(slot, self._records[first:stop], *sizes)

    def request(self, request: Tokenize, first: int) -> Tokenize:
        """The request for rows from ``first`` on, with the number of cached ones, and the file for the others."""
        stop = first + len(request.starts) // 4
        num_cached = int(np.count_nonzero(self._is_cached[first:stop]))
        spill = ""
        if self.room and num_cached < stop - first:
            spill = f"{self.room}/{self._num_spills}"
            self._num_spills += 1
        return msgspec.structs.replace(request, num_cached=num_cached, spill=spill)

    def answered(self, first: int, num_rows: int, reply: Tokenized) -> None:
        """Take the reply for rows from ``first`` on: of a worker, or made here for a row that no worker tokenizes."""
        rows = slice(first, first + num_rows)
        num_cached = int(np.count_nonzero(self._is_cached[rows]))
        if num_cached:
            self._keeper.read(num_cached)
        if not self.room:
            return

        self._num_answered += num_rows
        if reply.spill_fault:
            self._keeper.fail(reply.spill_fault)
        elif reply.spill:
            self._keep(_Spilled(reply.spill, rows.start, rows.stop), reply)
        if self.room and self._num_answered == len(self._is_kept):
            self._keeper.complete(self)

    def _keep(self, spilled: _Spilled, reply: Tokenized) -> None:
        self._spilled.append(spilled)
        is_kept = ~self._is_cached[spilled.first : spilled.stop]
        is_kept[[error.row for error in reply.errors]] = False
        is_kept[np.frombuffer(reply.drops.get(JOURNAL, b""), np.int32)] = False
        self._is_kept[spilled.first : spilled.stop] = is_kept
        self._columns.update(reply.columns)
        self._reasons.update(reply.drops)
        self._notes.update(reply.notes)
        self.num_bytes += len(reply.tokens) + sum(len(column.data) for column in reply.columns.values())

    def give_up(self) -> Callable[[CacheFolder], object]:
        """Do not store the window; see :class:`~asyncdata.prefetch.token_cache.writer.Storable`."""
        room, self.room = self.room, ""
        self._arranged = None
        self._spilled.clear()
        return lambda folder: folder.discard(room)

    # Called by the recorder, when all rows are answered.

    def pieces(self, catalog: Catalog) -> Iterator[tuple[Indices, StorePlan]]:
        """The pieces to store: for each, the catalog's numbers of its blocks, and where their rows are."""
        # With few windows, a window may be opened again before its blocks are stored: do not store them twice.
        cached = {item.block for item in catalog.find(self._blocks)}
        numbers = catalog.numbers_of(self._blocks)
        for chosen, plan in self.plans(cached):
            yield numbers[chosen], plan

    def plans(self, cached: Container[int]) -> Iterator[tuple[list[int], StorePlan]]:
        """The same, with the numbers of the blocks in the window.

        :param cached: the blocks of the window that are already cached.
        """
        arranged = self._arranged
        if arranged is None or len(self._notes) > MAX_NOTES:
            return

        self._spilled.sort(key=lambda spilled: spilled.first)
        ends = np.cumsum([spilled.stop - spilled.first for spilled in self._spilled]).astype(np.int32)
        places = self._places(arranged, ends)
        blocks = [number for number in self._storable(arranged) if number not in cached]
        size = self._blocks_per_piece(len(blocks))
        for start in range(0, len(blocks), size):
            chosen = blocks[start : start + size]
            yield chosen, self._piece(arranged, chosen, places, ends)

    def _blocks_per_piece(self, num_blocks: int) -> int:
        num_pieces = max(1, self.num_bytes // _PIECE_BYTES)
        return max(_MIN_BLOCKS_PER_PIECE, -(-num_blocks // num_pieces))

    def _places(self, arranged: Arranged, ends: Int32) -> Int32:
        """For each row, in the order of the blocks, its number among all rows written; any value for other rows."""
        places = np.zeros(len(arranged.order), np.int32)
        for spilled, end in zip(self._spilled, ends.tolist(), strict=True):
            places[arranged.order[spilled.first : spilled.stop]] = np.arange(
                end - (spilled.stop - spilled.first), end, dtype=np.int32
            )
        return places

    def _storable(self, arranged: Arranged) -> list[int]:
        """The blocks that were not cached, and whose rows were all tokenized without a bad row."""
        is_bad = np.ones(len(arranged.order) + 1, np.int64)
        is_bad[1 + arranged.order] = ~self._is_kept
        is_bad[0] = 0
        num_bad = np.cumsum(is_bad)[np.concatenate(([0], arranged.ends))]
        are_whole = np.diff(num_bad) == 0
        return [number for number in np.flatnonzero(are_whole).tolist() if number not in self._found]

    def _piece(self, arranged: Arranged, chosen: list[int], places: Int32, ends: Int32) -> StorePlan:
        counts = np.diff(arranged.ends, prepend=0)
        rows = _ranges(arranged.ends[chosen] - counts[chosen], counts[chosen])
        blocks = [self._blocks[number] for number in chosen]
        sums = arranged.sums if len(arranged.sums) else np.full(len(counts), NO_SUM, np.uint64)
        return StorePlan(
            columns=sorted(self._columns),
            reasons=sorted(self._reasons),
            notes=sorted(self._notes),
            file_ids=np.array([block.file_id for block in blocks], np.int32).tobytes(),
            starts=np.array([block.start for block in blocks], np.int64).tobytes(),
            stops=np.array([block.stop for block in blocks], np.int64).tobytes(),
            counts=counts[chosen].astype(np.int32).tobytes(),
            blanks=arranged.blanks[chosen].tobytes(),
            sums=sums[chosen].tobytes(),
            places=places[rows].tobytes(),
            offsets=arranged.offsets[rows].tobytes(),
            lengths=arranged.lengths[rows].tobytes(),
            spills=[spilled.name for spilled in self._spilled],
            ends=ends.tobytes(),
        )


def _ranges(firsts: Any, counts: Any) -> Any:
    """``range(first, first + count)`` of each, end to end."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(firsts - ends + counts, counts)
