"""Copies of rows: written whole or not at all, read by their places."""

from __future__ import annotations

import os
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata.core.messages import Block, FileRef, Job, Overflow
from asyncdata.sources.spool import SpoolReader, is_whole, part_path, write_part

ROWS = [b'{"a": 1}', b"", b'{"b": "long"}']


def spool_reader(folder):
    path = folder / "rows.jsonl"
    path.write_bytes(b"first\nsecond\n")
    job = Job(files=[FileRef(str(path), 13)], tokenize=None, max_row_bytes=99, block_bytes=50, slack_bytes=9)
    return SpoolReader(job, "asyncdata.sources.text.line_scanner:LineReader", {}, str(folder))


@pytest.fixture
def reader(tmp_path):
    reader = spool_reader(tmp_path)
    yield reader
    reader.close()


def copied(tmp_path, number, rows):
    """A copy of the rows; the place of each, whose original is the row "second"."""
    offsets = write_part(part_path(str(tmp_path), number), rows)
    return [Overflow(row, 0, 6, number, offset) for row, offset in enumerate(offsets)]


def test_rows_are_read_again_from_where_they_were_written(reader, tmp_path):
    places = copied(tmp_path, 8, ROWS)
    wanted = [places[row] for row in (2, 0, 1)]

    assert reader.read_rows(wanted, [len(row) for row in ROWS]) == [ROWS[2], ROWS[0], ROWS[1]]
    assert reader.num_mended == 0


def test_blocks_and_rows_that_were_not_copied_are_the_other_readers(reader):
    assert reader.read_block(Block(0, 0, 13), 100).lengths == array("i", [5, 6])
    assert reader.read_rows([Overflow(0, 0, 6)], [6]) == [b"second"]
    assert reader.num_mended == 0


def test_no_more_than_some_copies_are_open_at_once(reader, tmp_path, monkeypatch):
    monkeypatch.setattr("asyncdata.sources.spool._MAX_OPEN_FILES", 2)
    places = [copied(tmp_path, number, [b"row %d" % number])[0] for number in range(5)]
    before = len(os.listdir("/proc/self/fd"))

    for number in (0, 4, 1, 3, 2, 0):
        assert reader.read_rows([places[number]], [5]) == [b"row %d" % number]
        assert len(os.listdir("/proc/self/fd")) <= before + 2


@pytest.mark.thorough
@given(st.data())
def test_whatever_byte_of_a_copy_is_another_one_the_row_is_read_from_its_source_and_the_copy_mended(
    tmp_path_factory, data
):
    tmp_path = tmp_path_factory.mktemp("copies")
    reader = spool_reader(tmp_path)
    rows = [b"second", b"sEcond", b"second"]
    places = [Overflow(row, 0, 6, 8, place.copy_offset) for row, place in enumerate(copied(tmp_path, 8, rows))]
    copy = Path(part_path(str(tmp_path), 8))
    intact = copy.read_bytes()
    byte = data.draw(st.integers(0, len(intact) - 1))
    damaged = bytearray(intact)
    damaged[byte] ^= data.draw(st.integers(1, 255))
    copy.write_bytes(damaged)

    hit = byte * len(rows) // len(intact)
    found = reader.read_rows(places, [6] * 3)

    assert found == [b"second" if row == hit else rows[row] for row in range(3)]
    assert reader.num_mended == 1
    assert copy.read_bytes() == intact or hit == 1
    again = reader.read_rows(places, [6] * 3)
    assert (again, reader.num_mended) == (found, 1)
    reader.close()


@pytest.mark.parametrize("other", [9, 8])
def test_an_intact_row_of_another_place_does_not_fit(reader, tmp_path, other):
    places = copied(tmp_path, 8, [b"line 1", b"line 2"])
    elsewhere = copied(tmp_path, 9, [b"line 3", b"line 4"])
    copy, source = (Path(part_path(str(tmp_path), number)) for number in (8, other))
    found = source.read_bytes()
    half = len(found) // 2
    copy.write_bytes(found if other == 9 else found[half:] + found[:half])

    assert reader.read_rows(places, [6, 6]) == [b"second", b"second"]
    assert reader.read_rows(elsewhere, [6, 6]) == [b"line 3", b"line 4"]
    assert reader.num_mended == 2


@pytest.mark.parametrize("harm", [os.unlink, lambda path: os.truncate(path, 12), lambda path: os.truncate(path, 0)])
def test_a_copy_that_is_gone_or_was_cut_is_noticed(reader, tmp_path, harm):
    path = part_path(str(tmp_path), 0)
    places = copied(tmp_path, 0, [b"line 1", b"line 2"])
    lengths = array("i", [6, 6])
    assert is_whole(path, lengths)

    harm(path)

    assert not is_whole(path, lengths)
    assert reader.read_rows([places[1]], lengths) == [b"second"]


def test_nothing_half_written_stays(tmp_path):
    path = part_path(str(tmp_path), 0)

    with pytest.raises(TypeError):
        write_part(path, [b"row", None])

    assert list(tmp_path.iterdir()) == []
