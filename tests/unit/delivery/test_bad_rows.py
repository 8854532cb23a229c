"""Bad rows are errors, or are logged and written where they can be read; and when a file of many drops is told of."""

import errno
import json
import os
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from structlog.testing import capture_logs

from asyncdata import SourceLocation
from asyncdata.errors import BadRowError, QuarantineError
from tests.support.parts import MassDrops, Quarantine, RowError, bad_row_error, read_quarantine

PLACE = {"path": "/rows", "line": 3, "byte_offset": 9}
ERROR = BadRowError("AD101", "cut off \u00fc", **PLACE, excerpt='{"a', traceback="long")
RECORD = {"code": "AD101", **PLACE, "reason": "cut off \u00fc", "excerpt": '{"a'}


def error_at(line):
    return BadRowError("AD101", "cut off", path="/rows", line=line, byte_offset=9 * line, excerpt='{"a')


def test_each_row_is_appended_as_a_line_before_it_is_passed_over(tmp_path, monkeypatch):
    path, sizes = tmp_path / "quarantine.jsonl", []
    monkeypatch.setattr(os, "fsync", lambda fd: sizes.append(os.fstat(fd).st_size))
    for _ in range(2):
        Quarantine(str(path)).add(ERROR)
        assert sizes[-1] == path.stat().st_size, "it is durable"
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == [RECORD, RECORD]
    assert path.read_bytes().endswith(b"\n")
    assert path.stat().st_mode & 0o777 == 0o600, "its owner's alone"


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ({"line": 3, "byte_offset": 9}, {"line": 3}), ({"row_number": 7, "byte_offset": -1}, {"row_number": 7}),
        ({"byte_offset": 300}, {"byte_offset": 300}),
    ],
)  # fmt: skip
def test_a_row_is_one_event_in_the_log_with_its_line_its_number_or_its_byte(place, named):
    with capture_logs() as events:
        Quarantine(None).add(BadRowError("AD101", "cut off \u00fc", path="s3://bucket/rows", **place))
    expected = {"event": "row.bad", "code": "AD101", "path": "s3://bucket/rows", "reason": "cut off \u00fc", **named}
    assert events == [expected | {"log_level": "warning"}]


def test_what_cannot_be_encoded_is_escaped_links_are_not_followed_and_a_file_may_be_gone(tmp_path):
    target, path = tmp_path / "target", tmp_path / "quarantine.jsonl"
    path.symlink_to(target)
    with pytest.raises(QuarantineError, match="^AD605 cannot write to .*symbolic links"):
        Quarantine(str(path)).add(ERROR)
    assert not target.exists()
    Quarantine(str(target)).add(BadRowError("AD101", "\ud800", path="/\udcff"))
    assert json.loads(target.read_text(encoding="ascii"))["reason"] == "\ud800"
    place = SourceLocation(f"{tmp_path}/gone", 10, 8)
    error = bad_row_error(place, RowError(1, "AD423", "a worker died"))
    assert (error.line, error.byte_offset, error.excerpt) == (None, 10, "")
    assert str(error) == f"AD423 {place.path} (byte 10): a worker died"


def test_each_row_is_read_once_however_often_it_was_written(tmp_path):
    path = tmp_path / "quarantine.jsonl"
    other = BadRowError("AD421", "raised", path="/t.parquet", byte_offset=-1, row_number=7)
    for error in (ERROR, other, ERROR, BadRowError("AD110", "now another", path="/rows", line=3, byte_offset=9)):
        Quarantine(str(path)).add(error)
    found = read_quarantine(str(path))
    assert {entry.place: entry.code for entry in found.entries} == {"/rows:3": "AD110", "/t.parquet (row 7)": "AD421"}
    assert (found.times, found.num_unreadable) == ([3, 1], 0)


def test_a_disk_that_fills_up_within_a_line_leaves_no_half_of_it(tmp_path, monkeypatch):
    path, write, room = tmp_path / "quarantine.jsonl", os.write, [20]
    quarantine = Quarantine(str(path))
    quarantine.add(ERROR)

    def fills_up(fd: int, data: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return write(fd, data[: room.pop()])

    monkeypatch.setattr(os, "write", fills_up)
    with pytest.raises(QuarantineError, match="^AD605 .*No space left on device"):
        quarantine.add(ERROR)
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == [RECORD]

    room.append(10_000)
    quarantine.add(ERROR)
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == [RECORD, RECORD]


def test_half_a_line_that_a_killed_process_left_does_not_swallow_the_next_entry(tmp_path):
    path = tmp_path / "bad.jsonl"
    quarantine = Quarantine(str(path))
    quarantine.add(error_at(1))
    whole = path.read_bytes()
    path.write_bytes(whole + b"[1]\n\xff\n" + whole[:-20])
    quarantine.add(error_at(2))
    quarantine.add(error_at(3))
    found = read_quarantine(str(path))
    assert [entry.line for entry in found.entries] == [1, 2, 3]
    assert (found.times, found.num_unreadable) == ([1, 1, 1], 3), "lines that say nothing of a row are counted"


@pytest.mark.thorough
def test_a_line_longer_than_any_of_ours_is_never_held(tmp_path):
    """A disk that lost power may leave a hole of any size."""
    path = tmp_path / "bad.jsonl"
    with path.open("wb") as file:
        file.truncate(64 << 20)
    Quarantine(str(path)).add(error_at(7))
    tracemalloc.start()
    found = read_quarantine(str(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    assert ([entry.line for entry in found.entries], found.num_unreadable) == ([7], 1)


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


def test_a_file_is_told_of_once_a_reason_and_what_is_left_out_on_purpose_is_not():
    told = Told(3)
    assert told.see([0] * 400, {"long": [*range(0, 19)]}) == []
    assert told.see([0] * 1, {"long": [0]}) == [], "20 of 401 are not more than 5 percent"
    assert told.see([0] * 1, {"long": [0]}) == [("long", "0", 21, 402)]
    assert told.see([0] * 100, {"long": [*range(0, 100)]}) == []
    found = told.see([1] * 50 + [2] * 50, {"long": [*range(0, 50)], "empty": [*range(50, 100)]})
    assert found == [("long", "1", 50, 50), ("empty", "2", 50, 50)]
    told = Told(1)
    assert told.see([0] * 100, {"excluded": [*range(100)], "journal": [*range(100)], "long": [*range(15)]}) == []
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


def test_rows_of_other_ranks_do_not_count_and_at_most_twenty_files_are_named_for_a_reason():
    ours = np.arange(1000) < 100
    assert Told(1).see([0] * 1000, {"bad row AD424": [*range(0, 30)]}, ours) == [("bad row AD424", "0", 30, 100)]
    found = Told(100).see([row // 20 for row in range(2000)], {"long": [*range(0, 2000)]})
    assert [path for _, path, _, _ in found] == [*map(str, range(20)), ""]


def test_memory_is_bounded_for_a_million_files_and_a_reason_for_each_row():
    tracemalloc.start()
    found = Told(1_000_000).see(list(range(999_000, 1_000_000)), {f"reason {row}": [row] for row in range(1000)})
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [("other reasons", "", 970, 1000)]
    assert num_bytes < 20e6
