"""Copies of rows: written whole or not at all, read by their places."""

from __future__ import annotations

from array import array

import pytest

from asyncdata.sources.reader import FileChangedError
from asyncdata.sources.spool import SpoolReader, is_whole, part_path, write_part
from asyncdata.wire import Block, FileRef, Job, Overflow

ROWS = [b'{"a": 1}', b"", b'{"b": "long"}']


@pytest.fixture
def reader(jsonl_file, tmp_path):
    path = jsonl_file([b"first", b"second"])
    job = Job(
        files=[FileRef(str(path), path.stat().st_size)], tokenize=None, max_row_bytes=99, block_bytes=50, slack_bytes=9
    )
    reader = SpoolReader(job, "asyncdata.sources.scan:LineReader", {}, str(tmp_path))
    yield reader
    reader.close()


def test_rows_are_read_again_from_where_they_were_written(reader, tmp_path):
    offsets = write_part(part_path(str(tmp_path), 8), ROWS)
    places = [Overflow(row, -9, offsets[row]) for row in (2, 0, 1)]

    assert reader.read_rows(places, [len(row) for row in ROWS]) == [ROWS[2], ROWS[0], ROWS[1]]


def test_blocks_and_rows_that_were_not_copied_are_the_other_readers(reader):
    assert reader.read_block(Block(0, 0, 13), 100).lengths == array("i", [5, 6])
    assert reader.read_rows([Overflow(0, 0, 6)], [6]) == [b"second"]


def test_a_copy_that_was_cut_is_noticed(reader, tmp_path):
    path = part_path(str(tmp_path), 0)
    offsets = write_part(path, ROWS)
    lengths = array("i", [len(row) for row in ROWS])
    assert is_whole(path, lengths)

    with open(path, "r+b") as file:
        file.truncate(12)

    assert not is_whole(path, lengths)
    assert not is_whole(path + "x", lengths)
    with pytest.raises(FileChangedError, match="AD302"):
        reader.read_rows([Overflow(2, -1, offsets[2])], lengths)


def test_nothing_half_written_stays(tmp_path):
    path = part_path(str(tmp_path), 0)

    with pytest.raises(TypeError):
        write_part(path, [b"row", None])

    assert list(tmp_path.iterdir()) == []
