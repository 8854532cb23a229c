"""``DataLoader``: what a call that waits says and costs, how far is read ahead, and several callers at once."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import DataLoader, Limits, PrefetchTimeoutError, Sample, Telemetry
from asyncdata.telemetry.reader import read
from tests.support import worker_fns
from tests.support.faults import until
from tests.support.loaders import gated, make, num_waiting
from tests.support.loading import ids, line_of, order_of, write_rows
from tests.support.tokenize_fns import waits_for_a_file

if TYPE_CHECKING:
    from pathlib import Path


NUM_ROWS = 200


@pytest.fixture
def path(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


# Waiting


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_timeout_says_why_and_consumes_nothing(tmp_path, num_workers):
    first = order_of(write_rows(tmp_path / "gated.jsonl", NUM_ROWS))[40]
    path, gate = gated(tmp_path, first)
    expected = order_of(path)
    turn = expected.index(first)

    with make(path, waits_for_a_file, num_workers=num_workers, buffer_size=4) as loader:
        seen = ids(loader.get_next_batch(turn))
        until(lambda: loader.statistics().workers[0].state == "busy")
        with pytest.raises(PrefetchTimeoutError) as caught:
            loader.get_next_batch(5, timeout_s=0.3)
        gate.touch()
        seen += ids(loader.get_next_batch(50))

    line, offset = line_of(path, first)
    message, diagnosis = str(caught.value), caught.value.diagnosis
    assert re.match(r"AD510 no data for \d+\.\d s: ", message)
    assert "0 samples are ready, 5 more are needed" in message
    assert "stage: tokenize: the workers cannot keep up, or one hangs (busy for " in message
    assert re.search(r"workers: busy \d+\.\d", message)
    assert f"oldest row in flight: {path}:{line} (byte {offset})" in message
    assert "try: more num_workers, a larger buffer_size" in message
    assert diagnosis["oldest_row"]["byte_offset"] == offset
    assert diagnosis["statistics"]["workers"][0]["state"] == "busy"
    json.dumps(diagnosis)
    assert isinstance(caught.value, TimeoutError)
    assert seen == expected[: turn + 50]


def test_a_timeout_of_the_loader_holds_for_every_call(tmp_path):
    path, gate = gated(tmp_path, 0)
    with make(path, waits_for_a_file, shuffle=False, timeout_s=0.1, batch_size=2) as loader:
        with pytest.raises(PrefetchTimeoutError):
            loader.get_next_batch(1)
        with pytest.raises(PrefetchTimeoutError):
            loader.get_samples(1)
        with pytest.raises(PrefetchTimeoutError):
            next(iter(loader))
        gate.touch()
        assert ids(loader.get_next_batch(2, timeout_s=240)) == [0, 1]


def test_a_timeout_while_workers_start_says_so(path, tmp_path):
    slow = worker_fns.Opening("waits", str(tmp_path))
    with make(path, slow, num_workers=2) as loader:
        with pytest.raises(PrefetchTimeoutError, match="stage: start: the workers are "):
            loader.get_next_batch(1, timeout_s=0.5)
        (tmp_path / "open").touch()
        assert ids(loader.get_next_batch(3)) == order_of(path)[:3]


def test_a_timeout_of_nothing_takes_what_is_there(path):
    with make(path) as loader:
        until(lambda: loader.statistics().ready_samples >= 10)
        assert ids(loader.get_next_batch(10, timeout_s=0)) == order_of(path)[:10]


def test_it_reads_ahead_from_the_start_and_no_further_than_it_may(path):
    with make(path, buffer_size=10, dp_size=3) as loader:
        until(lambda: loader.statistics().ready_samples == 30)
        statistics = loader.statistics()
        assert (statistics.capacity_samples, statistics.in_flight_rows) == (30, 0)
        assert (statistics.samples_total, statistics.waits_total) == (0, 0)


def test_a_budget_of_bytes_bounds_what_is_read_ahead_and_stops_nothing(path):
    with make(path, limits=Limits(max_ready_bytes=1)) as loader:
        assert ids(loader.get_next_batch(300)) == order_of(path, 2)[:300]


# Several at once


@pytest.mark.thorough
def test_threads_get_disjoint_slices_and_nothing_is_lost(path):
    expected = order_of(path, 20)
    taken: list[list[int]] = []

    def work(loader: DataLoader, size: int) -> None:
        taken.extend(ids(loader.get_next_batch(size)) for _ in range(60))

    with make(path, num_workers=2, buffer_size=30) as loader:
        threads = [threading.Thread(target=work, args=(loader, size)) for size in (1, 5, 8, 20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    total = 60 * (1 + 5 + 8 + 20)
    starts = {tuple(expected[i : i + size]): i for size in (1, 5, 8, 20) for i in range(total)}
    assert sorted(number for batch in taken for number in batch) == sorted(expected[:total])
    assert all(tuple(batch) in starts for batch in taken), "a batch is a slice of D"


def test_waiting_threads_are_served_in_the_order_in_which_they_came(tmp_path):
    path, gate = gated(tmp_path, 0)
    taken: dict[int, list[int]] = {}

    def work(loader: DataLoader, number: int) -> None:
        taken[number] = ids(loader.get_next_batch(4))

    with make(path, waits_for_a_file, shuffle=False) as loader:
        threads = []
        for number in range(4):
            threads.append(threading.Thread(target=work, args=(loader, number)))
            threads[-1].start()
            until(lambda number=number: num_waiting(loader) == number + 1)
        gate.touch()
        for thread in threads:
            thread.join()

    assert taken == {number: list(range(4 * number, 4 * number + 4)) for number in range(4)}


def test_a_thread_that_gives_up_lets_the_next_one_pass(tmp_path):
    path, gate = gated(tmp_path, 0)
    taken = []
    with make(path, waits_for_a_file, shuffle=False) as loader:
        waiting = threading.Thread(target=lambda: taken.extend(ids(loader.get_next_batch(3))))
        with pytest.raises(PrefetchTimeoutError):
            loader.get_next_batch(1, timeout_s=0.05)
        waiting.start()
        gate.touch()
        waiting.join()

    assert taken == [0, 1, 2]


@pytest.mark.thorough
def test_it_may_be_used_inside_a_running_loop(path):
    async def main() -> list[int]:
        with make(path, num_workers=1) as loader:
            return ids(loader.get_next_batch(20))

    assert asyncio.run(main()) == order_of(path)[:20]


def test_loaders_may_be_nested_in_one_anothers_callbacks(path, tmp_path):
    """A tokenize function, a collate function and a filter each use a loader of their own."""
    other = write_rows(tmp_path / "other.jsonl", 50)

    with make(other) as inner:

        def tokenize(row: dict[str, Any]) -> dict[str, Any]:
            return {"input_ids": [row["id"]], "label": ids(inner.get_next_batch(1))}

        def collate(samples: list[Sample]) -> list[int]:
            return ids(inner.get_next_batch(len(samples)))

        def choose(buffer: list[Any], number: int) -> list[Any]:
            inner.get_next_batch(1)
            return buffer[:number]

        with make(path, tokenize, collate_fn=collate, buffer_filter=choose, batch_size=5, buffer_size=10) as outer:
            batch = outer.get_next_batch(5)
            outer.add_samples([[batch[0]]])
            assert outer.get_next_batch(1)[0] is batch[0]
            assert len(next(iter(outer))) == 5

        assert ids(batch) == order_of(path)[:5]
        assert [sample.label for sample in batch] == [[number] for number in order_of(other)[:5]]


def test_many_loaders_live_side_by_side(path):
    loaders = [make(path, seed=seed) for seed in range(5)]
    try:
        batches = [[ids(loader.get_next_batch(40)) for loader in loaders] for _ in range(2)]
    finally:
        for loader in loaders:
            loader.close()

    for seed in range(5):
        assert batches[0][seed] + batches[1][seed] == order_of(path, seed=seed)[:80]


@pytest.mark.thorough
def test_a_call_that_waits_is_counted_by_what_it_waits_for_while_it_lasts(tmp_path):
    gate, path, folder = tmp_path / "gate", tmp_path / "rows.jsonl", tmp_path / "run"
    path.write_text("".join(json.dumps({"id": row, "gate": str(gate)}) + "\n" for row in range(4)))
    telemetry = Telemetry(folder=str(folder), interval_s=0.05)

    with make(path, waits_for_a_file, num_workers=1, telemetry=telemetry) as loader, ThreadPoolExecutor(1) as pool:
        call = pool.submit(loader.get_next_batch, 1)
        try:
            until(lambda: loader.statistics().data_wait_seconds_total > 0.1)
            waits = loader.statistics().waits_total
            until(lambda: (totals := read(folder).totals) is not None and totals.wait_s.get("tokenize", 0.0) > 0.1)
        finally:
            gate.touch()
        assert len(call.result()) == waits == 1
        seconds = loader.statistics().data_wait_seconds_total

    totals = read(folder).totals
    assert totals is not None
    assert totals.waits == 1
    assert totals.first_s == totals.wait_s
    assert sum(totals.wait_s.values()) == pytest.approx(seconds)
