"""JSON arrays in the orders of single rows: the same rows as of JSONL, known by their number and their place."""

from __future__ import annotations

import gzip
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import JsonArraySource, RowShuffle
from asyncdata.errors import ConfigError
from tests.support.combinations import each_value
from tests.support.inner import change
from tests.support.loaders import make
from tests.support.loading import ids
from tests.support.streams import jsonl, write
from tests.support.tokenize_fns import id_and_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from asyncdata import DataLoader

NUM_ROWS = 300
ROWS = [
    {"id": row, "pad": "x" * (row * 37 % 300), "text": ['a "quote", a \\ and [brackets]}', {"deep": [row, {}]}]}
    for row in range(NUM_ROWS)
]
LAYOUTS: dict[str, Callable[[], bytes]] = {
    "compact": lambda: json.dumps(ROWS, separators=(",", ":")).encode(),
    "over many lines": lambda: b"\xef\xbb\xbf \n" + json.dumps(ROWS, indent=2).encode() + b"\r\n",
    "spaces, and long elements": lambda: (
        b" [\n\n" + b" ,\t".join(json.dumps(row, indent=1 + row["id"] % 9).encode() for row in ROWS) + b"\n ] "
    ),
}
SHUFFLES = {
    "full": "full",
    "the first 8": RowShuffle(stop=8),
    "the first 8 as they lie": RowShuffle(method="none", stop=8),
    "the last 20": RowShuffle(method="slime", first=-20),
    "train": RowShuffle(part="train"),
    "eval": RowShuffle(part="eval"),
    "kept": RowShuffle(only_kept=True),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    change(monkeypatch, bytes_of_an_index_block=700)


@pytest.fixture
def path(tmp_path) -> Path:
    return write(tmp_path / "rows.json", LAYOUTS["compact"]())


def loader(source: Any, shuffle: Any = "full", **knobs: Any) -> DataLoader:
    return make(source, id_and_text, shuffle=shuffle, buffer_size=16, cache={"folder": ""}, **knobs)


@pytest.mark.parametrize(("shuffle", "layout"), each_value(SHUFFLES, LAYOUTS.keys()))
def test_an_array_has_the_order_of_its_rows_as_lines(tmp_path, shuffle, layout):
    with loader(write(tmp_path / "rows.jsonl", jsonl(ROWS)), shuffle) as data:
        num_rows = data.num_rows()
        expected = [sample.tokens.tolist() for sample in data.get_next_batch(2 * num_rows)]

    text = LAYOUTS[layout]()
    with loader(write(tmp_path / "rows.json", text), shuffle) as data:
        assert data.num_rows() == num_rows
        samples = data.get_next_batch(2 * num_rows)
    assert [sample.tokens.tolist() for sample in samples] == expected
    assert [sample.source.row_number for sample in samples] == ids(samples)
    for place in (sample.source for sample in samples):
        assert json.loads(text[place.byte_offset : place.byte_offset + place.num_bytes])["id"] == place.row_number


def test_no_more_is_read_than_the_first_rows_where_only_they_are_asked_for(path):
    os.truncate(path, 30 * 700)

    with loader(path, RowShuffle(stop=8)) as data:
        assert sorted(ids(data.get_next_batch(8))) == list(range(8))
        assert data.num_rows() == 8


def test_an_element_that_is_too_long_is_a_bad_row(path):
    source = JsonArraySource(str(path), max_row_bytes=300)
    short = [row["id"] for row in ROWS if len(json.dumps(row, separators=(",", ":"))) <= 300]

    with loader(source, RowShuffle(method="none"), bad_rows="skip", epochs=1, batch_size=10) as data:
        assert [number for batch in data for number in ids(batch)] == short
        assert data.statistics().dropped_total == {"bad row AD108": NUM_ROWS - len(short)}


def test_a_compressed_array_is_refused_as_compressed_lines_are(tmp_path):
    path = write(tmp_path / "rows.json.gz", gzip.compress(LAYOUTS["compact"]()))

    with pytest.raises(ConfigError, match=r"rows\.json\.gz can only be read from front to back, and this shuffle"):
        loader(path)
