"""Rows of Parquet that were copied for the row index: a damaged copy is never delivered, and is put right."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from asyncdata import DataLoader, RowShuffle
from tests.support.examples import each_value
from tests.support.loading import id_and_text

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

pytestmark = pytest.mark.thorough

NUM_ROWS = 600


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """Rows that are all of one length, so that one in another's place is as long as it should be."""
    path = tmp_path / "rows.parquet"
    columns = {"id": [1000 + row for row in range(NUM_ROWS)], "pad": [f"word {row:04d}" for row in range(NUM_ROWS)]}
    pq.write_table(pa.table(columns), path, row_group_size=70)
    return path


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def loader(path: Path, cache_dir: Path, shuffle: Any = "full", **knobs: Any) -> DataLoader:
    knobs = {"num_workers": 0, "buffer_size": 16, "cache": {"folder": str(cache_dir)}, **knobs}
    return DataLoader(str(path), tokenize_fn=id_and_text, shuffle=shuffle, **knobs)


def delivered(data: DataLoader, num_rows: int = NUM_ROWS) -> list[list[int]]:
    return [sample.tokens.tolist() for sample in data.get_next_batch(num_rows)]


def copies(cache_dir: Path) -> list[Path]:
    return sorted(cache_dir.glob("index/*.rows/*"))


def change(pattern: bytes, by: bytes) -> Callable[[Path], None]:
    def change(copy: Path) -> None:
        data = copy.read_bytes()
        changed = re.sub(pattern, by, data)
        assert len(changed) == len(data)
        assert changed != data
        copy.write_bytes(changed)

    return change


def swap_two_rows(copy: Path) -> None:
    data = copy.read_bytes()
    starts = [found.start() for found in re.finditer(rb'\{"id":', data)]
    stride = starts[1] - starts[0]
    assert {after - before for before, after in zip(starts, starts[1:], strict=False)} == {stride}
    first, second = data[:stride], data[stride : 2 * stride]
    copy.write_bytes(second + first + data[2 * stride :])


DAMAGES = {
    "a word is another one": change(rb'"word (\d)', rb'"Word \1'),
    "ids are those of other rows": change(rb'"id":1', rb'"id":2'),
    "rows are no JSON": change(rb'\{"id"', rb'{"id{'),
    "two rows changed places": swap_two_rows,
    "zeros, as after a power cut": change(rb"(?s).", b"\0"),
}


@pytest.mark.parametrize(("damage", "num_workers"), each_value(DAMAGES, [0, 2]))
def test_a_damaged_copy_is_never_delivered_and_is_put_right(parquet, cache_dir, damage, num_workers):
    with capture_logs() as logs, loader(parquet, cache_dir) as data:
        expected = delivered(data)
    assert not [log for log in logs if log["event"] == "index.copy_damaged"]
    before = [copy.read_bytes() for copy in copies(cache_dir)]
    assert before
    for copy in copies(cache_dir):
        damage(copy)
    with capture_logs() as logs, loader(parquet, cache_dir, num_workers=num_workers) as data:
        assert delivered(data) == expected
    assert [log["log_level"] for log in logs if log["event"] == "index.copy_damaged"][:1] == ["warning"]
    assert [copy.read_bytes() for copy in copies(cache_dir)] == before


@pytest.mark.parametrize("harm", [os.unlink, lambda copy: os.truncate(copy, 100)], ids=["removed", "cut"])
def test_a_copy_that_is_lost_during_a_run_costs_no_row(parquet, cache_dir, harm):
    with loader(parquet, cache_dir) as data:
        expected = delivered(data)
    with loader(parquet, cache_dir) as data:
        found = delivered(data, 10)
        for copy in copies(cache_dir):
            harm(copy)
        assert found + delivered(data, NUM_ROWS - 10) == expected


def test_a_copy_is_on_the_disk_before_the_index_says_so(parquet, cache_dir, monkeypatch):
    calls: list[str] = []

    def noting(name: str, really: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: Any, *rest: Any, **more: Any) -> Any:
            target = os.readlink(f"/proc/self/fd/{fd}") if isinstance(fd, int) else os.fspath(rest[0])
            calls.append(f"{name} {os.path.relpath(target, cache_dir / 'index')}")
            return really(fd, *rest, **more)

        return call

    for name in ("fsync", "replace", "pwrite"):
        monkeypatch.setattr(os, name, noting(name, getattr(os, name)))
    with loader(parquet, cache_dir) as data:
        delivered(data)

    steps = [re.sub(r"[0-9a-f]{32}|(?<=/)\d{12}|(?<=s)\.\d+$", "*", call) for call in calls]
    copied = ["fsync *.rows/*.rows*", "replace *.rows/*.rows", "fsync *.rows"]
    first = [*copied, "pwrite *.places", "pwrite *.index", "pwrite *.index"]  # rows, the header and the rest of a part
    last = ["pwrite *.places", "pwrite *.index", "fsync *.places", "fsync *.index"]
    assert steps == [*first, *copied, *last]


def test_what_a_killed_worker_left_half_written_goes_with_the_next_run_and_not_before(parquet, cache_dir):
    with loader(parquet, cache_dir, RowShuffle(method="slime")) as data:
        delivered(data)
        made = copies(cache_dir)
        left = made[0].with_name(f"{made[0].name}.12345")
        left.write_bytes(b"half")
        with loader(parquet, cache_dir) as other:
            delivered(other)
        assert left.exists(), "another run may be writing it"
    with loader(parquet, cache_dir) as data:
        delivered(data)
    assert copies(cache_dir) == made
