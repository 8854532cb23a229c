"""Windows of single rows: what a worker is asked for."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from asyncdata.core.messages import NO_SLOT, Overflow
from asyncdata.prefetch.row_index.row_index import Places
from asyncdata.prefetch.windows.indexed_windows import IndexedWindow


def places(lengths: list[int]) -> Places:
    """Rows of file 3, a hundred bytes from one another."""
    rows = np.arange(len(lengths))
    return Places(np.full(len(lengths), 3), 100 * rows, np.array(lengths, np.int32), rows)


def window(lengths: list[int], expected: list[int] | None = None) -> IndexedWindow:
    nothing: Any = None
    made = IndexedWindow(nothing, nothing)
    made.fill(places(lengths), None if expected is None else np.array(expected, np.int32), is_last=True)
    return made


def test_rows_are_read_from_their_places_but_for_those_that_are_too_long() -> None:
    request = window([5, 6, -1, 8]).request(1, 4)

    assert request.slot == NO_SLOT
    assert array("i", request.lengths).tolist() == [6, -1, 8]
    assert request.overflow == [Overflow(0, 3, 100), Overflow(2, 3, 300)]
    assert request.expected == b""


def test_rows_that_another_rank_tokenizes_are_not_read() -> None:
    request = window([5, 6, -1, 8, 9], [1, -1, 7, -4, 0]).request(1, 5)

    assert array("i", request.expected).tolist() == [-1, 7, -4, 0]
    assert array("i", request.lengths).tolist() == [6, -1, 8, 9]
    assert request.overflow == [Overflow(3, 3, 400)]
