"""Rows are found where they are in the data, and are what a loader delivers."""

from __future__ import annotations

import gzip
import json
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import ConfigError, DataLoader, Position, RowShuffle, Shuffle, SourceError
from asyncdata.cli.inspection.find_rows import row_in_file
from asyncdata.cli.inspection.window_view import OpenedOrder
from tests.support.tokenize_fns import every_third_dropped, row_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
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


def orders(shuffles: list[Any]) -> list[tuple[Any, Any]]:
    """Each format with each shuffle, less what there is not: gzip has no order of single rows."""
    formats = (jsonl, gzipped, array, parquet)
    return [(write, shuffle) for write in formats for shuffle in shuffles if (write, shuffle) != (gzipped, "full")]


@pytest.fixture
def opened() -> Iterator[Callable[..., OpenedOrder]]:
    """Opens orders that are closed when the test is over."""
    with ExitStack() as stack:
        yield lambda *arguments, **knobs: stack.enter_context(
            OpenedOrder(*arguments, **{"cache": {"folder": ""}, **knobs})
        )


@pytest.mark.parametrize(("write", "shuffle"), orders([*SHUFFLES.values(), "full"]))
def test_the_first_rows_are_those_that_the_loader_delivers_first(tmp_path, opened, write, shuffle):
    path = write(tmp_path)
    knobs = {"seed": 7, "shuffle": shuffle, "cache": {"folder": ""}}
    with DataLoader(path, tokenize_fn=row_id, num_workers=0, **knobs) as loader:
        samples = loader.get_next_batch(NUM_ROWS, timeout_s=240)

    rows = list(opened(path, row_id, **knobs).first(NUM_ROWS + 5))

    assert [(row.position, row.location) for row in rows] == [(each.position, each.source) for each in samples]
    assert [row.sample.tokens.tolist() for row in rows] == [each.tokens.tolist() for each in samples]
    assert [json.loads(row.raw)["id"] for row in rows] == [int(each.tokens[0]) for each in samples]


@pytest.mark.parametrize(("write", "shuffle"), orders([SHUFFLES["many windows"], "full"]))
def test_a_row_is_found_by_its_position_and_by_its_place_in_the_file(tmp_path, opened, write, shuffle):
    order = opened(write(tmp_path), row_id, seed=7, shuffle=shuffle)

    for row in list(islice(order.first(NUM_ROWS), 0, NUM_ROWS, 23)):
        found = row.location
        place = found.line_number() if found.row_number is None else found.row_number
        for words in (f"{place}", f"{found.path}:{place}", f"{found.path.rpartition('/')[2]}:{place}"):
            assert row_in_file(order, words).position == row.position
        assert order.at(row.position).raw == row.raw


def test_a_row_is_found_in_its_own_file(tmp_path, opened):
    paths = []
    for name in ("a", "b"):
        paths.append(str(tmp_path / f"{name}.jsonl"))
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"id": {n}, "of": "{name}"}}\n' for n in range(40)))
    order = opened(paths, shuffle=Shuffle(block_bytes=64, window_blocks=3))

    assert json.loads(row_in_file(order, "b.jsonl:18").raw) == {"id": 17, "of": "b"}
    assert json.loads(row_in_file(order, f"{paths[0]}:40").raw) == {"id": 39, "of": "a"}
    for words, reason in (
        ("7", "the data has 2 files; say which: .*a.jsonl:7"),
        ("c.jsonl:1", "not a file of the data"),
    ):
        with pytest.raises(ConfigError, match=reason):
            row_in_file(order, words)


@pytest.mark.parametrize("place", ["2", "4", "0", "rows.jsonl:9"])
def test_a_place_without_a_row_is_named(jsonl_file, opened, place):
    path = jsonl_file([{"id": 1}, b"   ", {"id": 2}])

    with pytest.raises(ConfigError, match=r"there is no row at .*rows.jsonl:\d: it is blank, beyond the end, or left"):
        row_in_file(opened(str(path)), place)


def test_a_row_that_the_order_leaves_out_is_not_found(tmp_path, opened):
    order = opened(jsonl(tmp_path), shuffle=RowShuffle(method="none", stop=5))

    assert json.loads(row_in_file(order, "6").raw)["id"] == 4
    with pytest.raises(ConfigError, match="there is no row at .*:7: .* left out"):
        row_in_file(order, "7")


@pytest.mark.parametrize("write", [gzipped, array, parquet])
def test_a_number_beyond_the_end_is_named(tmp_path, opened, write):
    with pytest.raises(ConfigError, match=f"there is no row at .*:{NUM_ROWS}: "):
        row_in_file(opened(write(tmp_path)), f"{NUM_ROWS}")


@pytest.mark.parametrize("place", ["", "x", "rows.jsonl:", "rows.jsonl:x", "-1"])
def test_a_malformed_place_is_refused(jsonl_file, opened, place):
    with pytest.raises(ConfigError, match="a row's location is written LINE or FILE:LINE"):
        row_in_file(opened(str(jsonl_file([{"id": 1}]))), place)


@pytest.mark.parametrize("write", [jsonl, array])
def test_a_window_that_is_not_there_is_named(tmp_path, opened, write):
    with pytest.raises(ConfigError, match="there is no window 99 in epoch 0"):
        opened(write(tmp_path)).at(Position(0, 99, 0))


def test_windows_of_a_stream_are_read_in_any_order(tmp_path, opened):
    order = opened(gzipped(tmp_path), row_id, seed=7, shuffle=SHUFFLES["many windows"])
    rows = {row.position: row.raw for row in order.first(NUM_ROWS)}
    positions = sorted(rows)

    for position in (positions[-1], positions[0], positions[NUM_ROWS // 2], positions[-1]):
        assert order.at(position).raw == rows[position]


def test_a_row_that_is_no_sample_says_why_and_without_a_function_there_is_none(tmp_path, opened):
    path = array(tmp_path)
    rows: list[Any] = list(opened(path, every_third_dropped, shuffle=False).first(4))

    assert [row.dropped for row in rows] == ["tokenize_fn", "", "", "tokenize_fn"]
    assert next(opened(path).first(1)).sample is None


def test_an_array_that_is_cut_off_is_named(tmp_path, opened):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS)[:-30], encoding="utf-8")

    with pytest.raises(SourceError, match="AD120"):
        list(opened(str(path)).first(NUM_ROWS))
