"""Looks at rows are what a loader delivers, wherever they lie."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import DataLoader, Shuffle
from asyncdata.cli.inspection.find_rows import RowLooks
from asyncdata.errors import ConfigError, SourceError
from asyncdata.types import Position
from tests.support.tokenize_fns import every_third_dropped, row_id

if TYPE_CHECKING:
    from pathlib import Path

SHUFFLES = {
    "many windows": Shuffle(block_bytes=512, window_blocks=4),
    "one window": Shuffle(),
    "as they lie": Shuffle(enabled=False, block_bytes=700, window_blocks=3),
}
NUM_ROWS = 200
ROWS = [{"id": number, "text": "é" * (number % 37)} for number in range(NUM_ROWS)]


def jsonl(folder: Path) -> str:
    lines = [json.dumps(row).encode() + b"\n" * (1 + (row["id"] % 9 == 0)) for row in ROWS]  # some blank lines
    (folder / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + b"".join(lines))
    return str(folder / "rows.jsonl")


def gzipped(folder: Path) -> str:
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
    return str(folder / "rows.jsonl.gz")


def array(folder: Path) -> str:
    (folder / "rows.json").write_text(json.dumps(ROWS), encoding="utf-8")
    return str(folder / "rows.json")


def parquet(folder: Path) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    parquet_module = pytest.importorskip("pyarrow.parquet")
    parquet_module.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet", row_group_size=60)
    return str(folder / "rows.parquet")


FORMATS = [jsonl, gzipped, array, parquet]


@pytest.mark.parametrize("shuffle", SHUFFLES.values(), ids=SHUFFLES)
@pytest.mark.parametrize("write", FORMATS)
def test_the_first_rows_are_those_that_the_loader_delivers_first(tmp_path, write, shuffle):
    path = write(tmp_path)
    with DataLoader(path, tokenize_fn=row_id, seed=7, shuffle=shuffle, num_workers=0) as loader:
        samples = loader.get_next_batch(NUM_ROWS, timeout_s=30)

    looks = list(RowLooks(path, row_id, seed=7, shuffle=shuffle).first(NUM_ROWS + 5))

    assert [(look.position, look.location) for look in looks] == [(each.position, each.source) for each in samples]
    assert [look.sample.tokens.tolist() for look in looks] == [each.tokens.tolist() for each in samples]
    assert [json.loads(look.raw)["id"] for look in looks] == [int(each.tokens[0]) for each in samples]


@pytest.mark.parametrize("write", FORMATS)
def test_a_row_is_found_by_its_position_and_by_its_place_in_the_file(tmp_path, write):
    shuffle = SHUFFLES["many windows"]
    looks = RowLooks(write(tmp_path), row_id, seed=7, shuffle=shuffle)

    for look in islice(looks.first(NUM_ROWS), 0, NUM_ROWS, 23):
        found = look.location
        place = found.line_number() if found.row_number is None else found.row_number
        for words in (f"{place}", f"{found.path}:{place}", f"{found.path.rpartition('/')[2]}:{place}"):
            assert looks.in_file(words).position == look.position
        assert looks.at(look.position).raw == look.raw


def test_a_row_is_found_in_its_own_file(tmp_path):
    paths = []
    for name in ("a", "b"):
        paths.append(str(tmp_path / f"{name}.jsonl"))
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"id": {n}, "of": "{name}"}}\n' for n in range(40)))
    looks = RowLooks(paths, shuffle=Shuffle(block_bytes=64, window_blocks=3))

    assert json.loads(looks.in_file("b.jsonl:18").raw) == {"id": 17, "of": "b"}
    assert json.loads(looks.in_file(f"{paths[0]}:40").raw) == {"id": 39, "of": "a"}
    for words, reason in (("7", "the data has 2 files; say which: .*a.jsonl:7"), ("c.jsonl:1", "no file of the data")):
        with pytest.raises(ConfigError, match=reason):
            looks.in_file(words)


@pytest.mark.parametrize("place", ["2", "4", "0", "rows.jsonl:9"])
def test_a_place_without_a_row_is_named(jsonl_file, place):
    path = jsonl_file([{"id": 1}, b"   ", {"id": 2}])

    with pytest.raises(ConfigError, match=r"there is no row at .*rows.jsonl:\d: it is blank, or beyond the end"):
        RowLooks(str(path)).in_file(place)


@pytest.mark.parametrize("write", [gzipped, array, parquet])
def test_a_number_beyond_the_end_is_named(tmp_path, write):
    with pytest.raises(ConfigError, match=f"there is no row at .*:{NUM_ROWS}: "):
        RowLooks(write(tmp_path)).in_file(f"{NUM_ROWS}")


@pytest.mark.parametrize("place", ["", "x", "rows.jsonl:", "rows.jsonl:x", "-1"])
def test_what_is_no_place_is_refused(jsonl_file, place):
    with pytest.raises(ConfigError, match="a row's place is written LINE or FILE:LINE"):
        RowLooks(str(jsonl_file([{"id": 1}]))).in_file(place)


@pytest.mark.parametrize("write", [jsonl, array])
def test_a_window_that_is_not_there_is_named(tmp_path, write):
    with pytest.raises(ConfigError, match="there is no window 99 in epoch 0"):
        RowLooks(write(tmp_path)).at(Position(0, 99, 0))


def test_a_look_says_why_a_row_is_no_sample_and_without_a_function_there_is_none(tmp_path):
    path = array(tmp_path)
    looks: list[Any] = list(RowLooks(path, every_third_dropped, shuffle=False).first(4))

    assert [look.dropped for look in looks] == ["tokenize_fn", "", "", "tokenize_fn"]
    assert next(RowLooks(path).first(1)).sample is None


def test_an_array_that_is_cut_off_is_named(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS)[:-30], encoding="utf-8")

    with pytest.raises(SourceError, match="AD120"):
        list(RowLooks(str(path)).first(NUM_ROWS))
