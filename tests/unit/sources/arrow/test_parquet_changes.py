"""Parquet files that change, or are damaged, while they are read."""

from __future__ import annotations

import os

import pytest

from asyncdata import (
    DataLoader,
    NoSamplesError,
    ParquetSource,
    Shuffle,
    SourceChangedError,
    SourceError,
)
from asyncdata.sources.reader import FileChangedError
from tests.support.loading import ids
from tests.support.parquet_files import pa, pq, reader_of, rows_of, texts_of, write
from tests.support.tokenize_fns import row_id

# Files that change


def test_a_file_that_was_touched_is_read_on(two):
    reader = reader_of(two)
    first, second, *_ = two.blocks(range(2))
    rows_of(reader, first)
    os.utime(two.files[0].path, ns=(0, 0))

    assert [row["id"] for row in rows_of(reader, second)] == list(range(second.start, second.stop))
    reader.close()


@pytest.mark.parametrize("is_open", [True, False])
def test_a_file_that_was_cut_or_edited_is_named_at_the_next_block(two, is_open):
    reader = reader_of(two)
    path = two.files[0].path
    first, second, *_ = two.blocks(range(2))
    if is_open:
        rows_of(reader, first)
    with open(path, "r+b") as file:
        data = file.read()
        file.truncate(len(data) - 1)
    with pytest.raises(FileChangedError, match=rf"^AD302 {path} shrank from {len(data)} to {len(data) - 1} bytes"):
        rows_of(reader, second)
    with open(path, "wb") as file:
        file.write(data[:-20] + b"?" + data[-19:])
    with pytest.raises(FileChangedError, match=rf"^AD303 {path} was replaced or edited .* its footer is another one"):
        rows_of(reader, second)
    reader.close()


def test_a_row_that_is_another_one_when_it_is_read_by_itself_is_named(two):
    reader = reader_of(two)

    with pytest.raises(FileChangedError, match=r"^AD303 .*a\.parquet was edited while it was read: row 5 is another"):
        texts_of(reader, [(0, 5)], [3])
    reader.close()


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 1])
def test_pages_that_cannot_be_decoded_are_an_error_that_names_file_and_row_group(tmp_path, num_workers):
    path = write(tmp_path / "a.parquet", 1000, group_rows=500)
    middle = pq.ParquetFile(path).metadata.row_group(1).column(0)
    start = middle.dictionary_page_offset or middle.data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + 40] = b"\xff" * 40
    path.write_bytes(data)

    with DataLoader(path, tokenize_fn=row_id, num_workers=num_workers, timeout_s=240) as loader:
        with pytest.raises(SourceError, match=rf"AD304 cannot read {path}: row group 1 cannot be decoded: "):
            loader.get_next_batch(1)


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("shuffle", [True, "full"])
@pytest.mark.parametrize("page", ["data", "dictionary"])
def test_a_page_with_a_wrong_checksum_is_never_delivered(tmp_path, page, shuffle, num_workers):
    path, words = tmp_path / "a.parquet", [f"word {row % 7} of many" for row in range(1000)]
    table = pa.table({"id": range(1000), "pad": words})
    layout = {"compression": "none", "use_dictionary": page == "dictionary", "write_page_checksum": True}
    pq.write_table(table, path, row_group_size=500, **layout)
    data = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(1).column(1)
    start = column.dictionary_page_offset or column.data_page_offset
    find = data.index if page == "dictionary" else data.rindex  # a data page's header has its least and greatest value
    place = find(b"of many", start, start + column.total_compressed_size)
    data[place : place + 7] = b"or none"
    path.write_bytes(data)
    assert pq.read_table(path) != table, "it can be decoded, and is something else"

    knobs = {
        "shuffle": shuffle,
        "num_workers": num_workers,
        "timeout_s": 240,
        "cache": {"folder": str(tmp_path / "cache")},
    }
    with DataLoader(path, tokenize_fn=row_id, bad_rows="skip", **knobs) as loader:
        with pytest.raises(SourceError, match=rf"AD304 cannot read {path}: row group 1 cannot be decoded: .*checksum"):
            loader.get_next_batch(1000)


def test_pages_with_checksums_that_fit_are_rows(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": range(1000)}), path, row_group_size=500, write_page_checksum=True)

    with DataLoader(path, tokenize_fn=row_id, num_workers=0, shuffle=False) as loader:
        assert ids(loader.get_next_batch(1000)) == list(range(1000))


@pytest.mark.thorough
def test_a_file_that_is_cut_while_workers_read_it_stops_the_stream(tmp_path):
    path = write(tmp_path / "a.parquet", 4000, group_rows=200)
    knobs = {"shuffle": Shuffle(block_bytes=1024, window_blocks=4), "buffer_size": 1, "timeout_s": 240}
    with DataLoader(path, tokenize_fn=row_id, num_workers=1, **knobs) as loader:
        loader.get_next_batch(1)
        os.truncate(path, 5000)
        with pytest.raises(SourceChangedError, match=r"^AD302 .*a\.parquet shrank"):
            while True:
                loader.get_next_batch(1)


def test_rows_of_nothing_but_nulls_are_rows(tmp_path):
    path = write(tmp_path / "a", columns={"id": pa.nulls(3)})

    with DataLoader(
        ParquetSource(str(path)), tokenize_fn="tests.support.tokenize_fns:all_dropped", num_workers=0
    ) as loader:
        with pytest.raises(NoSamplesError, match="3"):
            loader.get_next_batch(1)
