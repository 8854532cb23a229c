"""A file that is listed more than once, where that is allowed: its rows come as often, each copy at its own places."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import DataLoader, JsonArraySource, JsonlSource, ParquetSource, Shuffle

if TYPE_CHECKING:
    from pathlib import Path

NUM_ROWS = {"twice": 150, "once": 90}
WANTED = Counter({f"twice {i}": 2 for i in range(150)}) + Counter({f"once {i}": 1 for i in range(90)})
SMALL = Shuffle(block_bytes=512, window_blocks=4)


def labelled(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": [1, 2, 3], "label": row["id"]}


labelled.version = "1"  # type: ignore[attr-defined]


def rows_of(name: str) -> list[dict[str, str]]:
    return [{"id": f"{name} {i}"} for i in range(NUM_ROWS[name])]


def jsonl(folder: Path) -> JsonlSource:
    for name in NUM_ROWS:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(name)))
    return JsonlSource([str(folder / f"{name}.jsonl") for name in ("twice", "once", "twice")], allow_repeats=True)


def packed(folder: Path) -> JsonlSource:
    for name in NUM_ROWS:
        text = "".join(json.dumps(row) + "\n" for row in rows_of(name))
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return JsonlSource([str(folder / f"{name}.jsonl.gz") for name in ("twice", "once", "twice")], allow_repeats=True)


def array(folder: Path) -> JsonArraySource:
    for name in NUM_ROWS:
        (folder / f"{name}.json").write_text(json.dumps(rows_of(name)))
    return JsonArraySource([str(folder / f"{name}.json") for name in ("twice", "once", "twice")], allow_repeats=True)


def parquet(folder: Path) -> ParquetSource:
    pa, files = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name in NUM_ROWS:
        files.write_table(pa.Table.from_pylist(rows_of(name)), folder / f"{name}.parquet")
    return ParquetSource([str(folder / f"{name}.parquet") for name in ("twice", "once", "twice")], allow_repeats=True)


def labels(loop: Any) -> list[str]:
    return [sample.label for batch in loop for sample in batch]


def make(source: Any, **given: Any) -> DataLoader:
    return DataLoader(source, tokenize_fn=labelled, batch_size=7, num_workers=0, timeout_s=240, **given)


@pytest.mark.parametrize("source", [jsonl, packed, array, parquet])
def test_a_file_that_is_listed_twice_comes_twice_an_epoch(tmp_path: Path, source: Any) -> None:
    with make(source(tmp_path), shuffle=SMALL) as loader:
        epochs = [labels(loader) for _ in range(2)]

    assert [Counter(epoch) for epoch in epochs] == [WANTED] * 2
    assert epochs[0] != epochs[1]


@pytest.mark.thorough
@pytest.mark.parametrize("order", [SMALL, False, "full"])
def test_a_run_over_a_repeated_file_goes_on_where_it_was(tmp_path: Path, order: Any) -> None:
    knobs = {"shuffle": order, "cache": {"folder": str(tmp_path / "index")}, "epochs": 1}
    with make(jsonl(tmp_path), **knobs) as loader:
        batches = iter(loader)
        before = labels(islice(batches, 20))
        state = loader.state_dict()
        after = labels(batches)
    with make(jsonl(tmp_path), **knobs) as loader:
        loader.load_state_dict(state)
        assert labels(loader) == after
    assert Counter(before + after) == WANTED


@pytest.mark.thorough
def test_tokens_of_a_repeated_file_are_kept_and_read_again(tmp_path: Path) -> None:
    pytest.importorskip("xxhash")
    knobs = {"shuffle": SMALL, "cache": {"tokens": str(tmp_path / "tokens")}}
    with make(jsonl(tmp_path), **knobs) as loader:
        first = labels(loader)
    with make(jsonl(tmp_path), **knobs) as loader:
        assert labels(loader) == first
        assert loader.statistics().cached_rows_total == len(first) == WANTED.total()


def test_a_file_listed_twice_is_other_data_than_once(tmp_path: Path) -> None:
    twice = jsonl(tmp_path)
    once = JsonlSource(list(dict.fromkeys(twice.paths)), allow_repeats=True)

    assert twice.open(512).fingerprint()["digest"] != once.open(512).fingerprint()["digest"]
