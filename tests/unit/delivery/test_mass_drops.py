"""When a file, or a source, is told of: once a reason, by counts that take little memory, whatever the order."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

import numpy as np
from structlog.testing import capture_logs

from asyncdata import SourceLocation
from tests.support.parts import MassDrops


class Told:
    """What is logged of requests, each with the file of each of its rows."""

    def __init__(self, num_files):
        self.drops = MassDrops("", num_files)

    def see(self, files, dropped, ours=None):
        rows = SimpleNamespace(num_rows=len(files), file_ids=lambda: np.array(files))
        rows.row_location = lambda row: SourceLocation(str(files[row]), -1, 0, row)
        with capture_logs() as events:
            self.drops.see(rows, dropped, ours)
        return [(one["reason"], one.get("path", ""), one["num_dropped"], one["num_rows"]) for one in events]


def test_a_file_is_told_of_once_a_reason_from_twenty_rows_and_more_than_five_percent_on():
    told = Told(3)

    assert told.see([0] * 400, {"long": [*range(0, 19)]}) == []
    assert told.see([0] * 1, {"long": [0]}) == [], "20 of 401 are not more than 5 percent"
    assert told.see([0] * 1, {"long": [0]}) == [("long", "0", 21, 402)]
    assert told.see([0] * 100, {"long": [*range(0, 100)]}) == []
    found = told.see([1] * 50 + [2] * 50, {"long": [*range(0, 50)], "empty": [*range(50, 100)]})
    assert found == [("long", "1", 50, 50), ("empty", "2", 50, 50)]


def test_what_is_left_out_on_purpose_is_not_told_and_what_comes_again_is_counted_anew():
    told = Told(1)

    assert (
        told.see([0] * 100, {"excluded": [*range(0, 100)], "journal": [*range(0, 100)], "long": [*range(0, 15)]}) == []
    )
    told.drops.restart()
    assert told.see([0] * 100, {"long": [*range(0, 15)]}) == []


def test_a_file_that_stands_out_is_told_of_after_the_whole_source_and_named_files_do_not_count_for_it_again():
    told = Told(10)

    assert told.see([row % 10 for row in range(100)], {"long": [*range(30)]}) == [("long", "", 30, 100)]
    assert told.see([3] * 20, {"long": [*range(20)]}) == [("long", "3", 23, 30)]
    assert told.see([4] * 20, {"long": [*range(3)]}) == []

    told, others = Told(20), [1 + row % 19 for row in range(190)]
    assert told.see([0] * 40, {"long": [*range(40)]}) == [("long", "0", 40, 40)]
    assert told.see(others, {"long": [*range(19)]}) == []
    assert told.see(others[:19], {"long": [0]}) == [("long", "", 20, 249)]


def test_rows_of_other_ranks_do_not_count():
    ours = np.arange(1000) < 100

    assert Told(1).see([0] * 1000, {"bad row AD424": [*range(0, 30)]}, ours) == [("bad row AD424", "0", 30, 100)]


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

    found = told.see([row // 20 for row in range(2000)], {"long": [*range(0, 2000)]})

    assert [path for _, path, _, _ in found] == [*map(str, range(20)), ""]
