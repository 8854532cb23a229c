"""The system has no more memory, files, threads, processes or disk space for a while: no row is to blame for that."""

import errno
import os
import threading
from typing import Any

import pytest
from structlog.testing import capture_logs

from asyncdata import DataLoader, RowShuffle
from asyncdata.errors import WorkerError
from tests.support.combinations import each_value
from tests.support.faults import until
from tests.support.inner import change
from tests.support.loading import NEVER_S, ids
from tests.support.worker_fns import RunsShort

pytestmark = [pytest.mark.faults, pytest.mark.thorough]

NUM_ROWS = 60
ROWS = list(range(NUM_ROWS))
LASTS = 10**6
RAISED = ["memory", "threads", "files", "disk", "disk, and another error", "processes", "a panic"]


@pytest.fixture
def short(path):
    """A loader whose row 13 runs short of ``what``, so many times."""
    folder = path.with_name("tries")
    folder.mkdir()

    def make(what: str, times: int, **knobs: Any) -> DataLoader:
        settings = {"shuffle": False, "timeout_s": NEVER_S, "epochs": 1, "bad_rows": {"policy": "skip", "max": None}}
        return DataLoader(path, tokenize_fn=RunsShort(what, str(folder), times), **(settings | knobs))

    return make


@pytest.mark.parametrize(("what", "num_workers"), each_value(RAISED, [0, 2]))
def test_a_row_is_not_lost_for_want_of_anything(path, short, what, num_workers):
    with capture_logs() as logs, short(what, 5, num_workers=num_workers) as loader:
        found = ids(loader.get_next_batch(NUM_ROWS))
        until(lambda: loader.statistics().worker_restarts_total == sum(log["event"] == "worker.short" for log in logs))
        now = loader.statistics()

    assert found == ROWS
    assert (now.bad_rows_total, now.dropped_total) == (0, {})
    assert len(list(path.with_name("tries").iterdir())) >= 5
    assert not [log for log in logs if log["event"] == "row.bad"]
    assert bool(now.worker_restarts_total) == (num_workers > 0)


def test_a_worker_that_aborts_for_want_of_memory_blames_no_row(short):
    with short("an abort", 3, num_workers=1) as loader:
        assert ids(loader.get_next_batch(NUM_ROWS)) == ROWS
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
    path, short, monkeypatch, what, num_workers
):
    change(monkeypatch, shortage_s=0.2)
    with short(what, LASTS, num_workers=num_workers) as loader:
        found: list[int] = []
        with pytest.raises(WorkerError) as caught:
            while True:
                found += ids(loader.get_next_batch(1))
        with pytest.raises(WorkerError):
            loader.get_next_batch(1)
        state = loader.state_dict()
        assert loader.statistics().bad_rows_total == 0

    message = str(caught.value)
    assert message.startswith("AD426 ")
    for words in (WORDS[what], f"{path}:14 (byte ", "The machine is the cause, not a row"):
        assert words in message
    with short(what, 0, num_workers=num_workers) as loader:
        loader.load_state_dict(state, allow_changed=["tokenize_fn"])
        assert found + ids(loader.get_next_batch(NUM_ROWS - len(found))) == ROWS


@pytest.mark.parametrize(
    ("what", "knobs"),
    [
        pytest.param("disk, and another error", {"bad_rows": {"excerpts": False}}, id="what the row says is not shown"),
        pytest.param("memory", {"shuffle": RowShuffle(only_kept=True)}, id="while the index is made"),
    ],
)
def test_a_shortage_that_lasts_names_the_row(path, short, monkeypatch, what, knobs):
    change(monkeypatch, shortage_s=0.0)
    told = f"^AD426 {path}:14 "
    with short(what, LASTS, num_workers=1, **knobs) as loader, pytest.raises(WorkerError, match=told) as caught:
        loader.get_next_batch(NUM_ROWS)

    assert what == "memory" or "No space left on device" in str(caught.value)
    assert "the helper file" not in str(caught.value)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_row_index_loses_no_row_for_want_of_anything(short, num_workers):
    with short("memory", 5, shuffle="full", seed=3, num_workers=num_workers) as loader:
        assert sorted(ids(loader.get_next_batch(NUM_ROWS))) == ROWS


def test_a_file_that_cannot_be_opened_for_want_of_descriptors_is_read_later(path, short, monkeypatch):
    refused, really = [], os.open

    def refuse(name: Any, *rest: Any, **more: Any) -> int:
        if str(name) == str(path) and threading.current_thread() is not threading.main_thread() and len(refused) < 2:
            refused.append(name)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(name))

        return really(name, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with short("nothing", 0, num_workers=0) as loader:
        assert ids(loader.get_next_batch(NUM_ROWS)) == ROWS
    assert refused
