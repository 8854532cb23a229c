"""Parquet files: which are meant, what is wrong before a row is read, and how they are read, damaged and changed."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import DataLoader, ParquetSource, Shuffle
from asyncdata.errors import ConfigError, NoSamplesError
from asyncdata.order.order import Order
from asyncdata.sources.arrow import parquet_reader
from tests.support.inner import change
from tests.support.parquet_files import pa, pq, reader_of, texts_of, write
from tests.support.parquet_files import rows_of as rows_of_block
from tests.support.parts import FileChangedError
from tests.support.reading_rows import AS_IT_LIES, refusal_of, rows_of, samples_of
from tests.support.tokenize_fns import all_dropped

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.parts import ParquetBlocks


def refused(source: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DataLoader(source, **AS_IT_LIES)


def test_a_path_is_known_for_parquet_wherever_a_loader_is_made_and_formats_are_not_mixed(tmp_path):
    path = write(tmp_path / "a.parquet")
    write(tmp_path / "sub" / "b.parquet")
    for source in (path, str(tmp_path / "*.parquet"), tmp_path, [tmp_path, tmp_path / "sub"]):
        assert [row["id"] for row in rows_of(source)][:100] == list(range(100))

    (tmp_path / "b.jsonl").write_text('{"id": 1}\n')
    refused([str(path), str(tmp_path / "b.jsonl")], r"a\.parquet is Parquet and .*b\.jsonl is not")
    refused(str(tmp_path), r"the folder .* holds \*\.jsonl and \*\.parquet; say which")
    refused(5, "a source is a path, .* a ParquetSource, .* got int")


def test_every_fault_is_named_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = write(tmp_path / "good.parquet").read_bytes()
    bad = {
        "cut": data[:-20], "text": b'{"id": 1}\n' * 10, "zeros": b"\0" * 100, "empty": b"",
        "locked": data[:-4] + b"PARE", "length": data[:-8] + b"\xff\xff\xff\x7f" + b"PAR1",
        "footer": data[: -8 - 40] + b"\xff" * 40 + data[-8:],
    }  # fmt: skip
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()

    *found, footer = refusal_of(ParquetSource(["folder", "missing", *bad, "good.parquet"])).splitlines()

    assert found == [
        "AD306 the folder folder holds no *.parquet; name the files, or a glob",
        "AD304 cannot read missing: No such file or directory",
        "AD124 cut is cut off: it has no footer at its end; perhaps it is still being written",
        "AD123 text is not Parquet: it begins with b'{\"id'; read it with JsonlSource",
        "AD123 zeros is not Parquet: it begins with b'\\x00\\x00\\x00\\x00'",
        "AD124 empty has no bytes at all; a Parquet file without rows has a footer",
        "AD124 locked is encrypted; decrypt it first",
        "AD124 length is cut off: it has no footer at its end; perhaps it is still being written",
    ]
    assert footer.startswith("AD124 footer: its footer cannot be read: ")
    refused(ParquetSource(["good.parquet"] * 2), "^AD309 ")


def test_files_without_rows_are_refused_only_if_all_are(tmp_path):
    empty, full = write(tmp_path / "empty", 0), write(tmp_path / "full")

    assert refusal_of(ParquetSource(str(empty))) == f"AD201 no rows in 1 files, all empty: {empty}"
    assert {sample.source.path for sample in samples_of(ParquetSource([str(empty), str(full)]))} == {str(full)}


def test_columns_that_differ_are_named_with_their_files_before_a_row_is_read(tmp_path):
    first = write(tmp_path / "1", columns={"a": [1], "b": ["x"], "c": [1.5]})
    other = write(tmp_path / "2", columns={"a": ["one"], "b": [None], "d": [1]})
    both = [str(first), str(other)]

    assert refusal_of(ParquetSource(both)).splitlines() == [
        f"AD124 {other}: column 'a' is string, and int64 in {first}",
        f"AD124 {other}: it has no column 'c'; it has a, b, d",
        f"AD124 {other}: it has d, which {first} has not; name what to read with columns=[...]",
    ]
    assert rows_of(ParquetSource(both, columns=["b"])) == [{"b": "x"}, {"b": None}]
    missing = ParquetSource(str(first), columns=["b", "z"])
    assert refusal_of(missing) == f"AD124 {first}: it has no column 'z'; it has a, b, c"


def test_a_column_twice_or_one_without_a_form_is_refused(tmp_path):
    path = tmp_path / "twice"
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"]), path)
    zoned = write(tmp_path / "z", columns={"t": pa.array([0], pa.timestamp("us", "No/Such"))})

    refused(ParquetSource(str(path)), "columns must name some columns, each once")
    refused(ParquetSource(str(zoned), columns=[]), "columns must name some")
    assert "more than one column 'a'" in refusal_of(ParquetSource(str(path), columns=["a"]))
    assert refusal_of(ParquetSource(str(zoned))).startswith(
        f"AD124 {zoned}: column 't' is timestamp[us, tz=No/Such], which has no form"
    )


def test_a_source_is_a_value_and_says_what_it_needs(monkeypatch):
    assert ParquetSource("a") == ParquetSource("a") != ParquetSource("a", columns=["b"])
    with pytest.raises(ConfigError, match="reads_per_group must be at least 1, got 0"):
        ParquetSource("a", reads_per_group=0)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    refused(ParquetSource("a"), "Parquet needs pyarrow .*: pip install pyarrow")


def test_where_blocks_must_be_larger_a_window_keeps_its_size_and_has_fewer(tmp_path):
    path, orders = str(write(tmp_path / "a", 4000, group_rows=2000)), {}
    for reads in (1, 4, 100):
        source = ParquetSource(path, reads_per_group=reads)
        with closing(source.open(1024)) as opened:
            orders[reads] = Order(Shuffle(block_bytes=1024, window_blocks=32), 0, opened.num_blocks, opened.block_bytes)

    assert [order.num_blocks for order in orders.values()] == [2, 8, pytest.approx(200, rel=0.5)]
    assert [order.max_window_blocks for order in orders.values()] == [1, 2, pytest.approx(32, abs=6)]
    assert orders[4].description()["window_blocks"] == 32


@pytest.fixture
def two(tmp_path: Path) -> ParquetBlocks:
    columns = {"id": list(range(100, 200)), "pad": ["y"] * 100}
    paths = [write(tmp_path / "a.parquet"), write(tmp_path / "b.parquet", group_rows=45, columns=columns)]
    return ParquetSource([str(path) for path in paths]).open(300)


@pytest.mark.parametrize("held_bytes", [0, 3000, 1 << 20])
def test_single_rows_are_equal_to_those_of_their_blocks_in_any_order(two, monkeypatch, held_bytes):
    """Whether row groups are kept in memory, take turns there, or are too large for it."""
    change(monkeypatch, most_bytes_held_of_parquet=held_bytes)
    reader = reader_of(two)
    texts = {}
    for block in two.blocks(range(two.num_blocks)):
        found = reader.read_block(block, 1 << 20)
        for start, length, offset in zip(found.starts, found.lengths, found.offsets, strict=True):
            texts[block.file_id, block.start + offset] = found.data[start : start + length]
    places = [(n % 2, n * 37 % 100) for n in range(300)]

    for first in range(0, 300, 50):
        some = places[first : first + 50]
        assert texts_of(reader, some, [len(texts[place]) for place in some]) == [texts[place] for place in some]
    reader.close()


def test_neighbouring_blocks_cost_one_pass_over_their_row_group(two, monkeypatch):
    passes = []
    file = parquet_reader.ParquetFile  # how often it decodes is what is counted
    batches = file.batches
    monkeypatch.setattr(file, "batches", lambda *args: passes.append(args[1]) or batches(*args))
    reader = reader_of(two)

    for block in two.blocks(range(two.num_blocks)):
        reader.read_block(block, 1 << 20)
    reader.close()

    assert passes == [0, 1, 2, 3, 0, 1, 2]


def test_a_row_that_is_too_long_is_a_bad_row_and_rows_of_nulls_are_rows(tmp_path):
    path = write(tmp_path / "a", columns={"id": [0, 1, 2], "pad": ["", "x" * 200, ""]})
    nulls = write(tmp_path / "b", columns={"id": pa.nulls(3)})

    assert [row["id"] for row in rows_of(ParquetSource(str(path), max_row_bytes=100), bad_rows="skip")] == [0, 2]
    assert rows_of(ParquetSource(str(nulls))) == [{"id": None}] * 3
    with pytest.raises(NoSamplesError, match="3"):
        samples_of(ParquetSource(str(nulls)), tokenize_fn=all_dropped)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_file_that_was_cut_or_edited_is_named_at_the_next_block(two, is_open):
    reader = reader_of(two)
    path = two.files[0].path
    first, second, *_ = two.blocks(range(2))
    if is_open:
        rows_of_block(reader, first)
    with open(path, "r+b") as file:
        data = file.read()
        file.truncate(len(data) - 1)
    with pytest.raises(FileChangedError, match=rf"^AD302 {path} shrank from {len(data)} to {len(data) - 1} bytes"):
        rows_of_block(reader, second)
    with open(path, "wb") as file:
        file.write(data[:-20] + b"?" + data[-19:])
    with pytest.raises(FileChangedError, match=rf"^AD303 {path} was replaced or edited .* its footer is another one"):
        rows_of_block(reader, second)
    with pytest.raises(FileChangedError, match=r"^AD30"):
        texts_of(reader, [(0, 5)], [3])
    reader.close()


def test_a_row_that_is_another_one_when_it_is_read_by_itself_is_named(two):
    reader = reader_of(two)

    with pytest.raises(FileChangedError, match=r"^AD303 .*a\.parquet was edited while it was read: row 5 is another"):
        texts_of(reader, [(0, 5)], [3])
    reader.close()
