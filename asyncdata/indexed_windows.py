"""Windows of rows that are ordered one by one: workers read each row from its place, so nothing is scanned."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncdata.executors.base import Crashed, error_of
from asyncdata.order import ROWS_PER_WINDOW
from asyncdata.windows import AnywhereWindows
from asyncdata.wire import NO_SLOT, Overflow, Permute, Permuted, Tokenize

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from asyncdata.errors import AsyncDataError
    from asyncdata.executors.base import Executor
    from asyncdata.indexing import Indexer
    from asyncdata.order import RowOrder
    from asyncdata.row_index import Places, RowIndex
    from asyncdata.sources.base import Blocks
    from asyncdata.types import SourceLocation
    from asyncdata.wire import Reply

__all__ = ("IndexedWindow", "IndexedWindows")

_MAX_TRIES = 5


class IndexedWindow:
    """Rows by their places, as :class:`~asyncdata.window.OpenWindow` wants them."""

    slot = NO_SLOT

    def __init__(self, source: Blocks, index: RowIndex) -> None:
        self.is_last = False
        self.num_rows = 0
        self.fault: AsyncDataError | None = None
        self._source = source
        self._index = index
        self._places: Places | None = None

    def fill(self, places: Places, *, is_last: bool) -> None:
        """The rows are known."""
        self._places, self.num_rows, self.is_last = places, len(places.lengths), is_last

    @property
    def is_ready(self) -> bool:
        """Whether its rows are known."""
        return self._places is not None

    @property
    def _known(self) -> Places:
        if self._places is None:
            raise RuntimeError("the window is not ready")

        return self._places

    def request(self, first: int, stop: int) -> Tokenize:
        """What a worker needs to tokenize the rows ``[first, stop)``."""
        file_ids, offsets, lengths, _ = (column[first:stop] for column in self._known)
        starts = np.full(stop - first, -1, np.int32)
        rows = np.flatnonzero(lengths >= 0)
        places = map(Overflow, rows.tolist(), file_ids[rows].tolist(), offsets[rows].tolist())
        return Tokenize(NO_SLOT, starts.tobytes(), lengths.tobytes(), list(places))

    def key(self, row: int) -> tuple[int, int]:
        """The number of the row's file, and its offset there."""
        file_ids, offsets = self._index.origins(self._known.rows[row : row + 1])
        return int(file_ids[0]), int(offsets[0])

    def location(self, row: int) -> SourceLocation:
        """The row's place."""
        return self._source.location(*self.key(row), int(self._known.lengths[row]))

    def find(self, keys: Set[tuple[int, int]]) -> list[int]:
        """The rows of the window that ``keys`` name, rising."""
        if not keys:
            return []

        file_ids, offsets = self._index.origins(self._known.rows)
        return sorted({int(row) for key in keys for row in np.flatnonzero((file_ids == key[0]) & (offsets == key[1]))})


class IndexedWindows(AnywhereWindows):
    """Windows over the row index, as :class:`~asyncdata.windows.Windows` wants them."""

    num_blank = 0

    def __init__(self, source: Blocks, order: RowOrder, executor: Executor, index: RowIndex, indexer: Indexer) -> None:
        self._source = source
        self._order = order
        self._executor = executor
        self._index = index
        self._indexer = indexer
        self._waiting: dict[tuple[int, int], tuple[IndexedWindow, Callable[[], object]]] = {}
        self._permutations: dict[int, Any] = {}
        indexer.on_growth = self._fill_waiting

    def restart(self) -> None:
        """As the protocol says; permutations that were asked for are not coming any more."""
        self._waiting.clear()
        self._permutations = {epoch: rows for epoch, rows in self._permutations.items() if rows is not None}
        if not self._index.is_complete:
            self._indexer.restart()

    def open(self, epoch: int, number: int, on_ready: Callable[[], object]) -> IndexedWindow:
        """As the protocol says; there is always room."""
        if number == 0 and epoch > 0:
            self._source.check_unchanged()
        window = IndexedWindow(self._source, self._index)
        if not self._fill(window, epoch, number):
            self._waiting[epoch, number] = window, on_ready
        return window

    def _fill_waiting(self) -> None:
        for place, (window, on_ready) in list(self._waiting.items()):
            if self._fill(window, *place):
                self._waiting.pop(place, None)
                on_ready()

    def _fill(self, window: IndexedWindow, epoch: int, number: int) -> bool:
        """Whether the window is ready now, or will never be."""
        window.fault = self._index.fault
        if window.fault is not None:
            return True

        num_wanted = (number + 1) * ROWS_PER_WINDOW
        if not self._index.is_complete and not (
            self._order.shuffle.grows and self._index.num_found >= num_wanted and self._index.num_rows > num_wanted
        ):
            return False

        rows = self._rows(epoch, number)
        if rows is None:
            return False

        is_last = self._index.is_complete and num_wanted >= self._index.num_rows
        window.fill(self._index.places(rows), is_last=is_last)
        return True

    def _rows(self, epoch: int, number: int) -> Any:
        """The window's rows, numbered as the index does; None if they are not known yet."""
        if self._order.shuffle.method != "slime":
            return self._order.rows(epoch, number, self._index.num_rows)

        if epoch not in self._permutations:
            self._permutations = {e: rows for e, rows in self._permutations.items() if e >= epoch - 1}
            self._permutations[epoch] = None
            self._permute(epoch, _MAX_TRIES)
        permutation = self._permutations[epoch]
        if permutation is None:
            return None

        return permutation[number * ROWS_PER_WINDOW : (number + 1) * ROWS_PER_WINDOW].astype(np.int64)

    def _permute(self, epoch: int, num_tries: int) -> None:
        request = Permute(self._index.num_rows, self._order.seed + epoch)
        self._executor.submit(request, partial(self._on_permuted, epoch, num_tries))

    def _on_permuted(self, epoch: int, num_tries: int, reply: Reply | Crashed) -> None:
        if isinstance(reply, Permuted):
            self._permutations[epoch] = np.frombuffer(reply.rows, np.uint32)
        elif isinstance(reply, Crashed) and num_tries > 1:
            self._permute(epoch, num_tries - 1)
        else:
            self._index.fail(error_of(reply))
        self._fill_waiting()
