"""The catalog: which blocks of a source are in the token cache, and where; in 13 bytes per block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from asyncdata.core.cache_messages import CachedBlock, CachedRows
from asyncdata.delivery.chunk import row_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncdata.core.cache_messages import SegmentListing
    from asyncdata.core.messages import Block

__all__ = ("Catalog", "Numbered", "RowCatalog")

_PLACE = np.dtype([("segment", np.int32), ("entry", np.int64), ("is_sure", np.bool_)])
_BLOCK = np.dtype([("first", np.uint64), ("stop", np.uint64), ("segment", np.int32), ("entry", np.int64)])
_NOWHERE = -1
Indices = np.ndarray[Any, np.dtype[np.int64]]


class Numbered(Protocol):
    """A source whose blocks have numbers."""

    @property
    def num_blocks(self) -> int: ...

    def numbers(self, file_ids: Indices, starts: Indices) -> Indices:
        """The numbers of the blocks that begin at these places, -1 if none does."""
        ...


class Catalog:
    """The segments of a cache, and the source's blocks in them.

    :ivar sizes: segment -> its bytes, of those that have a block of the source.
    :ivar stops: segment -> where its first entry is that is not known here.
    """

    def __init__(self, source: Numbered) -> None:
        self.sizes: dict[str, int] = {}
        self.stops: dict[str, int] = {}
        self._source = source
        self._places = np.empty(0, _PLACE)
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}

    def take(self, listing: SegmentListing) -> None:
        """Add what a worker has listed."""
        file_ids = np.frombuffer(listing.file_ids, np.int32).astype(np.int64)
        numbers = self._source.numbers(file_ids, np.frombuffer(listing.starts, np.int64))
        entries, are_sure = np.frombuffer(listing.entries, np.int64), np.frombuffer(listing.are_sure, np.bool_)
        is_there = numbers >= 0
        self.stops[listing.name] = listing.stop
        self._add(listing.name, listing.num_bytes, numbers[is_there], entries[is_there], are_sure[is_there])

    def add(self, name: str, num_bytes: int, blocks: Sequence[Block], entries: Indices, stop: int) -> None:
        """Add blocks that a worker of this run has appended, one after the other.

        :param stop: where the next entry of the segment will be.
        """
        if len(entries) and self.stops.get(name, 0) == entries[0]:
            self.stops[name] = stop
        self._add(name, num_bytes, self._numbers_of(blocks), entries, np.ones(len(entries), np.bool_))

    def _add(self, name: str, num_bytes: int, numbers: Indices, entries: Any, are_sure: Any) -> None:
        if not len(numbers):
            return

        if not len(self._places):
            self._places = np.full(self._source.num_blocks, np.array((_NOWHERE, 0, False), _PLACE), _PLACE)
        self.sizes[name] = num_bytes
        is_better = are_sure | (self._places["segment"][numbers] == _NOWHERE)
        places = np.empty(len(numbers), _PLACE)
        places["segment"], places["entry"], places["is_sure"] = self._number_of(name), entries, are_sure
        self._places[numbers[is_better]] = places[is_better]

    def _number_of(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self._names)
            self._names.append(name)
        return self._numbers[name]

    def forget(self, names: Iterable[str]) -> None:
        """Remove segments that are gone or cannot be used."""
        for name in names:
            self.sizes.pop(name, None)
            self.stops.pop(name, None)
            number = self._numbers.pop(name, None)
            if number is not None:
                self._places["segment"][self._places["segment"] == number] = _NOWHERE

    def forget_block(self, block: Block) -> None:
        """Remove a block that cannot be read from its segment."""
        if len(self._places):
            self._places["segment"][self._numbers_of([block])] = _NOWHERE

    def find(self, blocks: Sequence[Block]) -> list[CachedBlock]:
        """The blocks that are cached, by their index in ``blocks``."""
        if not len(self._places):
            return []

        places = self._places[self._numbers_of(blocks)]
        found = np.flatnonzero(places["segment"] != _NOWHERE)
        rows = zip(found.tolist(), *(places[name][found].tolist() for name in _PLACE.names or ()), strict=True)
        return [CachedBlock(block, self._names[number], entry, is_sure) for block, number, entry, is_sure in rows]

    def _numbers_of(self, blocks: Sequence[Block]) -> Indices:
        places = np.array([(block.file_id, block.start) for block in blocks], np.int64).reshape(-1, 2)
        return self._source.numbers(places[:, 0], places[:, 1])


class RowCatalog(Catalog):
    """The same for rows that are asked for one by one: blocks of any size, by the places of their rows in files."""

    def __init__(self, source: Numbered) -> None:
        super().__init__(source)
        self._blocks = np.empty(0, _BLOCK)

    def take(self, listing: SegmentListing) -> None:
        """Add what a worker has listed: blocks of files that are known to be the same."""
        file_ids, starts = np.frombuffer(listing.file_ids, np.int32), np.frombuffer(listing.starts, np.int64)
        more = np.empty(len(starts), _BLOCK)
        more["first"] = row_ids(file_ids, starts)
        more["stop"] = row_ids(file_ids, np.frombuffer(listing.stops, np.int64))
        more["segment"], more["entry"] = self._number_of(listing.name), np.frombuffer(listing.entries, np.int64)
        blocks = np.concatenate([self._blocks, more[np.frombuffer(listing.are_sure, np.bool_)]])
        self._blocks = blocks[np.argsort(blocks["first"], kind="stable")]
        self.stops[listing.name] = listing.stop
        if len(more):
            self.sizes[listing.name] = listing.num_bytes

    def forget(self, names: Iterable[str]) -> None:
        """Remove segments that are gone or cannot be used."""
        for name in names:
            self.sizes.pop(name, None)
            self.stops.pop(name, None)
            self._blocks = self._blocks[self._blocks["segment"] != self._numbers.pop(name, _NOWHERE)]

    def find_rows(self, file_ids: Indices, offsets: Indices) -> CachedRows | None:
        """Where the rows are that begin at these places of files; None if none is cached."""
        if not len(self._blocks):
            return None

        ids = row_ids(file_ids, offsets)
        blocks = self._blocks[np.maximum(np.searchsorted(self._blocks["first"], ids, side="right") - 1, 0)]
        is_found = (blocks["first"] <= ids) & (ids < blocks["stop"])
        if not is_found.any():
            return None

        used, owners = np.unique(blocks["segment"], return_inverse=True)
        return CachedRows(
            [self._names[number] for number in used.tolist()],
            np.where(is_found, owners, _NOWHERE).astype(np.int32).tobytes(),
            blocks["entry"].tobytes(),
            np.where(is_found, ids - blocks["first"], 0).astype(np.int32).tobytes(),
        )
