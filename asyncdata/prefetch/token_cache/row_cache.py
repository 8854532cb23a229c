"""The token cache of single rows, for orders of rows and streams: each row is found and read by itself.

Workers write their replies to files. From many of them, in any order, a worker makes a segment of rows. A row is known
again by its file's content and its number in the file. Of an order of rows, the row index has that number: so nothing
is read or written before the index is complete.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from asyncdata.core.cache_messages import CachedPlaces, RowsPlan
from asyncdata.core.callbacks import no_op
from asyncdata.core.log import get_logger
from asyncdata.core.row_codes import is_elsewhere
from asyncdata.prefetch.token_cache.cache import NAMES_PER_REQUEST, TokenCache
from asyncdata.prefetch.token_cache.window_tokens import JOURNAL, MAX_NOTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncdata.core.cache_messages import RowsRefused
    from asyncdata.core.messages import Reply, Tokenized
    from asyncdata.prefetch.row_index.row_index import RowIndex
    from asyncdata.prefetch.token_cache.catalog import Catalog, Indices
    from asyncdata.prefetch.token_cache.folder import CacheFolder
    from asyncdata.workers.base import Crashed, Executor

__all__ = ("IndexNumbers", "RowCache", "RowNumbers", "StreamNumbers")

_log = get_logger(__name__)
_MAX_ROWS, _MAX_BYTES = 1 << 16, 128 << 20
"""Of a segment of rows, about."""

_PAGE_ROWS = 1 << 14

Bools = np.ndarray[Any, np.dtype[np.bool_]]


class RowNumbers(Protocol):
    """Numbers all rows of the data: a row is known again by its file and its number in the file."""

    @property
    def is_complete(self) -> bool:
        """Whether rows can be numbered now."""
        ...

    def numbers(self, file_ids: Indices, starts: Indices) -> Indices:
        """The numbers of the rows with these numbers in these files, -1 if there is none."""
        ...

    def places(self, rows: Indices) -> tuple[Indices, Indices]:
        """The file of each row, and the row's number there."""
        ...


class IndexNumbers:
    """The numbers that the row index gives; they are known when it is complete."""

    def __init__(self, index: RowIndex, num_files: int) -> None:
        self._index = index
        self._num_files = num_files

    @property
    def is_complete(self) -> bool:
        """As the protocol says."""
        return self._index.is_complete

    @cached_property
    def _bounds(self) -> Indices:
        return self._index.file_bounds(self._num_files)

    def numbers(self, file_ids: Indices, starts: Indices) -> Indices:
        """As the protocol says."""
        found = self._bounds[file_ids] + starts
        return np.where(found < self._bounds[file_ids + 1], found, -1)

    def places(self, rows: Indices) -> tuple[Indices, Indices]:
        """As the protocol says."""
        file_ids = np.searchsorted(self._bounds, rows, side="right") - 1
        return file_ids, rows - self._bounds[file_ids]


class StreamNumbers:
    """Numbers for the rows of a stream, whose files may have any number of rows: in pages, in the order of need."""

    is_complete = True

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}
        self._pages: list[tuple[int, int]] = []

    def numbers(self, file_ids: Indices, starts: Indices) -> Indices:
        """As the protocol says."""
        first = np.zeros(len(starts), np.int64)
        pages, places = np.unique(np.stack([file_ids, starts // _PAGE_ROWS]), axis=1, return_inverse=True)
        for number, (file_id, page) in enumerate(pages.T.tolist()):
            first[places.reshape(-1) == number] = self._page(file_id, page) * _PAGE_ROWS
        return first + starts % _PAGE_ROWS

    def _page(self, file_id: int, page: int) -> int:
        if (file_id, page) not in self._numbers:
            self._numbers[file_id, page] = len(self._pages)
            self._pages.append((file_id, page))
        return self._numbers[file_id, page]

    def places(self, rows: Indices) -> tuple[Indices, Indices]:
        """As the protocol says."""
        file_ids, pages = np.array(self._pages, np.int64).T[:, rows // _PAGE_ROWS]
        return file_ids, pages * _PAGE_ROWS + rows % _PAGE_ROWS


class _Spilled(NamedTuple):
    """A reply that a worker wrote to a file: for these rows of the index, of which some are to be stored."""

    name: str
    rows: Indices
    are_kept: Bools


class _Batch:
    """Rows that become a segment; see :class:`~asyncdata.prefetch.token_cache.writer.Storable`."""

    def __init__(self, room: str, places: Callable[[Indices], tuple[Indices, Indices]]) -> None:
        self.room = room
        self.num_rows = self.num_bytes = 0
        self._places = places
        self._spilled: list[_Spilled] = []
        self._names: tuple[set[str], set[str], set[str]] = (set(), set(), set())

    def add(self, spilled: _Spilled, reply: Tokenized) -> None:
        """Add the rows of a reply."""
        self._spilled.append(spilled)
        self.num_rows += len(spilled.rows)
        self.num_bytes += len(reply.tokens) + sum(len(column.data) for column in reply.columns.values())
        columns, reasons, notes = self._names
        columns.update(reply.columns)
        reasons.update(reply.drops)
        notes.update(reply.notes)

    def pieces(self, catalog: Catalog) -> Iterator[tuple[Indices, RowsPlan]]:
        """As the protocol says: one piece, without rows that are cached meanwhile."""
        rows = np.concatenate([spilled.rows for spilled in self._spilled])
        are_kept = np.concatenate([spilled.are_kept for spilled in self._spilled])
        are_kept[catalog.find_numbers(rows).places] = False
        columns, reasons, notes = map(sorted, self._names)
        if not are_kept.any() or len(notes) > MAX_NOTES:
            return

        file_ids, numbers = self._places(rows)
        yield (
            rows[are_kept],
            RowsPlan(
                columns=columns,
                reasons=reasons,
                notes=notes,
                spills=[spilled.name for spilled in self._spilled],
                ends=np.cumsum([len(spilled.rows) for spilled in self._spilled]).astype(np.int32).tobytes(),
                file_ids=file_ids.astype(np.int32).tobytes(),
                numbers=numbers.tobytes(),
                are_kept=are_kept.tobytes(),
            ),
        )

    def give_up(self) -> Callable[[CacheFolder], object]:
        """As the protocol says. The folder is that of the run, for all of its batches."""
        names, self.room = [spilled.name for spilled in self._spilled], ""
        self._spilled = []
        return lambda folder: folder.discard_files(names)


class RowCache(TokenCache):
    """The token cache of one loader, for an order of rows; see :class:`~asyncdata.prefetch.windows.base.CachedRows`.

    :param max_bytes: limit for all caches in the parent folder; None: no limit.
    :ivar on_listed: called when :meth:`is_ready` may have changed.
    """

    def __init__(self, numbers: RowNumbers, folder: CacheFolder, executor: Executor, max_bytes: int | None) -> None:
        self.on_listed: Callable[[], object] = no_op
        self._numbers = numbers
        self._is_begun = False
        self._room = ""
        self._num_spills = 0
        self._batch: _Batch | None = None
        super().__init__(numbers, 0, folder, executor, max_bytes, room_bytes=0)

    def is_ready(self, epoch: int, number: int) -> bool:
        """As the protocol says. A window waits until all segments are listed: each may have any row."""
        if not self._numbers.is_complete:
            return True

        if not self._is_begun:
            self._is_begun = True
            self._look(num=NAMES_PER_REQUEST)
        return super().is_ready(epoch, number) and not self._is_listing

    def _look(self, *, num: int) -> None:
        if self._is_begun:
            super()._look(num=num)

    def _on_names(self, reply: Reply | Crashed) -> None:
        super()._on_names(reply)
        self.on_listed()

    def _on_listed(self, reply: Reply | Crashed) -> None:
        super()._on_listed(reply)
        self.on_listed()

    def numbers(self, file_ids: Indices, starts: Indices) -> Indices:
        """As the protocol says."""
        return self._numbers.numbers(file_ids, starts)

    def find(self, rows: Indices) -> CachedPlaces | None:
        """Where those of the rows are that are cached; None if none is."""
        found = self._catalog.find_numbers(rows)
        if not len(found.places):
            return None

        columns = (found.places.astype(np.int32), found.owners, found.entries, found.are_sure)
        return CachedPlaces(found.names, *(column.tobytes() for column in columns))

    def spill(self) -> str:
        """A name for the file of the next reply; empty if it is not to be stored."""
        if not (self._is_begun and self._recorder.is_on):
            return ""

        self._room = self._room or self._recorder.room()
        self._num_spills += 1
        return f"{self._room}/{self._num_spills}" if self._room else ""

    def answered(self, rows: Indices, are_cached: Bools, reply: Tokenized) -> None:
        """Take the reply for ``rows``, of which some were cached when they were requested."""
        is_good = np.ones(len(rows), np.bool_)
        is_good[[error.row for error in reply.errors]] = False
        is_good[np.frombuffer(reply.drops.get(JOURNAL, b""), np.int32)] = False
        if reply.expected:
            is_good &= ~is_elsewhere(np.frombuffer(reply.expected, np.int32))
        self.read(int(np.count_nonzero(are_cached & is_good)))
        if reply.spill_fault:
            self.fail(reply.spill_fault)
        elif reply.spill and self._recorder.is_on:
            self._batch = batch = self._batch or _Batch(self._room, self._numbers.places)
            batch.add(_Spilled(reply.spill, rows, is_good & ~are_cached), reply)
            if batch.num_rows >= _MAX_ROWS or batch.num_bytes >= _MAX_BYTES:
                self.flush()

    def refused_rows(self, rows: Indices, refusal: RowsRefused) -> None:
        """Cached rows could not be used; they are tokenized.

        :param rows: those of the request.
        """
        if refusal.kind == "other_text":
            self._catalog.forget_numbers(rows[np.frombuffer(refusal.rows, np.int32)])
            return

        self._refuse([refusal.segment])
        if refusal.kind == "damaged":
            self._recorder.remove(refusal.segment)
            path = f"{self._folder.path}/{refusal.segment}"
            _log.warning("token_cache.refused", path=path, offset=0, reason=refusal.reason)

    def flush(self) -> None:
        """Store the rows that were answered so far."""
        batch, self._batch = self._batch, None
        if batch is not None:
            self._recorder.complete(batch)

    async def finish(self) -> None:
        """Wait until all answered rows are stored."""
        self.flush()
        await super().finish()
