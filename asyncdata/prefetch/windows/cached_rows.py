"""The token cache of one window of single rows: which rows of a request are cached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.row_codes import cached_start

if TYPE_CHECKING:
    from asyncdata.core.cache_messages import CachedPlaces, RowsRefused
    from asyncdata.core.messages import Tokenized
    from asyncdata.prefetch.windows.base import CachedRows

__all__ = ("Choice", "RowsOfWindow")

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Int32 = np.ndarray[Any, np.dtype[np.int32]]
Int64 = np.ndarray[Any, np.dtype[np.int64]]


class Choice(NamedTuple):
    """Which rows of a request are cached.

    :ivar starts: as in a request, with the code of cached rows.
    :ivar are_cached: bool of shape (num_rows,).
    :ivar are_read: whether the text of a row is needed: it is tokenized, or compared; bool of shape (num_rows,).
    :ivar spill: the file that the reply is to be written to; empty if it is not.
    """

    starts: Int32
    are_cached: Bools
    are_read: Bools
    cached: CachedPlaces | None
    spill: str

    @property
    def num_cached(self) -> int:
        """How many are cached."""
        return int(np.count_nonzero(self.are_cached))


class RowsOfWindow:
    """The rows of a window.

    :param rows: as ``rows``.
    :ivar rows: their numbers in the cache, in the window's order: int64 of shape (num_rows,).
    """

    def __init__(self, cache: CachedRows, rows: Int64) -> None:
        self._cache = cache
        self.rows = rows
        self._are_cached: dict[int, Bools] = {}
        self._num_answered = 0

    def choose(self, first: int, starts: Int32, is_read: Bools) -> Choice:
        """Which of the rows from ``first`` on are cached, among those that are read.

        :param starts: as in the request.
        """
        wanted = np.flatnonzero(is_read)
        cached = self._cache.find(self.rows[first : first + len(starts)][is_read])
        starts, are_cached, are_read = starts.copy(), np.zeros(len(starts), np.bool_), is_read.copy()
        if cached is not None:
            chosen = wanted[np.frombuffer(cached.rows, np.int32)]
            texts, rows = starts[chosen].tobytes(), chosen.astype(np.int32).tobytes()
            cached = msgspec.structs.replace(cached, rows=rows, texts=texts)
            are_cached[chosen], starts[chosen] = True, cached_start(0)
            are_read[chosen] = ~np.frombuffer(cached.are_sure, np.bool_)
        self._are_cached[first] = are_cached
        spill = self._cache.spill() if (is_read & ~are_cached).any() else ""
        return Choice(starts, are_cached, are_read, cached, spill)

    def answered(self, first: int, num_rows: int, reply: Tokenized, *, is_last: bool) -> None:
        """Take the reply for rows from ``first`` on.

        :param is_last: whether this is the epoch's last window.
        """
        if not num_rows:
            return

        self._cache.answered(self.rows[first : first + num_rows], self._are_cached.pop(first), reply)
        self._num_answered += num_rows
        if is_last and self._num_answered == len(self.rows):
            self._cache.flush()

    def refused(self, first: int, num_rows: int, refusal: RowsRefused) -> None:
        """Cached rows from ``first`` on could not be used."""
        self._cache.refused_rows(self.rows[first : first + num_rows], refusal)
