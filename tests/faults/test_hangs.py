"""What hangs, hangs no trainer, and the error names it; and no row is to blame for what the system has no more of."""

import errno
import itertools
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest
from structlog.testing import capture_logs

from asyncdata import DataLoader, IterableSource, Limits, RowShuffle
from asyncdata.errors import BadRowError, PrefetchTimeoutError, WorkerError
from tests.support.examples import each_value
from tests.support.faults import record, until
from tests.support.loading import NEVER_S, SHUFFLE, hangs_on_13, ids, is_starved_on_13, order_of, row_id, write_rows
from tests.support.parts import change
from tests.support.worker_fns import RunsShort

pytestmark = [pytest.mark.thorough, pytest.mark.faults]


TIMEOUT_S = 1.0
"""A row is tried twice, as the cause may be another row or none: it has this time twice."""


def told(of: str, error: Exception, seconds: float, *names: str, num_tries: int = 1) -> None:
    unnamed = [name for name in names if name not in str(error)]
    record("R13", of, hangs=1, unnamed=len(unnamed), beyond_timeout_s=max(0.0, seconds - num_tries * TIMEOUT_S))
    assert not unnamed, f"{unnamed} not in: {error}"


def told_by_the_timeout(of, loader, is_over, expected, *names):
    """A call for what is ``expected`` times out until ``is_over`` is set, and has consumed nothing."""
    began = time.monotonic()
    with pytest.raises(PrefetchTimeoutError) as caught:
        loader.get_next_batch(len(expected), timeout_s=TIMEOUT_S)
    seconds = time.monotonic() - began
    is_over.set()
    assert ids(loader.get_next_batch(len(expected), timeout_s=NEVER_S)) == expected
    told(of, caught.value, seconds, *names)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_row_that_hangs_is_named_and_the_samples_before_it_come(path, num_workers):
    wanted = order_of(path)
    before = wanted[: wanted.index(13)]
    settings: dict[str, Any] = {"shuffle": SHUFFLE, "limits": {"row_timeout_s": TIMEOUT_S}, "timeout_s": NEVER_S}
    with DataLoader(path, tokenize_fn=hangs_on_13, num_workers=num_workers, **settings) as loader:
        loader.start()
        began = time.monotonic()
        assert ids(loader.get_next_batch(len(before))) == before
        with pytest.raises(BadRowError, match="AD422") as caught:
            loader.get_next_batch(1)
        seconds = time.monotonic() - began

    assert caught.value.line == 14
    told(f"a row, {num_workers} workers", caught.value, seconds, f"{path}:14", "AD422", num_tries=2)


@pytest.fixture
def busy_core():
    """The core of :func:`is_starved_on_13` has two processes that never rest."""
    core = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, [{core}]); print(flush=True)\nwhile True: pass"
    with ExitStack() as stack:
        for _ in range(2):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE))
            stack.callback(process.kill)
            process.stdout.readline()
        yield


@pytest.mark.usefixtures("busy_core")
def test_a_row_that_waits_for_a_core_does_not_hang(path):
    knobs: dict[str, Any] = {"limits": Limits(row_timeout_s=TIMEOUT_S), "num_workers": 1, "timeout_s": NEVER_S}
    with DataLoader(path, tokenize_fn=is_starved_on_13, shuffle=False, **knobs) as loader:
        assert ids(loader.get_next_batch(60)) == list(range(60))
        assert loader.statistics().worker_restarts_total == 0


def test_a_row_that_hangs_without_a_worker_is_told_by_the_timeout(path):
    began, is_over = threading.Event(), threading.Event()

    def hangs(row: dict[str, Any]) -> list[int]:
        if row["id"] == 13:
            began.set()
            assert is_over.wait(NEVER_S)
        return [row["id"]]

    with DataLoader(path, tokenize_fn=hangs, shuffle=False, num_workers=0) as loader:
        assert began.wait(NEVER_S)
        told_by_the_timeout("a row, no worker", loader, is_over, list(range(40)), str(path), "tokenize")


def test_a_stream_that_hangs_is_told_by_the_timeout():
    is_over = threading.Event()

    def examples(_epoch: int) -> Any:
        for number in range(100):
            assert number != 50 or is_over.wait(NEVER_S)
            yield {"id": number}

    with DataLoader(IterableSource(examples), tokenize_fn=row_id, shuffle=False, num_workers=0) as loader:
        told_by_the_timeout("a stream", loader, is_over, list(range(60)), "read")


def test_a_disk_that_hangs_is_told_by_the_timeout(tmp_path, monkeypatch):
    path, is_over = write_rows(tmp_path / "rows.jsonl", 500), threading.Event()
    read, reads = os.pread, itertools.count(1)

    def pread(fd: int, num_bytes: int, offset: int) -> bytes:
        assert next(reads) < 10 or is_over.wait(NEVER_S)
        return read(fd, num_bytes, offset)

    with DataLoader(path, tokenize_fn=row_id, shuffle=SHUFFLE, num_workers=0) as loader:
        monkeypatch.setattr(os, "pread", pread)
        told_by_the_timeout("a disk", loader, is_over, order_of(path)[:400], "read")
    assert next(reads) > 10


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
