"""Bad rows that were passed over: logged, and written where they can be read again."""

from __future__ import annotations

import errno
import json
import os

import pytest
from structlog.testing import capture_logs

from asyncdata.config import LoaderConfig
from asyncdata.errors import BadRowError, QuarantineError
from asyncdata.quarantine import Quarantine, record_of

ERROR = BadRowError("AD101", "cut off \u00fc", path="/rows", line=3, byte_offset=9, excerpt='{"a', traceback="long")
RECORD = {
    "code": "AD101",
    "path": "/rows",
    "line": 3,
    "byte_offset": 9,
    "reason": "cut off \u00fc",
    "excerpt": '{"a',
}


def test_a_record_says_where_why_and_what():
    assert record_of(ERROR) == RECORD


def test_each_row_is_a_line_behind_what_was_there(tmp_path):
    path = tmp_path / "quarantine.jsonl"
    for _ in range(2):
        Quarantine(str(path)).add(ERROR)

    assert [json.loads(line) for line in path.read_bytes().splitlines()] == [RECORD, RECORD]
    assert path.read_bytes().endswith(b"\n")


def test_a_row_is_durable_before_it_is_passed_over(tmp_path, monkeypatch):
    path, sizes = tmp_path / "quarantine.jsonl", []
    monkeypatch.setattr(os, "fsync", lambda fd: sizes.append(os.fstat(fd).st_size))
    Quarantine(str(path)).add(ERROR)

    assert sizes == [path.stat().st_size]


def test_the_file_is_its_owners_alone(tmp_path):
    path = tmp_path / "quarantine.jsonl"
    Quarantine(str(path)).add(ERROR)

    assert path.stat().st_mode & 0o777 == 0o600


def test_a_row_is_one_event_in_the_log():
    with capture_logs() as events:
        Quarantine(None).add(ERROR)

    expected = {"event": "row.bad", "code": "AD101", "path": "/rows", "line": 3, "reason": "cut off \u00fc"}
    assert events == [expected | {"log_level": "warning"}]


def test_what_cannot_be_encoded_is_escaped(tmp_path):
    path = tmp_path / "quarantine.jsonl"
    Quarantine(str(path)).add(BadRowError("AD101", "\ud800", path="/\udcff"))

    assert json.loads(path.read_text(encoding="ascii"))["reason"] == "\ud800"


def test_a_link_is_not_followed(tmp_path):
    target, path = tmp_path / "target", tmp_path / "quarantine.jsonl"
    path.symlink_to(target)

    with pytest.raises(QuarantineError, match="^AD605 cannot write to .*symbolic links"):
        Quarantine(str(path)).add(ERROR)
    assert not target.exists()


@pytest.mark.parametrize(("on_bad_row", "writes"), [("quarantine", True), ("skip", False), ("raise", False)])
def test_only_quarantine_writes_a_file(tmp_path, on_bad_row, writes):
    path = tmp_path / "quarantine.jsonl"
    Quarantine.of(LoaderConfig(on_bad_row=on_bad_row, quarantine_path=str(path))).add(ERROR)

    assert path.exists() == writes


def test_a_disk_that_fills_up_within_a_line_leaves_no_half_of_it(tmp_path, monkeypatch):
    path, write = tmp_path / "quarantine.jsonl", os.write
    quarantine = Quarantine(str(path))
    quarantine.add(ERROR)
    room = 20

    def fills_up(fd: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        written = write(fd, data[:room])
        room -= written
        return written

    monkeypatch.setattr(os, "write", fills_up)
    with pytest.raises(QuarantineError, match="^AD605 .*No space left on device"):
        quarantine.add(ERROR)
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == [RECORD]

    room = 10_000
    quarantine.add(ERROR)
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == [RECORD, RECORD]


def test_a_short_write_is_gone_on_with(tmp_path, monkeypatch):
    path, write = tmp_path / "quarantine.jsonl", os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    Quarantine(str(path)).add(ERROR)

    assert [json.loads(line) for line in path.read_bytes().splitlines()] == [RECORD]
