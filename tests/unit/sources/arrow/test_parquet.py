"""Parquet: which files, what is wrong with them before a row is read, blocks, and how workers read them."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from asyncdata import (
    ConfigError,
    DataLoader,
    ParquetSource,
    Shuffle,
    SourceError,
    SourceLocation,
)
from asyncdata.cli import main as cli
from asyncdata.cli.inspection.window_view import OpenedOrder
from asyncdata.core.messages import Block
from asyncdata.sources.arrow import parquet_reader
from asyncdata.sources.arrow.parquet import ParquetBlocks
from asyncdata.sources.base import Source
from asyncdata.sources.fingerprint import FileStamp
from tests.support.loading import ids
from tests.support.tokenize_fns import id_and_text, row_id

if TYPE_CHECKING:
    from pathlib import Path
from tests.support.parquet_files import pa, pq, reader_of, rows_of, texts_of, write

BLOCK_BYTES = 1024


def refusal(paths: object, **knobs: Any) -> str:
    with pytest.raises(SourceError) as caught:
        ParquetSource(paths, **knobs).open(BLOCK_BYTES)

    return str(caught.value)


# Which files


def names(paths: object, root: Path) -> list[str]:
    return [os.path.relpath(file.path, root) for file in ParquetSource(paths).open(BLOCK_BYTES).files]


def test_it_is_a_source():
    assert isinstance(ParquetSource("rows.parquet"), Source)


def test_paths_globs_folders_and_lists_are_files_in_their_order(tmp_path, monkeypatch):
    for name in ("b.parquet", "a.parquet", "c.data"):
        write(tmp_path / name)

    assert names(str(tmp_path / "c.data"), tmp_path) == ["c.data"]
    assert names(str(tmp_path), tmp_path) == ["a.parquet", "b.parquet"]
    assert names(str(tmp_path / "?.*"), tmp_path) == ["a.parquet", "b.parquet", "c.data"]
    assert names([tmp_path / "c.data", tmp_path / "a.parquet"], tmp_path) == ["c.data", "a.parquet"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names("~/b.parquet", tmp_path) == ["b.parquet"]


def test_a_path_is_known_for_parquet_wherever_a_loader_is_made(tmp_path):
    write(tmp_path / "a.parquet")
    write(tmp_path / "sub" / "b.parquet")

    for source in (tmp_path / "a.parquet", str(tmp_path / "*.parquet"), tmp_path, [tmp_path, tmp_path / "sub"]):
        with DataLoader(source, tokenize_fn=row_id, num_workers=0, timeout_s=240) as loader:
            assert len(loader.get_next_batch(100)) == 100
        with OpenedOrder(source) as opened:
            assert opened.files.reader.path.endswith(":ParquetReader")


def test_formats_are_not_mixed(tmp_path):
    write(tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"id": 1}\n')

    with pytest.raises(ConfigError, match=r"a\.parquet is Parquet and .*b\.jsonl is not"):
        OpenedOrder([str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl")])
    with pytest.raises(ConfigError, match=r"the folder .* holds \*\.jsonl and \*\.parquet; say which"):
        OpenedOrder(str(tmp_path))


def test_the_error_for_an_invalid_source_names_the_valid_ones():
    with pytest.raises(ConfigError, match="a source is a path, .* a ParquetSource, .* got int"):
        OpenedOrder(5)


# What is refused


def test_every_fault_is_named_at_once(tmp_path):
    data = write(tmp_path / "good.parquet").read_bytes()
    bad = {
        "cut": data[:-20],
        "text": b'{"id": 1}\n' * 10,
        "zeros": b"\0" * 100,
        "empty": b"",
        "locked": data[:-4] + b"PARE",
        "length": data[:-8] + b"\xff\xff\xff\x7f" + b"PAR1",
        "footer": data[: -8 - 40] + b"\xff" * 40 + data[-8:],
    }
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)

    text = refusal([tmp_path / name for name in ("missing", *bad, "good.parquet")])

    assert [line.replace(f"{tmp_path}/", "") for line in text.splitlines()[:7]] == [
        "AD304 cannot read missing: No such file or directory",
        "AD124 cut is cut off: it has no footer at its end; perhaps it is still being written",
        "AD123 text is not Parquet: it begins with b'{\"id'; read it with JsonlSource",
        "AD123 zeros is not Parquet: it begins with b'\\x00\\x00\\x00\\x00'",
        "AD124 empty has no bytes at all; a Parquet file without rows has a footer",
        "AD124 locked is encrypted; decrypt it first",
        "AD124 length is cut off: it has no footer at its end; perhaps it is still being written",
    ]
    assert text.splitlines()[7].startswith(f"AD124 {tmp_path}/footer: its footer cannot be read: ")
    assert "good" not in text


def test_folders_globs_links_and_devices_are_refused_as_with_lines(tmp_path):
    (tmp_path / "link").symlink_to("gone")
    (tmp_path / "dir.parquet").mkdir()
    os.mkfifo(tmp_path / "pipe")

    assert refusal(tmp_path / "dir.parquet").startswith("AD306 the folder ")
    assert refusal(str(tmp_path / "*.parquet")).endswith("dir.parquet: Is a directory")
    assert refusal(str(tmp_path / "no*")).startswith("AD308 ")
    assert refusal(tmp_path / "link").startswith("AD307 ")
    assert refusal(tmp_path / "pipe").startswith("AD306 ")
    path = write(tmp_path / "a")
    with pytest.raises(ConfigError, match="^AD309 "):
        ParquetSource([str(path), str(path)]).open(BLOCK_BYTES)


def test_files_without_rows_are_refused_only_if_all_are(tmp_path):
    empty, full = write(tmp_path / "empty", 0), write(tmp_path / "full")

    assert refusal([empty]) == f"AD201 no rows in 1 files, all empty: {empty}"
    blocks = ParquetSource([str(empty), str(full)]).open(BLOCK_BYTES)
    assert {block.file_id for block in blocks.blocks(range(blocks.num_blocks))} == {1}


def test_columns_that_differ_are_named_with_their_files_before_a_row_is_read(tmp_path):
    first = write(tmp_path / "1", columns={"a": [1], "b": ["x"], "c": [1.5]})
    other = write(tmp_path / "2", columns={"a": ["one"], "b": [None], "d": [1]})

    assert refusal([first, other]).splitlines() == [
        f"AD124 {other}: column 'a' is string, and int64 in {first}",
        f"AD124 {other}: it has no column 'c'; it has a, b, d",
        f"AD124 {other}: it has d, which {first} has not; name what to read with columns=[...]",
    ]
    assert ParquetSource([str(first), str(other)], columns=["b"]).open(BLOCK_BYTES).num_blocks == 2
    assert refusal(first, columns=["b", "z"]) == f"AD124 {first}: it has no column 'z'; it has a, b, c"


def test_columns_in_another_order_or_of_a_like_type_are_no_difference(tmp_path):
    first = write(tmp_path / "1", columns={"a": pa.array([1], pa.int32()), "b": ["x"]})
    other = write(tmp_path / "2", columns={"b": pa.array(["y"]).dictionary_encode(), "a": [2]})
    blocks = ParquetSource([str(first), str(other)]).open(BLOCK_BYTES)

    found = [rows_of(reader_of(blocks), block)[0] for block in blocks.blocks(range(2))]

    assert [list(row.items()) for row in found] == [[("a", 1), ("b", "x")], [("a", 2), ("b", "y")]]


def test_a_column_twice_or_one_without_a_form_is_refused(tmp_path):
    path = tmp_path / "twice"
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"]), path)
    with pytest.raises(ConfigError, match="columns must name some columns, each once"):
        ParquetSource(str(path)).open(BLOCK_BYTES)
    assert "more than one column 'a'" in refusal(path, columns=["a"])

    with pytest.raises(ConfigError, match="columns must name some"):
        ParquetSource(str(write(tmp_path / "b")), columns=[]).open(BLOCK_BYTES)
    zoned = write(tmp_path / "z", columns={"t": pa.array([0], pa.timestamp("us", "No/Such"))})
    assert refusal(zoned).startswith(f"AD124 {zoned}: column 't' is timestamp[us, tz=No/Such], which has no form")


def test_without_pyarrow_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)

    with pytest.raises(ConfigError, match="Parquet needs pyarrow .*: pip install pyarrow"):
        ParquetSource("a").open(BLOCK_BYTES)


def test_a_source_is_a_value_and_refuses_unknown_settings():
    assert ParquetSource("a") == ParquetSource("a") != ParquetSource("a", columns=["b"])
    with pytest.raises(msgspec.ValidationError, match="unknown field `x`"):
        msgspec.convert({"paths": "a", "x": 1}, ParquetSource)
    with pytest.raises(ConfigError, match="reads_per_group must be at least 1, got 0"):
        ParquetSource("a", reads_per_group=0)


# Blocks


class Imagined(NamedTuple):
    """What a footer says of a file that no library wrote."""

    stamp: FileStamp
    group_rows: list[int]
    sizes: list[int]
    digest: str = ""

    def group_bytes(self, columns: list[str]) -> list[int]:
        return self.sizes


def imagined(*files: list[tuple[int, int]], block_bytes: int = 100, reads: int = 4) -> ParquetBlocks:
    """Blocks of files of so many row groups, each of (rows, bytes)."""
    footers = [
        Imagined(FileStamp(f"/nowhere/{number}", 1, 0, number), [g[0] for g in groups], [g[1] for g in groups])
        for number, groups in enumerate(files)
    ]
    return ParquetBlocks(footers, ["a"], block_bytes, reads, 1000)


def test_a_row_group_is_cut_into_blocks_of_about_the_size_asked_for_but_not_into_too_many():
    blocks = imagined([(10, 250), (8, 5000)], [(3, 10)])

    assert blocks.blocks(range(blocks.num_blocks)) == [
        *(Block(0, 0, 4), Block(0, 4, 8), Block(0, 8, 10)),
        *(Block(0, 10 + start, 12 + start) for start in (0, 2, 4, 6)),
        Block(1, 0, 3),
    ]


@pytest.mark.thorough
@given(
    files=st.lists(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2000)), max_size=4), min_size=1, max_size=4),
    block_bytes=st.integers(1, 500),
    reads=st.integers(1, 8),
)
def test_blocks_cover_every_row_once_and_never_cross_row_groups(files, block_bytes, reads):
    if not any(rows for groups in files for rows, _ in groups):
        return
    blocks = imagined(*files, block_bytes=block_bytes, reads=reads)
    found = blocks.blocks(range(blocks.num_blocks))

    assert [(block.file_id, row) for block in found for row in range(block.start, block.stop)] == [
        (file_id, row) for file_id, groups in enumerate(files) for row in range(sum(rows for rows, _ in groups))
    ]
    assert sum(block.stop - block.start for block in found) == blocks.extent
    for file_id, groups in enumerate(files):
        ends = np.cumsum([rows for rows, _ in groups])
        pieces = [
            sum(start <= b.start < end for b in found if b.file_id == file_id)
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        assert all(number <= reads for number in pieces)
        assert not any(b.start < end < b.stop for b in found if b.file_id == file_id for end in ends)


@pytest.mark.thorough
@given(st.lists(st.integers(0, 14), max_size=10))
def test_some_blocks_are_those_among_all_and_come_as_they_lie(numbers):
    blocks = imagined([(10, 5000), (10, 5000)], [(7, 700), (3, 1000)])
    everything = blocks.blocks(range(blocks.num_blocks))
    numbers = [number % len(everything) for number in numbers]

    assert blocks.blocks(np.array(numbers, np.int64)) == [everything[number] for number in sorted(numbers)]


@pytest.mark.thorough
@given(
    files=st.lists(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2000)), max_size=4), min_size=1, max_size=4),
    block_bytes=st.integers(1, 500),
)
def test_a_block_is_known_by_its_first_row_and_by_no_other(files, block_bytes):
    """The token cache finds by it what it holds: another block's samples would be delivered."""
    if not any(rows for groups in files for rows, _ in groups):
        return
    blocks = imagined(*files, block_bytes=block_bytes)
    known = {(b.file_id, b.start): number for number, b in enumerate(blocks.blocks(range(blocks.num_blocks)))}
    places = [(file_id, start) for file_id in range(len(files)) for start in range(90)]

    found = blocks.numbers(*np.array(places).T)

    assert found.tolist() == [known.get(place, -1) for place in places]


def order_of(source: Source, shuffle: Shuffle) -> Any:
    with OpenedOrder(source, shuffle=shuffle) as opened:
        return opened.order


def test_where_blocks_must_be_larger_a_window_keeps_its_size_and_has_fewer(tmp_path):
    path = write(tmp_path / "a", 4000, group_rows=2000)
    shuffle = Shuffle(block_bytes=1024, window_blocks=32)
    windows = {reads: order_of(ParquetSource(str(path), reads_per_group=reads), shuffle) for reads in (1, 4, 100)}

    assert [order.num_blocks for order in windows.values()] == [2, 8, pytest.approx(200, rel=0.5)]
    assert windows[1].max_window_blocks == 1
    assert windows[4].max_window_blocks == 2
    assert windows[100].max_window_blocks == pytest.approx(32, abs=6)
    assert windows[4].description()["window_blocks"] == 32


def test_the_size_of_a_block_is_judged_well_where_no_dictionary_spares_the_file_anything(tmp_path):
    path = tmp_path / "a"
    table = pa.table({"id": range(1000), "pad": ["x" * (i % 90) for i in range(1000)]})
    pq.write_table(table, path, row_group_size=300, use_dictionary=False, compression="zstd")
    blocks = ParquetSource(str(path)).open(BLOCK_BYTES)
    reader = reader_of(blocks)

    sizes = [len(reader.read_block(block, 1 << 20).data) for block in blocks.blocks(range(blocks.num_blocks))]
    reader.close()

    assert sum(sizes) / len(sizes) == pytest.approx(blocks.block_bytes, rel=0.2)
    assert blocks.block_bytes == pytest.approx(BLOCK_BYTES, rel=0.2)


def test_a_location_has_the_row_number():
    assert imagined([(9, 1)], [(9, 1)]).location(1, 7, 50) == SourceLocation("/nowhere/1", -1, 50, 7)


def test_only_the_columns_asked_for_count(tmp_path):
    path = write(tmp_path / "a", columns={"a": list(range(1000)), "b": ["y" * 500 + str(i) for i in range(1000)]})

    sizes = [ParquetSource(str(path), columns=columns).open(10**9).block_bytes for columns in (["a"], ["b"], None)]

    assert sizes[0] < 40 * 30 < 400 * 30 < sizes[1] < sizes[2]


@pytest.mark.thorough
@settings(max_examples=30)
@given(data=st.data())
def test_blocks_may_be_read_in_any_order_and_again(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("rows")
    blocks = ParquetSource(str(write(folder / "a", group_rows=17))).open(data.draw(st.integers(50, 2000)))
    everything = blocks.blocks(range(blocks.num_blocks))
    reader = reader_of(blocks)

    for block in data.draw(st.lists(st.sampled_from(everything), max_size=12)):
        assert [row["id"] for row in rows_of(reader, block)] == list(range(block.start, block.stop))
    reader.close()


@pytest.mark.parametrize("held_bytes", [0, 3000, 1 << 20])
def test_single_rows_are_equal_to_those_of_their_blocks_in_any_order(two, monkeypatch, held_bytes):
    """Whether row groups are kept in memory, take turns there, or are too large for it."""
    monkeypatch.setattr(parquet_reader, "_HELD_BYTES", held_bytes)
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
    file = parquet_reader._File  # noqa: SLF001 - how often it decodes is what is counted
    batches = file.batches
    monkeypatch.setattr(file, "batches", lambda *args: passes.append(args[1]) or batches(*args))
    reader = reader_of(two)

    for block in two.blocks(range(two.num_blocks)):
        reader.read_block(block, 1 << 20)

    assert passes == [0, 1, 2, 3, 0, 1, 2]
    reader.close()


def test_no_more_than_some_files_are_open_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("asyncdata.sources.same_file._MAX_OPEN_FILES", 2)
    paths = [str(write(tmp_path / str(number), 5)) for number in range(6)]
    blocks = ParquetSource(paths).open(BLOCK_BYTES)
    reader = reader_of(blocks)
    before = len(os.listdir("/proc/self/fd"))

    for block in blocks.blocks(range(6)) * 2:
        assert len(rows_of(reader, block)) == 5
        assert len(os.listdir("/proc/self/fd")) <= before + 4  # two for each
    reader.close()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.thorough
def test_rows_that_dictionaries_spare_the_file_are_delivered_whole(tmp_path):
    """Two texts of 50,000 characters, 400 times: the file has a few thousand bytes and says that rows are short."""
    texts = ["x" * 50_000, "y" * 50_000]
    path = write(tmp_path / "a.parquet", columns={"id": list(range(400)), "pad": [texts[i % 2] for i in range(400)]})

    for num_workers in (0, 1):
        with DataLoader(path, tokenize_fn=id_and_text, num_workers=num_workers, timeout_s=240) as loader:
            samples = loader.get_next_batch(400)
        assert sorted(ids(samples)) == list(range(400))
        assert all(sample.tokens[1:].tolist() == [ord("xy"[sample.tokens[0] % 2])] * 50_000 for sample in samples)


def test_a_row_that_is_too_long_is_a_bad_row(tmp_path):
    path = write(tmp_path / "a", columns={"id": [0, 1, 2], "pad": ["", "x" * 200, ""]})
    source = ParquetSource(str(path), max_row_bytes=100)

    knobs = {"num_workers": 0, "timeout_s": 240, "bad_rows": {"policy": "skip", "path": str(tmp_path / "q")}}
    with DataLoader(source, tokenize_fn=row_id, **knobs) as loader:
        assert sorted(ids(loader.get_next_batch(4))) == [0, 0, 2, 2]
        assert set(loader.statistics().dropped_total) == {"bad row AD108"}


def test_nested_rows_are_those_of_the_lines_that_they_were_made_from(test_data):
    with open(test_data / "gsm8k" / "test.chat.jsonl", encoding="utf-8") as file:
        expected = [json.loads(line) for line in file]
    blocks = ParquetSource(str(test_data / "gsm8k" / "test.chat.parquet")).open(32768)
    reader = reader_of(blocks)

    found = [row for block in blocks.blocks(range(blocks.num_blocks)) for row in rows_of(reader, block)]
    reader.close()

    assert [row["input"] for row in found] == [row["input"] for row in expected]
    assert [row["label"] for row in found] == [row["label"] for row in expected]


# The command line


def test_the_command_line_names_rows_by_their_number(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.parquet")

    assert cli.main(["order", "a.parquet", "--num", "2", "--no-shuffle"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "position\tpath\trow_number\tnum_bytes",
        "0:0:0\ta.parquet\t0\t17",
        "0:0:1\ta.parquet\t1\t54",
    ]
    assert cli.main(["sample", "a.parquet", "--position", "0:0:7"]) == 0
    assert "row number  " in capsys.readouterr().out
    assert cli.main(["sample", "a.parquet", "--position", "0:0:7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert json.loads(found["row"])["id"] == found["row_number"]
    assert cli.main(["order", "a.parquet", "--lines"]) == 1
    assert "--lines is for files of lines" in capsys.readouterr().err
