"""The catalog: which blocks of a source are in the token cache, in four bytes per block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from asyncdata.core.cache_messages import CachedBlock

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncdata.core.cache_messages import SegmentListing
    from asyncdata.core.messages import Block

__all__ = ("Catalog", "Found", "Numbered", "numbers_of")

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


def numbers_of(source: Numbered, blocks: Sequence[Block]) -> Indices:
    """The source's numbers of these blocks."""
    file_ids = np.array([block.file_id for block in blocks], np.int64)
    return source.numbers(file_ids, np.array([block.start for block in blocks], np.int64))


class Numbered(Protocol):
    """What is cached, by number: the blocks of a source, or its rows."""

    def numbers(self, file_ids: Indices, starts: Indices) -> Indices:
        """The numbers of what begins at these places, -1 if nothing does."""
        ...


class Found(NamedTuple):
    """What is cached of a list. Arrays have the shape (num_found,).

    :ivar places: its numbers in the list, int64.
    :ivar names: names of segments.
    :ivar owners: for each, the number of its segment in ``names``; int32.
    :ivar entries: its number in that segment, int32.
    :ivar are_sure: whether its file is known to be unchanged.
    """

    places: Indices
    names: list[str]
    owners: np.ndarray[Any, np.dtype[np.int32]]
    entries: np.ndarray[Any, np.dtype[np.int32]]
    are_sure: np.ndarray[Any, np.dtype[np.bool_]]


_NOTHING = Found(np.empty(0, np.int64), [], np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.bool_))


class Catalog:
    """The segments of a cache, and the source's blocks, or rows, in them.

    :param num_blocks: the number of blocks, or rows, of the source, as far as it is known.
    """

    def __init__(self, source: Numbered, num_blocks: int) -> None:
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

        if len(numbers):
            self._grow(int(numbers.max()) + 1)
            is_better = are_sure | (self._places[numbers] == _NOWHERE)
            self._places[numbers[is_better]] = np.arange(self._end, self._end + len(numbers))[is_better]
        self._segments[name] = _Known(self._end, num_bytes, entries, are_sure)
        self._names.append(name)
        self._firsts.append(self._end)
        self._end += len(numbers)

    def _grow(self, size: int) -> None:
        """Make room for numbers below ``size``."""
        if size > len(self._places):
            size = max(size, self._num_blocks, len(self._places) * 3 // 2)
            added = np.full(size - len(self._places), _NOWHERE, np.int32)
            self._places = np.concatenate([self._places, added])

    def forget(self, names: Iterable[str]) -> None:
        """Remove segments that are gone or cannot be used."""
        for name in names:
            known = self._segments.pop(name, None)
            if known is not None and len(known.entries):
                stop = known.first + len(known.entries)
                self._places[(self._places >= known.first) & (self._places < stop)] = _NOWHERE

    def forget_block(self, block: Block) -> None:
        """Remove a block that cannot be read from its segment."""
        self.forget_numbers(numbers_of(self._source, [block]))

    def forget_numbers(self, numbers: Indices) -> None:
        """Remove the blocks, or rows, of these numbers."""
        self._places[numbers[self._are_known(numbers)]] = _NOWHERE

    def _are_known(self, numbers: Indices) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether there are places of these numbers."""
        return (numbers >= 0) & (numbers < len(self._places))

    def find(self, blocks: Sequence[Block]) -> list[CachedBlock]:
        """The blocks that are cached, by their index in ``blocks``."""
        if not len(self._places):
            return []

        found = self.find_numbers(numbers_of(self._source, blocks))
        names = map(found.names.__getitem__, found.owners.tolist())
        return list(map(CachedBlock, found.places.tolist(), names, found.entries.tolist(), found.are_sure.tolist()))

    def numbers_of(self, blocks: Sequence[Block]) -> Indices:
        """The numbers of these blocks."""
        return numbers_of(self._source, blocks)

    def find_numbers(self, numbers: Indices) -> Found:
        """What is cached of that with these numbers."""
        if not len(self._places):
            return _NOTHING

        are_known = self._are_known(numbers)
        places = np.where(are_known, self._places[np.where(are_known, numbers, 0)], _NOWHERE)
        found = np.flatnonzero(places >= 0)
        places = places[found]
        owners = np.searchsorted(self._firsts, places, side="right") - 1
        entries, are_sure = np.empty(len(found), np.int32), np.empty(len(found), np.bool_)
        for owner in np.unique(owners).tolist():
            known, of_it = self._segments[self._names[owner]], owners == owner
            inside = places[of_it] - known.first
            entries[of_it], are_sure[of_it] = known.entries[inside], known.are_sure[inside]
        used, owners = np.unique(owners, return_inverse=True)
        names = [self._names[owner] for owner in used.tolist()]
        return Found(found, names, owners.astype(np.int32), entries, are_sure)
