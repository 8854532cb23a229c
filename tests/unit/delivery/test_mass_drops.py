"""When a file, or a source, is told of: once a reason, by counts that take little memory, whatever the order."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
from structlog.testing import capture_logs

from asyncdata import SourceLocation
from asyncdata.delivery.mass_drops import MassDrops


class Told:
    """What is logged of requests, each with the file of each of its rows."""

    def __init__(self, num_files: int) -> None:
        self.drops = MassDrops("", num_files)
        self._files = np.empty(0, np.int64)

    def see(self, files: list[int], dropped: dict[str, list[int]], ours: Any = None) -> list[tuple[str, str, int, int]]:
        ids = np.array(files, np.int64)

        def location(row: int) -> SourceLocation:
            return SourceLocation(str(files[row]), -1, 0, row)

        with capture_logs() as events:
            self.drops.see(len(files), dropped, lambda: ids, location, ours)
        return [(one["reason"], one.get("path", ""), one["num_dropped"], one["num_rows"]) for one in events]


def rows(first: int, stop: int) -> list[int]:
    return list(range(first, stop))


def test_a_file_is_told_of_once_a_reason_from_twenty_rows_and_more_than_five_percent_on():
    told = Told(3)

    assert told.see([0] * 400, {"long": rows(0, 19)}) == []
    assert told.see([0] * 1, {"long": [0]}) == [], "20 of 401 are not more than 5 percent"
    assert told.see([0] * 1, {"long": [0]}) == [("long", "0", 21, 402)]
    assert told.see([0] * 100, {"long": rows(0, 100)}) == []
    found = told.see([1] * 50 + [2] * 50, {"long": rows(0, 50), "empty": rows(50, 100)})
    assert found == [("long", "1", 50, 50), ("empty", "2", 50, 50)]


def test_what_is_left_out_on_purpose_is_not_told_and_what_comes_again_is_counted_anew():
    told = Told(1)

    assert told.see([0] * 100, {"excluded": rows(0, 100), "journal": rows(0, 100), "long": rows(0, 15)}) == []
    told.drops.restart()
    assert told.see([0] * 100, {"long": rows(0, 15)}) == []


def test_a_file_that_stands_out_is_told_of_after_the_whole_source():
    told = Told(10)
    files = [row % 10 for row in range(100)]

    assert told.see(files, {"long": rows(0, 30)}) == [("long", "", 30, 100)]
    assert told.see([3] * 20, {"long": rows(0, 20)}) == [("long", "3", 23, 30)]
    assert told.see([4] * 20, {"long": rows(0, 3)}) == []


def test_what_named_files_drop_does_not_count_for_the_source_again():
    told = Told(20)

    assert told.see([0] * 40, {"long": rows(0, 40)}) == [("long", "0", 40, 40)]
    assert told.see([1 + row % 19 for row in range(190)], {"long": rows(0, 19)}) == []
    assert told.see([1 + row % 19 for row in range(19)], {"long": rows(0, 1)}) == [("long", "", 20, 249)]


def test_rows_of_other_ranks_do_not_count():
    ours = np.arange(1000) < 100

    assert Told(1).see([0] * 1000, {"bad row AD424": rows(0, 30)}, ours) == [("bad row AD424", "0", 30, 100)]


def test_memory_is_bounded_for_a_million_files_and_a_reason_for_each_row():
    tracemalloc.start()
    try:
        told = Told(1_000_000)
        found = told.see(list(range(999_000, 1_000_000)), {f"reason {row}": [row] for row in range(1000)})
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert found == [("other reasons", "", 970, 1000)]
    assert num_bytes < 20e6


def test_at_most_twenty_files_are_named_for_a_reason():
    told = Told(100)

    found = told.see([row // 20 for row in range(2000)], {"long": rows(0, 2000)})

    assert [path for _, path, _, _ in found] == [*map(str, range(20)), ""]
