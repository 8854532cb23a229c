"""The system has no more memory, files, threads, processes or disk space for a while: no row is to blame for that."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from asyncdata import DataLoader, RowShuffle, WorkerError
from asyncdata.workers.pool import deadlines
from tests.support.faults import until
from tests.support.loading import NEVER_S, ids, write_rows
from tests.support.worker_fns import RunsShort

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.faults, pytest.mark.thorough]

NUM_ROWS = 60
RAISED = ["memory", "threads", "files", "disk", "disk, and another error", "processes", "a panic"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tries").mkdir()
    return tmp_path / "tries"


def make(path: Path, what: str, folder: Path, times: int, **knobs: Any) -> DataLoader:
    settings = {"shuffle": False, "timeout_s": NEVER_S, "epochs": 1, "bad_rows": {"policy": "skip", "max": None}}
    return DataLoader(path, tokenize_fn=RunsShort(what, str(folder), times), **(settings | knobs))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("what", RAISED)
def test_a_row_is_not_lost_for_want_of_anything(path, folder, what, num_workers):
    with capture_logs() as logs, make(path, what, folder, times=5, num_workers=num_workers) as loader:
        found = ids(loader.get_next_batch(NUM_ROWS))
        until(lambda: loader.statistics().worker_restarts_total == sum(log["event"] == "worker.short" for log in logs))
        now = loader.statistics()

    assert found == list(range(NUM_ROWS))
    assert (now.bad_rows_total, now.dropped_total) == (0, {})
    assert len(list(folder.iterdir())) >= 5
    assert not [log for log in logs if log["event"] == "row.bad"]
    short = [log for log in logs if log["event"] == "worker.short"]
    assert len(short) == now.worker_restarts_total
    assert bool(short) == (num_workers > 0)


def test_a_worker_that_aborts_for_want_of_memory_blames_no_row(path, folder):
    with make(path, "an abort", folder, times=3, num_workers=1) as loader:
        assert ids(loader.get_next_batch(NUM_ROWS)) == list(range(NUM_ROWS))
        assert loader.statistics().bad_rows_total == 0
        assert loader.statistics().worker_restarts_total == 3


WORDS = {
    "memory": "out of memory (MemoryError)",
    "files": "Too many open files",
    "threads": "can't start new thread",
    "an abort": "memory allocation of 8589934592 bytes failed",
}


@pytest.mark.parametrize(
    ("what", "num_workers"), [("memory", 0), ("files", 0), ("memory", 1), ("threads", 2), ("an abort", 1)]
)
def test_a_shortage_that_lasts_is_an_error_of_the_machine_and_the_row_is_delivered_later(
    path, folder, monkeypatch, what, num_workers
):
    monkeypatch.setattr(deadlines, "_SHORTAGE_S", 0.2)
    with make(path, what, folder, times=10**6, num_workers=num_workers) as loader:
        found: list[int] = []
        with pytest.raises(WorkerError) as caught:
            while True:
                found += ids(loader.get_next_batch(1))
        with pytest.raises(WorkerError):
            loader.get_next_batch(1)
        state = loader.state_dict()
        now = loader.statistics()

    message = str(caught.value)
    assert message.startswith("AD426 ")
    assert WORDS[what] in message
    assert f"{path}:14 (byte " in message
    assert "The machine is the cause, not a row" in message
    assert now.bad_rows_total == 0
    with make(path, what, folder, times=0, num_workers=num_workers) as loader:
        loader.load_state_dict(state, allow_changed=["tokenize_fn"])
        assert found + ids(loader.get_next_batch(NUM_ROWS - len(found))) == list(range(NUM_ROWS))


def test_what_the_row_says_is_not_shown_where_that_is_forbidden(path, folder, monkeypatch):
    monkeypatch.setattr(deadlines, "_SHORTAGE_S", 0.0)
    knobs = {"num_workers": 1, "bad_rows": {"excerpts": False}}
    with make(path, "disk, and another error", folder, times=10**6, **knobs) as loader:
        with pytest.raises(WorkerError, match=f"^AD426 {path}:14 ") as caught:
            loader.get_next_batch(NUM_ROWS)

    assert "No space left on device" in str(caught.value)
    assert "the helper file" not in str(caught.value)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_row_index_loses_no_row_for_want_of_anything(path, folder, num_workers):
    knobs = {"shuffle": "full", "seed": 3, "num_workers": num_workers}
    with make(path, "memory", folder, times=5, **knobs) as loader:
        found = ids(loader.get_next_batch(NUM_ROWS))

    assert sorted(found) == list(range(NUM_ROWS))


def test_a_shortage_while_the_index_is_made_names_the_row(path, folder, monkeypatch):
    monkeypatch.setattr(deadlines, "_SHORTAGE_S", 0.0)
    knobs = {"shuffle": RowShuffle(only_kept=True), "num_workers": 1}
    with (
        make(path, "memory", folder, times=10**6, **knobs) as loader,
        pytest.raises(WorkerError, match=f"^AD426 {path}:14 "),
    ):
        loader.get_next_batch(1)


def test_a_file_that_cannot_be_opened_for_want_of_descriptors_is_read_later(path, folder, monkeypatch):
    refused, really = [], os.open

    def refuse(name: Any, *rest: Any, **more: Any) -> int:
        if str(name) == str(path) and threading.current_thread() is not threading.main_thread() and len(refused) < 2:
            refused.append(name)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(name))

        return really(name, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with make(path, "nothing", folder, times=0, num_workers=0) as loader:
        assert ids(loader.get_next_batch(NUM_ROWS)) == list(range(NUM_ROWS))
    assert refused
