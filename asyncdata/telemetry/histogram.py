"""Histograms with the buckets of :data:`~asyncdata.telemetry.records.EDGES`."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncdata.telemetry.records import EDGES

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ("Histogram",)

_EDGES = np.array(EDGES)
_TABLE_SIZE = 1 << 16
_BUCKETS = np.repeat(np.arange(len(EDGES)), np.diff(np.minimum(_EDGES, _TABLE_SIZE), append=_TABLE_SIZE)).astype(
    np.uint8
)
"""The bucket of each small number: a table is ten times as fast as a search."""


class Histogram:
    """Counts of whole numbers from 0 on, by bucket."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(EDGES), np.int64)

    def add(self, numbers: Iterable[int]) -> None:
        """Count a few numbers."""
        for number in numbers:
            self._counts[bisect_right(EDGES, max(0, number)) - 1] += 1

    def add_many(self, numbers: np.ndarray[Any, Any]) -> None:
        """Count an array of integers from 0 on."""
        is_small = numbers < _TABLE_SIZE
        if not is_small.all():
            large = np.searchsorted(_EDGES, numbers[~is_small], side="right") - 1
            self._counts += np.bincount(large, minlength=len(EDGES))
            numbers = numbers[is_small]
        self._counts += np.bincount(_BUCKETS[numbers], minlength=len(EDGES))

    def counts(self) -> dict[int, int]:
        """The lower bound of each bucket that has numbers, and how many."""
        found = self._counts.copy()  # another thread may add to it
        return {EDGES[bucket]: int(found[bucket]) for bucket in np.flatnonzero(found).tolist()}
