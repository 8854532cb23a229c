"""The rows of the memory: 34 bytes a row in one sorted array, and the newest ones in a small one that is merged in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from asyncdata.core.errors import ConfigError
from asyncdata.delivery.outcomes.policy import OutcomeTable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncdata.delivery.outcomes.policy import Ids

__all__ = ("ENTRY", "NO_IDS", "OLD_ENTRY", "OLD_ROW", "ROW", "RowTable", "row_ids", "words_of")

Table = np.ndarray[Any, Any]


def _row(total: str) -> np.dtype[Any]:
    return np.dtype(
        [("count", "<u4"), ("total", total), ("last_total", total), ("epoch", "<u4"), ("last_count", "<u2")]
    )


def _entry(total: str) -> np.dtype[Any]:
    return np.dtype([("id", "<u8"), ("attempts", "<u8"), ("total", total), ("epoch", "<u4"), ("word", "<u2")])


ROW = _row("<f8")
"""What a row has beside its id: all scores, and those of ``epoch``, the last one that has any."""

ENTRY = _entry("<f8")
"""New scores of a row in an epoch: those of the attempts ``64 * word + i`` of which bit i is set, as their sum."""

OLD_ROW, OLD_ENTRY = _row("<f4"), _entry("<f4")
"""The same in files of before, whose sums had the precision of a float32."""

NO_IDS: Ids = np.empty(0, np.uint64)

_OFFSET_BITS = 44
_MIN_FRESH = 1024


def row_ids(file_ids: Any, offsets: Any) -> Ids:
    """The ids of rows: 20 bits of the file's number, and 44 of the offset there. uint64, of the same shape.

    :raises ConfigError: if one of them needs more bits.
    """
    files, places = np.asarray(file_ids, np.uint64), np.asarray(offsets, np.uint64)
    if files.size and (int(files.max()) >> (64 - _OFFSET_BITS) or int(places.max()) >> _OFFSET_BITS):
        raise ConfigError("AD480 the outcome memory knows files up to number 2**20, and 2**44 bytes of each")

    return (files << np.uint64(_OFFSET_BITS)) | places


class RowTable:
    """Rows by their ids. Most are in one pair of arrays, in ascending order; new ones are added to a second pair.

    :param ids: uint64, ascending. An array of its own, as numpy searches only an array without gaps quickly.
    :param rows: of :data:`ROW`, of the same shape; it is written to.
    """

    def __init__(self, ids: Ids | None = None, rows: Table | None = None) -> None:
        self._ids = np.empty(0, np.uint64) if ids is None else ids
        self._rows = np.empty(0, ROW) if rows is None else rows
        self._places: dict[int, int] = {}
        self._fresh = np.empty(_MIN_FRESH, ROW)

    def __len__(self) -> int:
        return len(self._ids) + len(self._places)

    @property
    def num_bytes(self) -> int:
        """Memory of the rows, without that of the index of the newest ones."""
        return self._ids.nbytes + self._rows.nbytes + self._fresh.nbytes

    def find(self, row_id: int) -> Any:
        """The row, which may be written to; None if it is not known."""
        place = self._places.get(row_id)
        if place is not None:
            return self._fresh[place]

        place = int(self._ids.searchsorted(np.uint64(row_id)))
        return self._rows[place] if place < len(self._ids) and int(self._ids[place]) == row_id else None

    def add(self, row_id: int) -> Any:
        """A new row, which may be written to until the next call."""
        if len(self._places) >= max(_MIN_FRESH, len(self._ids) // 16):
            self._merge()
        place = len(self._places)
        if place == len(self._fresh):
            self._fresh = np.concatenate((self._fresh, np.empty(place, ROW)))
        self._fresh[place] = (0, 0.0, 0.0, 0, 0)
        self._places[row_id] = place
        return self._fresh[place]

    def _merge(self) -> None:
        if not self._places:
            return

        ids = np.concatenate((self._ids, np.array(list(self._places), np.uint64)))
        order = np.argsort(ids, kind="stable")
        rows = np.concatenate((self._rows, self._fresh[: len(self._places)]))
        self._ids, self._rows = ids[order], rows[order]
        self._fresh, self._places = np.empty(_MIN_FRESH, ROW), {}

    def arrays(self) -> tuple[Ids, Table]:
        """All ids, ascending, and their rows, which change with the next score."""
        self._merge()
        return self._ids, self._rows

    def table(self) -> OutcomeTable:
        """The rows as policies see them."""
        ids, rows = self.arrays()
        count, last = rows["count"].astype(np.int64), rows["last_count"].astype(np.int64)
        mean, last_mean = rows["total"] / np.maximum(count, 1), rows["last_total"] / np.maximum(last, 1)
        return OutcomeTable(ids.copy(), count, mean, last_mean, rows["epoch"].astype(np.int64))


def words_of(attempts: int) -> Iterator[tuple[int, int]]:
    """The words of a bit set that are not 0, each with its number: 64 attempts a word."""
    number = 0
    while attempts:
        if word := attempts & (1 << 64) - 1:
            yield number, word
        attempts, number = attempts >> 64, number + 1
