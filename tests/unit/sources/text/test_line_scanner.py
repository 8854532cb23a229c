"""Finding rows in a byte block; that every row of a file is found once is a property of its own."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from asyncdata.core.messages import Block, FileRef
from asyncdata.sources.reader import BlockRows, FileChangedError
from asyncdata.sources.text import line_scanner
from asyncdata.sources.text.line_scanner import read_block, read_row

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NO_LIMIT = 1 << 20
DATA = b"one\ntwo\nthree\n"


@contextmanager
def opened(path: Path, data: bytes) -> Iterator[tuple[int, FileRef]]:
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd, FileRef(str(path), len(data))
    finally:
        os.close(fd)


def found_in(
    path: Path, data: bytes, start: int, stop: int, *, slack_bytes: int = 0, max_row_bytes: int = NO_LIMIT
) -> BlockRows:
    with opened(path, data) as (fd, file):
        return read_block(fd, file, Block(0, start, stop), slack_bytes, max_row_bytes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def test_the_first_block_has_a_newline_before_it(path):
    found = found_in(path, DATA, 0, 8)

    assert found == (b"\none\ntwo\n", found.starts, found.lengths, found.offsets, 0)
    assert (found.starts.tolist(), found.lengths.tolist(), found.offsets.tolist()) == ([1, 5], [3, 3], [0, 4])


def test_a_later_block_has_the_byte_before_it(path):
    found = found_in(path, DATA, 4, 8)

    assert found.data == b"\ntwo\n"
    assert (found.starts.tolist(), found.lengths.tolist()) == ([1], [3])


def test_a_row_that_begins_before_the_block_is_not_its_own(path):
    assert found_in(path, DATA, 5, 14).starts.tolist() == [4]


def test_a_block_inside_a_row_has_none(path):
    assert found_in(path, DATA, 9, 12).starts.tolist() == []


def test_a_row_that_ends_after_the_over_read_has_its_true_length(path):
    found = found_in(path, DATA, 8, 10, slack_bytes=1)

    assert (found.data, found.lengths.tolist()) == (b"\nthr", [5])


def test_the_over_read_stops_at_the_end_of_the_file(path):
    assert found_in(path, DATA, 8, 14, slack_bytes=100).data == b"\nthree\n"


def test_the_last_row_needs_no_end(path):
    assert found_in(path, b"one\ntwo", 0, 7).lengths.tolist() == [3, 3]


def test_a_row_of_exactly_the_limit_is_kept_and_one_byte_more_is_too_long(path):
    data = b"x" * 10 + b"\n" + b"x" * 11 + b"\n" + b"x" * 10

    assert found_in(path, data, 0, len(data), max_row_bytes=10).lengths.tolist() == [10, -1, 10]


def test_a_row_far_longer_than_the_limit_is_not_read_to_its_end(path, monkeypatch):
    monkeypatch.setattr(line_scanner, "_PIECE_BYTES", 10)
    with opened(path, b"x" * 1000) as (fd, file):
        os.truncate(path, 100)  # a read after this would raise
        found = read_block(fd, file, Block(0, 0, 10), 0, 50)

    assert found.lengths.tolist() == [-1]


@pytest.mark.parametrize("blank", [b"", b" ", b"\r", b" \t\r", b"\v\f"], ids=repr)
def test_blank_lines_are_counted_and_passed_over(path, blank):
    data = blank + b"\n{}\n" + blank + b"\n"
    found = found_in(path, data, 0, len(data))

    assert (found.lengths.tolist(), found.num_blank) == ([2], 2)


@pytest.mark.parametrize("line", [b"\x00", b" \x00", b"\xc2\xa0", b"\xef\xbb\xbf"], ids=repr)
def test_a_row_that_only_looks_blank_is_a_row(path, line):
    data = b"{}\n" + line + b"\n"

    assert found_in(path, data, 0, len(data)).lengths.tolist() == [2, len(line)]


def test_a_carriage_return_at_a_rows_end_is_part_of_it(path):
    assert found_in(path, b"{}\r\n{}\r\n", 0, 8).lengths.tolist() == [3, 3]


def test_a_byte_order_mark_is_no_part_of_the_first_row(path):
    found = found_in(path, b"\xef\xbb\xbf{}\n{}", 0, 8)

    assert (found.starts.tolist(), found.lengths.tolist()) == ([4, 7], [2, 2])


def test_a_byte_order_mark_alone_is_nothing(path):
    found = found_in(path, b"\xef\xbb\xbf", 0, 3)

    assert (found.starts.tolist(), found.num_blank) == ([], 0)


def test_rows_that_come_while_the_file_is_read_belong_to_a_later_run(path):
    with opened(path, DATA) as (fd, file):
        path.write_bytes(DATA + b"four\n")
        found = read_block(fd, file, Block(0, 8, 14), 100, NO_LIMIT)

    assert (found.data, found.lengths.tolist()) == (b"\nthree\n", [5])


@pytest.mark.parametrize(("start", "stop"), [(0, 14), (8, 14), (4, 6)])
def test_a_file_that_has_shrunk_is_told_by_its_name_and_both_its_ends(path, start, stop):
    with opened(path, DATA) as (fd, file):
        os.truncate(path, 3)
        with pytest.raises(FileChangedError) as caught:
            read_block(fd, file, Block(0, start, stop), 0, NO_LIMIT)

    assert str(caught.value).startswith(f"AD302 {path} shrank: it had 14 bytes at the start, and ends at byte ")


def test_a_file_that_shrinks_after_a_block_is_detected_when_the_row_continues(path):
    with opened(path, DATA) as (fd, file):
        os.truncate(path, 10)
        with pytest.raises(FileChangedError, match="ends at byte 10 now"):
            read_block(fd, file, Block(0, 8, 10), 0, NO_LIMIT)


def test_a_row_is_read_from_anywhere(path):
    with opened(path, DATA) as (fd, file):
        assert read_row(fd, file, 8, 5) == b"three"
        assert read_row(fd, file, 0, 0) == b""
        with pytest.raises(FileChangedError):
            read_row(fd, file, 12, 5)


def test_a_read_that_comes_back_in_pieces_is_put_together(path, monkeypatch):
    """As over a network file system."""
    whole = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, num_bytes, offset: whole(fd, min(num_bytes, 2), offset))

    assert found_in(path, DATA, 0, 14).data == b"\n" + DATA
