"""The line of a byte: the right one, and no part of a file read twice for it."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata.core import line_numbers
from asyncdata.core.line_numbers import line_number, line_number_within

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_numbers, "_STEP_BYTES", 7)
    monkeypatch.setattr(line_numbers, "_counts", OrderedDict())


@pytest.mark.thorough
@given(st.lists(st.sampled_from([b"\n", b"x", b"\r\n", b"yyyy"])), st.lists(st.floats(0, 1)))
def test_a_line_is_one_more_than_the_newlines_before_it(tmp_path_factory, pieces, places):
    data, path = b"".join(pieces), tmp_path_factory.mktemp("lines") / "rows.jsonl"
    path.write_bytes(data)

    for offset in [int(place * len(data)) for place in places]:
        assert line_number(str(path), offset) == data[:offset].count(b"\n") + 1


def test_what_was_read_before_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / "rows.jsonl", os.pread
    path.write_bytes(b"a\n" * 500)
    seen: list[int] = []
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: seen.append(size) or read(fd, size, offset))

    assert line_number(str(path), 900) == 451
    assert sum(seen) == 900
    seen.clear()
    assert [line_number(str(path), offset) for offset in (10, 500, 899)] == [6, 251, 450]
    assert sum(seen) <= 3 * 7


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"a\n" * 50)
    assert line_number(str(path), 90) == 46

    path.write_bytes(b"abc\n" * 25 + b"x")
    assert line_number(str(path), 90) == 23


def test_only_so_many_files_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_numbers, "_MAX_FILES", 2)
    for number in range(5):
        path = tmp_path / str(number)
        path.write_bytes(b"\n" * 20)
        assert line_number(str(path), 15) == 16
        assert len(line_numbers._counts) <= 2  # noqa: SLF001


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        line_number(str(tmp_path / "gone"), 3)


def test_a_file_that_hangs_or_is_gone_has_no_line_and_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read, goes_on = tmp_path / "rows.jsonl", os.pread, threading.Event()
    path.write_bytes(b"a\n" * 500)
    assert line_number_within(str(path), 10, 60) == 6
    assert line_number_within(str(path.with_name("gone")), 10, 60) is None

    monkeypatch.setattr(os, "pread", lambda fd, size, offset: goes_on.wait(240) and read(fd, size, offset))
    assert line_number_within(str(path), 10, 0.01) is None
    goes_on.set()
    assert line_number_within(str(path), 10, 60) == 6
