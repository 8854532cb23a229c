"""The catalog: which blocks of a source are in the token cache, in four bytes per block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncdata.core.cache_messages import CachedBlock

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncdata.core.cache_messages import SegmentListing
    from asyncdata.core.messages import Block
    from asyncdata.sources.base import NumberedBlocks

__all__ = ("Catalog", "numbers_of")

_NOWHERE = -1
Indices = np.ndarray[Any, np.dtype[np.int64]]


class _Known(NamedTuple):
    """A segment that has been listed.

    :ivar first: the catalog's number of the first of ``entries``.
    :ivar entries: the blocks of the source, by their number in the segment.
    :ivar are_sure: for each entry, whether its file is known to be unchanged.
    """

    first: int
    num_bytes: int
    entries: np.ndarray[Any, np.dtype[np.int32]]
    are_sure: np.ndarray[Any, np.dtype[np.bool_]]


def numbers_of(source: NumberedBlocks, blocks: Sequence[Block]) -> Indices:
    """The source's numbers of these blocks."""
    file_ids = np.array([block.file_id for block in blocks], np.int64)
    return source.numbers(file_ids, np.array([block.start for block in blocks], np.int64))


class Catalog:
    """The segments of a cache, and the source's blocks in them.

    :param num_blocks: the number of blocks of the source.
    """

    def __init__(self, source: NumberedBlocks, num_blocks: int) -> None:
        self._source = source
        self._num_blocks = num_blocks
        self._places = np.empty(0, np.int32)
        self._segments: dict[str, _Known] = {}
        self._names: list[str] = []
        self._firsts: list[int] = []
        self._end = 0

    @property
    def names(self) -> list[str]:
        """The names of the segments that are listed."""
        return list(self._segments)

    @property
    def num_bytes(self) -> int:
        """Bytes of the segments that have a block of the source."""
        return sum(known.num_bytes for known in self._segments.values() if len(known.entries))

    @property
    def num_blocks_cached(self) -> int:
        """Number of blocks of the source that are cached."""
        return int(np.count_nonzero(self._places >= 0))

    @property
    def used(self) -> list[str]:
        """The segments that have a block of the source."""
        return [name for name, known in self._segments.items() if len(known.entries)]

    def take(self, listing: SegmentListing) -> None:
        """Add a segment that a worker has listed."""
        file_ids = np.frombuffer(listing.file_ids, np.int32).astype(np.int64)
        numbers = self._source.numbers(file_ids, np.frombuffer(listing.starts, np.int64))
        is_there = numbers >= 0
        entries = np.frombuffer(listing.entries, np.int32)[is_there]
        are_sure = np.frombuffer(listing.are_sure, np.bool_)[is_there]
        self._add(listing.name, listing.num_bytes, numbers[is_there], entries, are_sure)

    def add(self, name: str, num_bytes: int, numbers: Indices) -> None:
        """Add a segment that this process has written, with the blocks of these numbers."""
        entries = np.arange(len(numbers), dtype=np.int32)
        self._add(name, num_bytes, numbers, entries, np.ones(len(numbers), np.bool_))

    def _add(self, name: str, num_bytes: int, numbers: Indices, entries: Any, are_sure: Any) -> None:
        if name in self._segments:
            return

        if len(numbers) and not len(self._places):
            self._places = np.full(self._num_blocks, _NOWHERE, np.int32)
        if len(numbers):
            is_better = are_sure | (self._places[numbers] == _NOWHERE)
            self._places[numbers[is_better]] = np.arange(self._end, self._end + len(numbers))[is_better]
        self._segments[name] = _Known(self._end, num_bytes, entries, are_sure)
        self._names.append(name)
        self._firsts.append(self._end)
        self._end += len(numbers)

    def forget(self, names: Iterable[str]) -> None:
        """Remove segments that are gone or cannot be used."""
        for name in names:
            known = self._segments.pop(name, None)
            if known is not None and len(known.entries):
                stop = known.first + len(known.entries)
                self._places[(self._places >= known.first) & (self._places < stop)] = _NOWHERE

    def forget_block(self, block: Block) -> None:
        """Remove a block that cannot be read from its segment."""
        number = int(numbers_of(self._source, [block])[0])
        if len(self._places) and number >= 0:
            self._places[number] = _NOWHERE

    def find(self, blocks: Sequence[Block]) -> list[CachedBlock]:
        """The blocks that are cached, by their index in ``blocks``."""
        if not len(self._places):
            return []

        numbers = numbers_of(self._source, blocks)
        places = np.where(numbers >= 0, self._places[numbers], _NOWHERE)
        found = np.flatnonzero(places >= 0)
        places = places[found]
        owners = np.searchsorted(self._firsts, places, side="right") - 1
        entries, are_sure = np.empty(len(found), np.int32), np.empty(len(found), np.bool_)
        for owner in np.unique(owners).tolist():
            known, of_it = self._segments[self._names[owner]], owners == owner
            inside = places[of_it] - known.first
            entries[of_it], are_sure[of_it] = known.entries[inside], known.are_sure[inside]
        names = map(self._names.__getitem__, owners.tolist())
        return list(map(CachedBlock, found.tolist(), names, entries.tolist(), are_sure.tolist()))
