"""The file of a start: a name of its own, whole lines only, and never more than its limit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from asyncdata.telemetry import record_file
from asyncdata.telemetry.record_file import RecordFile

if TYPE_CHECKING:
    from pathlib import Path


def test_each_start_of_a_rank_has_a_file_of_its_own(tmp_path):
    for rank in (0, 0, 3, 0):
        RecordFile(str(tmp_path / "a/b"), rank, 1 << 20).open()

    assert sorted(path.name for path in (tmp_path / "a/b").iterdir()) == [
        "rank-00000-0000.jsonl",
        "rank-00000-0001.jsonl",
        "rank-00000-0002.jsonl",
        "rank-00003-0000.jsonl",
    ]


def test_a_file_that_can_be_made_later_is_made_later(tmp_path):
    (tmp_path / "run").write_text("in the way")
    file = RecordFile(str(tmp_path / "run"), 0, 1 << 20)

    assert file.write(b"lost\n") == "disk"
    assert file.fault
    (tmp_path / "run").unlink()
    assert file.write(b"kept\n") == ""

    assert (tmp_path / "run/rank-00000-0000.jsonl").read_bytes() == b"kept\n"


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "rank-00000-0000.jsonl").symlink_to(tmp_path / "elsewhere")

    assert RecordFile(str(tmp_path), 0, 1 << 20).write(b"line\n") == ""

    assert not (tmp_path / "elsewhere").exists()
    assert (tmp_path / "rank-00000-0001.jsonl").exists()


def test_intervals_become_twice_as_long_each_time_half_of_the_room_is_used(tmp_path):
    file = RecordFile(str(tmp_path), 0, 1 << 16)
    line, seen = b"x" * 99 + b"\n", []
    while file.write(line) == "":
        if file.thinning not in seen:
            seen.append(file.thinning)

    assert seen == [1, 2, 4, 8, 16]
    assert file.write(line) == "size"
    assert file.write(line, is_last=True) == ""


def test_a_forked_child_writes_nothing(tmp_path):
    file = RecordFile(str(tmp_path), 0, 1 << 20)
    file.write(b"parent\n")
    pid = os.fork()
    if not pid:
        os._exit(0 if file.write(b"child\n") == "disk" else 1)

    assert os.waitpid(pid, 0)[1] == 0
    assert next(tmp_path.iterdir()).read_bytes() == b"parent\n"


class Files(RuleBasedStateMachine):
    """Any lines, on a disk that is full at times: what the file has is what was said to be written."""

    folder: Path

    @initialize()
    def make(self) -> None:
        self.room = [1 << 20]
        self.file = RecordFile(str(self.folder), 0, 1 << 13)
        self.written = b""

    @rule(room=st.integers(0, 400))
    def the_disk_has_room(self, room: int) -> None:
        self.room[0] = room

    @rule(size=st.integers(0, 300), is_detail=st.booleans())
    def write(self, size: int, is_detail: bool) -> None:
        line = b"x" * size + b"\n"
        with pytest.MonkeyPatch.context() as patch:
            write = os.write

            def limited(fd: int, data: bytes) -> int:
                if not self.room[0]:
                    raise OSError(28, "No space left on device")

                number = write(fd, data[: self.room[0]])
                self.room[0] -= number
                return number

            patch.setattr(record_file.os, "write", limited)
            lost = self.file.write(line, is_detail=is_detail)
        if not lost:
            self.written += line

    @invariant()
    def the_file_has_what_was_written(self) -> None:
        paths = list(self.folder.glob("*.jsonl"))
        assert (paths[-1].read_bytes() if paths else b"") == self.written
        assert len(self.written) <= 1 << 13

    def teardown(self) -> None:
        self.file.close()
        for path in self.folder.glob("*.jsonl"):
            path.unlink()


@pytest.mark.thorough
def test_a_disk_that_is_full_at_times_leaves_whole_lines(tmp_path):
    from hypothesis.stateful import run_state_machine_as_test

    Files.folder = tmp_path
    run_state_machine_as_test(Files, settings=settings(max_examples=50, deadline=None))
