"""JSON arrays in the orders of single rows: the same rows as of JSONL, known by their number and their place."""

from __future__ import annotations

import gzip
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import (
    BadRowError,
    Cache,
    ConfigError,
    DataLoader,
    JsonArraySource,
    JsonlSource,
    RowShuffle,
    SoftPacking,
)
from asyncdata.sources.text.json_array_reader import Elements
from tests.support.combinations import each_value
from tests.support.tokenize_fns import id_and_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
    monkeypatch.setattr("asyncdata.loader.opening._INDEX_BLOCK_BYTES", 700)


@pytest.fixture
def lines(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


def array_at(path: Path, layout: str = "compact") -> Path:
    path.write_bytes(LAYOUTS[layout]())
    return path


def loader(source: Any, shuffle: Any = "full", function: Any = id_and_text, **knobs: Any) -> DataLoader:
    source = source if isinstance(source, JsonArraySource | JsonlSource | list) else str(source)
    knobs = {"num_workers": 0, "buffer_size": 16, "cache": {"folder": ""}, **knobs}
    return DataLoader(source, tokenize_fn=function, shuffle=shuffle, **knobs)


def ids(samples: list[Any]) -> list[int]:
    return [int(sample.tokens[0]) for sample in samples]


@pytest.mark.parametrize(("shuffle", "layout"), each_value(SHUFFLES, LAYOUTS.keys()))
def test_an_array_has_the_order_of_its_rows_as_lines(tmp_path, lines, shuffle, layout):
    path = array_at(tmp_path / "rows.json", layout)
    with loader(lines, shuffle) as data:
        num_rows = data.num_rows()
        expected = [sample.tokens.tolist() for sample in data.get_next_batch(2 * num_rows)]

    with loader(path, shuffle) as data:
        assert data.num_rows() == num_rows
        samples = data.get_next_batch(2 * num_rows)
        assert [sample.tokens.tolist() for sample in samples] == expected
        assert [sample.source.row_number for sample in samples] == ids(samples)
        text = path.read_bytes()
        for sample in samples:
            place = sample.source
            assert json.loads(text[place.byte_offset : place.byte_offset + place.num_bytes])["id"] == place.row_number


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [1, 2])
def test_it_does_not_depend_on_workers_and_files_of_lines_and_arrays_go_together(tmp_path, lines, num_workers):
    texts = [json.dumps(row) for row in ROWS]
    paths = [tmp_path / "a.json", tmp_path / "b.jsonl", tmp_path / "empty.json", tmp_path / "c.json"]
    paths[0].write_text(f"[{', '.join(texts[:120])}]", encoding="utf-8")
    paths[1].write_text("\n".join(texts[120:140]), encoding="utf-8")
    paths[2].write_text("[ ]\n", encoding="utf-8")
    paths[3].write_text(json.dumps(ROWS[140:], indent=3), encoding="utf-8")
    with loader(lines, "full") as data:
        expected = ids(data.get_next_batch(2 * NUM_ROWS))

    with loader([str(path) for path in paths], "full", num_workers=num_workers) as data:
        samples = data.get_next_batch(2 * NUM_ROWS)

    assert ids(samples) == expected
    assert {s.source.row_number for s in samples if s.source.path.endswith("c.json")} == set(range(160))


@pytest.mark.thorough
@pytest.mark.parametrize("shuffle", [RowShuffle(method="none"), "full", RowShuffle(part="train")])
def test_a_resumed_run_goes_on_as_the_first_one_did_and_finds_the_index(tmp_path, shuffle, monkeypatch):
    path, cache_dir = array_at(tmp_path / "rows.json"), str(tmp_path / "kept")
    with loader(path, shuffle, cache=Cache(folder=cache_dir)) as data:
        data.get_next_batch(33)
        state = json.loads(json.dumps(data.state_dict()))
        expected = ids(data.get_next_batch(400))

    scanned: list[int] = []

    def noting(self: Elements, fd: int, start: int, stop: int) -> None:
        scanned.append(stop)
        really(self, fd, start, stop)

    really = Elements.read_to
    monkeypatch.setattr(Elements, "read_to", noting)
    with loader(path, shuffle, cache=Cache(folder=cache_dir)) as data:
        data.load_state_dict(state)
        assert ids(data.get_next_batch(400)) == expected
    assert set(scanned) == {700}, "the first block, for the fixed row of the snapshot"


def test_packs_can_be_planned_over_an_array(tmp_path, lines):
    packs = {}
    for path in (array_at(tmp_path / "rows.json"), lines):
        packing = {
            "packing": SoftPacking(max_length=400, across_epochs=False),
            "plan_packs": True,
            "batch_size": 2,
            "epochs": 1,
        }
        with loader(path, "full", **packing) as data:
            packs[path.suffix] = [[ids(pack) for pack in batch] for batch in data]

    assert packs[".json"] == packs[".jsonl"]
    assert packs[".json"]


def test_no_more_is_read_than_the_first_rows_where_only_they_are_asked_for(tmp_path):
    path = array_at(tmp_path / "rows.json")
    os.truncate(path, 30 * 700)

    with loader(path, RowShuffle(stop=8)) as data:
        assert sorted(ids(data.get_next_batch(8))) == list(range(8))
        assert data.num_rows() == 8


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_element_is_named_by_its_number_and_place(tmp_path, num_workers):
    texts = [json.dumps(row) for row in ROWS]
    texts[211] = '{"id": nothing}'
    path = tmp_path / "rows.json"
    path.write_text(f"[{','.join(texts)}]", encoding="utf-8")
    byte = path.read_text(encoding="utf-8").index(texts[211])

    for shuffle in (RowShuffle(method="none"), RowShuffle(method="none", first=5)):
        with loader(path, shuffle, num_workers=num_workers) as data, pytest.raises(BadRowError) as caught:
            data.get_next_batch(NUM_ROWS)
        found = caught.value
        assert (found.code, found.path, found.row_number, found.byte_offset) == ("AD101", str(path), 211, byte)

    with loader(path, RowShuffle(method="none", first=5), num_workers=num_workers, bad_rows="skip") as data:
        assert ids(data.get_next_batch(294)) == [*range(5, 211), *range(212, NUM_ROWS)]


def test_an_element_that_is_too_long_is_a_bad_row(tmp_path):
    path = array_at(tmp_path / "rows.json")
    source = JsonArraySource(str(path), max_row_bytes=300)
    short = [row["id"] for row in ROWS if len(json.dumps(row, separators=(",", ":"))) <= 300]

    with loader(source, RowShuffle(method="none"), bad_rows="skip", epochs=1, batch_size=10) as data:
        assert [number for batch in data for number in ids(batch)] == short
        assert data.statistics().dropped_total == {"bad row AD108": NUM_ROWS - len(short)}


def test_a_compressed_array_is_refused_as_compressed_lines_are(tmp_path):
    path = tmp_path / "rows.json.gz"
    path.write_bytes(gzip.compress(LAYOUTS["compact"]()))

    with pytest.raises(ConfigError, match=r"rows\.json\.gz can only be read from front to back, and this shuffle"):
        loader(path)
