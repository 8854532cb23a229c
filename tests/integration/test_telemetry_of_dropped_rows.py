"""Rows that were dropped, and samples that were truncated: a bounded number of each reason can be read and searched."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncdata import BadRows, ChatTokenizeFn, Mix, Part, Position, Telemetry
from asyncdata.cli.main import main
from asyncdata.delivery.channel import Channel
from asyncdata.demo import tokenizer_folder
from asyncdata.telemetry.chunk_watch import ChunkWatch
from asyncdata.telemetry.reader import read
from asyncdata.telemetry.records import MAX_OF_REASON
from tests.support.chunks import chunk_of
from tests.support.html_page import read_page
from tests.support.loaders import make
from tests.support.loading import write_rows
from tests.support.tokenize_fns import every_third_dropped

if TYPE_CHECKING:
    from pathlib import Path

    from asyncdata.telemetry.reader import Run

NUM_ROWS = 120


@pytest.fixture
def path(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "run"


def run_of(source: Any, folder: Path, function: Any = every_third_dropped, **knobs: Any) -> Run:
    with make(source, function, epochs=1, batch_size=10, telemetry=folder, **knobs) as loader:
        assert sum(map(len, loader)) > 0
    return read(folder)


def page_of(folder: Path, page: Path) -> list[dict[str, Any]]:
    assert main(["report", str(folder), "-o", str(page)]) == 0
    return read_page(page.read_bytes()).data


@pytest.mark.parametrize("num_workers", [0, 1])
def test_dropped_rows_are_recorded_with_reason_place_line_and_start(path, folder, num_workers):
    run = run_of(path, folder, num_workers=num_workers)

    rows = run.dropped_rows()
    lines = path.read_text().splitlines()
    assert len(rows) == MAX_OF_REASON
    for row in rows:
        assert row.path == str(path)
        assert json.loads(lines[row.line - 1])["id"] % 3 == 0
        assert row.excerpt == lines[row.line - 1]
    assert len({row.place for row in rows}) == MAX_OF_REASON
    assert run.totals is not None
    assert {row.reason for row in rows} == set(run.totals.dropped)


def test_the_dropped_rows_of_a_mixture_have_their_own_file_and_part(tmp_path, folder):
    paths = {name: write_rows(tmp_path / f"{name}.jsonl", NUM_ROWS) for name in ("a", "b")}
    run = run_of(Mix({name: Part(path, when_done="leave") for name, path in paths.items()}), folder)

    rows = run.dropped_rows()
    assert {row.source for row in rows} == {"a", "b"}
    for row in rows:
        assert row.path == str(paths[row.source])
        assert json.loads(row.excerpt) == json.loads(paths[row.source].read_text().splitlines()[row.line - 1])
        assert json.loads(row.excerpt)["id"] % 3 == 0


def test_no_text_of_a_dropped_row_is_recorded_where_rows_are_not_shown(path, folder):
    run = run_of(path, folder, bad_rows=BadRows(excerpts=False))

    rows = run.dropped_rows()
    assert len(rows) == MAX_OF_REASON
    assert all(row.line > 0 and not row.excerpt for row in rows)


def test_a_dropped_row_of_a_compressed_file_is_recorded_by_its_number(tmp_path, path, folder):
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))

    rows = run_of(packed, folder).dropped_rows()

    assert len(rows) == MAX_OF_REASON
    assert all(row.row_number % 3 == 0 and not row.excerpt for row in rows)


def test_the_page_finds_dropped_rows_by_their_reason_and_their_text(path, folder, tmp_path):
    (reason,) = {row.reason for row in run_of(path, folder).dropped_rows()}

    shown = [one for one in page_of(folder, tmp_path / "page.html") if f"dropped: {reason}" in one["states"]]
    assert len(shown) == MAX_OF_REASON
    assert all(one["state"] == "dropped" and one["reason"] == reason for one in shown)
    texts = {one["texts"][0][1][0][0] for one in shown}
    assert texts <= set(path.read_text().splitlines())
    assert all(one["place"].startswith(f"{path}:") for one in shown)


def test_truncated_samples_are_recorded_beside_those_of_the_whole_run(tmp_path, folder):
    path = tmp_path / "chats.jsonl"
    chats = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x " * n}] for n in range(100)]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    function = ChatTokenizeFn(tokenizer_folder(), max_length=90, overlong="truncate_right")

    run = run_of(path, folder, function)
    samples = run.samples()
    plain = read_alone(path, tmp_path, function)

    truncated = [one for one in samples if "truncated" in one.notes]
    assert run.totals is not None
    assert 0 < len(truncated) <= run.totals.noted["truncated"]
    assert len(truncated) >= min(MAX_OF_REASON, run.totals.noted["truncated"])
    assert {one.num_tokens for one in truncated} == {90}
    assert {one.place for one in plain} <= {one.place for one in samples}
    shown = page_of(folder, tmp_path / "page.html")
    assert len([one for one in shown if "noted: truncated" in one["states"]]) == len(truncated)


def read_alone(path: Path, tmp_path: Path, function: Any) -> list[Any]:
    """The two samples that are kept of the whole run."""
    folder = tmp_path / "alone"
    with make(path, function, epochs=1, batch_size=10, telemetry=Telemetry(folder=str(folder), samples=2)) as loader:
        assert sum(map(len, loader)) > 0
    found = sorted(read(folder).samples(), key=lambda one: one.key)
    return found[:2]


# What it costs


def seen(watch: ChunkWatch, *rows: str, window: int = 0) -> None:
    watch.see(Channel(capacity=1000, max_bytes=1 << 20), chunk_of(*rows, first=Position(0, window, 0)))


def test_of_a_run_that_drops_most_of_its_rows_few_are_recorded():
    watch, num_windows, num_rows = ChunkWatch(8, lambda _: True), 200, 100
    found = []
    for window in range(num_windows):
        seen(watch, *["too long"] * num_rows, window=window)
        found += watch.dropped_rows()

    smallest = sorted(row.key for row in found)[:MAX_OF_REASON]
    most = 2 * MAX_OF_REASON * (1 + np.log(num_windows * num_rows / MAX_OF_REASON))
    assert MAX_OF_REASON <= len(found) <= most
    assert max(smallest) < 2**53 * 3 * MAX_OF_REASON / (num_windows * num_rows)  # of all rows, not of the first ones


def test_a_reason_for_each_row_is_not_kept_for_each():
    watch = ChunkWatch(8, lambda _: True)
    for window in range(10):
        seen(watch, *(f"too long: {window} {number}" for number in range(100)), window=window)

    assert 0 < len(watch.dropped_rows()) <= 200


def test_a_recorder_without_samples_records_no_dropped_rows(path, folder):
    run = run_of(path, folder)
    with make(
        path, every_third_dropped, epochs=1, batch_size=10, telemetry={"folder": f"{folder}-0", "samples": 0}
    ) as loader:
        assert sum(map(len, loader)) > 0

    assert run.dropped_rows()
    assert read(f"{folder}-0").dropped_rows() == []
