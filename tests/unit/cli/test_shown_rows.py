"""The rows that ``order``, ``sample`` and ``inspect`` show are those that a loader delivers, in its order."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from asyncdata import DataLoader, JsonlSource, LengthGrouping, RowShuffle, Shuffle, SoftPacking
from asyncdata.xtuner import XTunerPacking
from tests.support.inner import change
from tests.support.parts import OrderView
from tests.support.tokenize_fns import row_id

NUM_ROWS = 120
ROWS = [{"id": number, "pad": "é" * (number % 37)} for number in range(NUM_ROWS)]
ROW_ID = ("--tokenize-fn", "tests.support.tokenize_fns:row_id")
TWO_THIRDS = ("--tokenize-fn", "tests.support.tokenize_fns:every_third_dropped")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def jsonl(folder):
    """With a mark at its beginning, blank lines, carriage returns, and no end of its last line."""
    lines = [json.dumps(row).encode() + b"\r" * (row["id"] % 2) + b"\n" * (1 + (row["id"] % 9 == 0)) for row in ROWS]
    (folder / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + b"".join(lines).rstrip())
    return str(folder / "rows.jsonl")


def gzipped(folder):
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
    return str(folder / "rows.jsonl.gz")


def array(folder):
    (folder / "rows.json").write_text(json.dumps(ROWS), encoding="utf-8")
    return str(folder / "rows.json")


def parquet(folder):
    pyarrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    writer.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet", row_group_size=50)
    return str(folder / "rows.parquet")


def in_order(name, settings):
    return "--loader", f"{name}={json.dumps(settings)}"


WINDOWS: Any = (("--block-bytes", "512", "--window-blocks", "4"), Shuffle(block_bytes=512, window_blocks=4))
FULL: Any = (("--shuffle", "full"), "full")
SLIMES, KEYED = {"method": "slime", "stop": 90}, {"method": "keyed", "part": "eval", "train_ratio": 0.7}
ORDERS: dict[str, Any] = {
    "lines in windows": (jsonl, *WINDOWS),
    "lines in one window": (jsonl, (), True),
    "lines as they lie": (jsonl, ("--no-shuffle", "--block-bytes", "700"), Shuffle(enabled=False, block_bytes=700)),
    "lines longer than blocks": (jsonl, ("--block-bytes", "16"), Shuffle(block_bytes=16)),
    "all lines": (jsonl, *FULL),
    "lines in slime's order": (jsonl, in_order("shuffle", SLIMES), RowShuffle(**SLIMES)),
    "a part of the lines": (jsonl, in_order("shuffle", KEYED), RowShuffle(**KEYED)),
    "a gzip in windows": (gzipped, *WINDOWS),
    "an array in windows": (array, *WINDOWS),
    "all of an array": (array, *FULL),
    "Parquet in windows": (parquet, *WINDOWS),
    "all of Parquet": (parquet, *FULL),
}


def delivered(source, *, epochs=1, **knobs):
    knobs = {"tokenize_fn": row_id, "num_workers": 0, "seed": 7, "timeout_s": 240, **knobs}
    with DataLoader(source, epochs=epochs, batch_size=1, collate_fn=list, **knobs) as loader:
        batches = [sample for _ in range(epochs) for batch in loader for sample in batch]
    return [piece.sample for pack in batches for piece in pack] if "packing" in knobs else batches


def place_of(sample):
    """As ``order`` prints it."""
    source = sample.source
    number = {"byte_offset": source.byte_offset, "line": source.line_number()}
    place = number if source.row_number is None else {"row_number": source.row_number}
    return {"position": str(sample.position), "path": source.path, "num_bytes": source.num_bytes, **place}


@pytest.mark.parametrize(("write", "options", "shuffle"), ORDERS.values(), ids=ORDERS)
def test_rows_are_shown_as_a_loader_delivers_them(here, run_json, write, options, shuffle):
    path = write(here)
    samples = delivered(path, epochs=2, shuffle=shuffle)
    words = (path, "--seed", 7, *options)
    lines = ["--lines"] if write is jsonl else []

    found = [run_json("order", *words, "--num", 0, "--epoch", epoch, *lines) for epoch in (0, 1)]
    assert sum(found, []) == [place_of(sample) for sample in samples]

    # Any of them, in any order, by position, and by the place in the file.
    some = [*samples[:: len(samples) // 4], samples[0]]
    *rows, total = run_json("inspect", *words, *ROW_ID, *(f"--position={each.position}" for each in some))
    assert [shown_row(row) for row in rows] == [(str(each.position), int(each.tokens[0])) for each in some]
    assert total["total"]["num_samples"] == len(some)
    of_epoch_0 = [each for each in some if each.position.epoch == 0]
    *rows, _ = run_json("inspect", *words, *ROW_ID, *(f"--row={line_of(each)}" for each in of_epoch_0))
    assert [shown_row(row) for row in rows] == [(str(each.position), int(each.tokens[0])) for each in of_epoch_0]

    # One of the first epoch and one of a later one, by its number.
    for number in (len(samples) // 2 - 1, len(samples) - 1):
        (row,) = run_json("sample", *words, "--ordinal", number)
        assert {name: row[name] for name in place_of(samples[number])} == place_of(samples[number])
        assert json.loads(row["row"])["id"] == samples[number].tokens[0]


def shown_row(row):
    """Its position, and its token."""
    ((piece,),) = [text["pieces"] for text in row["texts"]]
    return row["position"], int(piece["text"])


def line_of(sample):
    place = place_of(sample)
    return f"{place['path']}:{place.get('line', place.get('row_number'))}"


PACKS = [*in_order("packing", {"SoftPacking": {"max_length": 8}}), *in_order("plan_packs", True)]
PACKS += [*in_order("batch_size", 1), *in_order("shuffle", {"method": "keyed"})]
PACKED: dict[str, Any] = {"packing": SoftPacking(max_length=8), "plan_packs": True, "shuffle": "full"}
XTUNER = [*in_order("packing", {"XTunerPacking": {"max_length": 8, "seed": 5}}), *in_order("batch_size", 1)]
PLANNED: dict[str, Any] = {
    "only rows that yield a sample": (
        in_order("shuffle", {"method": "keyed", "only_kept": True}),
        {"shuffle": RowShuffle(only_kept=True)},
    ),
    "planned packs": (PACKS, PACKED),
    "planned packs of like length": (
        [*PACKS, *in_order("length_grouping", {"window": 4})],
        {**PACKED, "length_grouping": LengthGrouping(window=4)},
    ),
    "XTuner's packs": ([*XTUNER, *in_order("shuffle", True)], {"packing": XTunerPacking(max_length=8, seed=5)}),
}


@pytest.mark.parametrize(("settings", "knobs"), PLANNED.values(), ids=PLANNED)
def test_an_order_that_depends_on_samples_is_that_of_the_loader(here, run_json, settings, knobs):
    path = jsonl(here)
    samples = delivered(path, **{"tokenize_fn": TWO_THIRDS[1], **knobs})
    found = run_json("order", path, "--seed", 7, *TWO_THIRDS, "--num", 0, *settings)
    assert len(found) == NUM_ROWS * 2 // 3
    assert [row["position"] for row in found] == [str(sample.position) for sample in samples]
    assert [row["byte_offset"] for row in found] == [sample.source.byte_offset for sample in samples]


@pytest.mark.parametrize("write", [array, parquet])
def test_a_row_number_beyond_the_end_is_named(here, run_json, write):
    path = write(here)
    (found,) = run_json("inspect", path, *ROW_ID, "--row", NUM_ROWS, status=1)
    assert f"there is no row at {path}:{NUM_ROWS}: " in found["error"]["message"]


def test_a_row_that_is_too_long_is_not_read(jsonl_file):
    source = JsonlSource(str(jsonl_file([{"id": 1}, {"id": 1, "text": "x" * 500}])), max_row_bytes=100)
    short, long = OrderView(source, row_id, shuffle=False).rows()
    assert (len(short.raw) > 0, long.raw) == (True, b"")
    assert str(long.fault).startswith("AD108 ")


def test_a_row_index_that_a_run_has_made_is_used(here, run_json, monkeypatch):
    path, cache = jsonl(here), {"folder": str(here / "kept")}
    samples = delivered(path, shuffle="full", cache=cache)
    change(monkeypatch, index_blocks=lambda *_: pytest.fail("the rows were counted again"))
    (found,) = run_json("order", path, *FULL[0], "--seed", 7, "--num", 1, *in_order("cache", cache))
    assert found["position"] == str(samples[0].position)
