"""From a bad row in a chunk to the error that a user reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from asyncdata import Position, SourceLocation
from asyncdata.delivery.bad_rows import bad_row_error
from asyncdata.delivery.channel import BadRowItem
from asyncdata.delivery.chunk import Chunk
from asyncdata.tokenization.column_writer import ColumnWriter
from asyncdata.tokenization.rows import RowFault

if TYPE_CHECKING:
    from pathlib import Path

    from asyncdata import BadRowError

LINES = [b'{"id": 0}', b'{"id": 1', b'{"id": "' + b"x" * 500 + b'"}']


class Lines:
    """The lines of a file; ``long`` of them are longer than allowed."""

    def __init__(self, path: Path, too_long: bool) -> None:
        self.path = path
        self.too_long = too_long

    def location(self, row: int) -> SourceLocation:
        offset = sum(len(line) + 1 for line in LINES[:row])
        return SourceLocation(str(self.path), offset, -1 if self.too_long else len(LINES[row]))

    def key(self, row: int) -> tuple[int, int]:
        return 0, self.location(row).byte_offset


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(LINES) + b"\n")
    return path


def error_of(path: Path, row: int, fault: RowFault, *, too_long: bool = False) -> BadRowError:
    out = ColumnWriter()
    out.fail(row, fault)
    chunk = Chunk(out.finish(len(LINES), 0.0), Position(), len(LINES), Lines(path, too_long), ends_epoch=True)
    return bad_row_error(BadRowItem(chunk, chunk.errors[0]))


def test_the_error_has_the_place_the_reason_and_an_excerpt(path):
    error = error_of(path, 1, RowFault("AD110", "cut off", LINES[1], "Traceback ..."))

    assert (error.code, error.path, error.line, error.byte_offset) == ("AD110", str(path), 2, 10)
    assert (error.reason, error.excerpt, error.traceback) == ("cut off", '{"id": 1', "Traceback ...")
    assert str(error) == f'AD110 {path}:2 (byte 10): cut off\n  row: {{"id": 1\nTraceback ...'


@pytest.mark.parametrize("too_long", [False, True])
def test_the_beginning_of_a_row_that_killed_its_worker_is_read_from_the_file(path, too_long):
    error = error_of(path, 2, RowFault("AD423", "a worker died"), too_long=too_long)

    assert error.line == 3
    assert error.excerpt == '{"id": "' + "x" * 72 + "..."


def test_an_excerpt_ends_with_its_line_however_long_the_row_is_said_to_be(path):
    assert error_of(path, 0, RowFault("AD108", "too long"), too_long=True).excerpt == '{"id": 0}'


def test_a_file_that_is_gone_does_not_hide_what_is_wrong_with_the_row(path):
    path.unlink()

    error = error_of(path, 1, RowFault("AD423", "a worker died"))

    assert (error.line, error.byte_offset, error.excerpt) == (None, 10, "")
    assert str(error) == f"AD423 {path} (byte 10): a worker died"
