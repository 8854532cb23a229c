"""What hangs, hangs no trainer: a row, a stream, a disk. The error names it; how long that took is a figure."""

import itertools
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest

from asyncdata import DataLoader, IterableSource, Limits
from asyncdata.errors import BadRowError, PrefetchTimeoutError
from tests.support.figures import record
from tests.support.loading import NEVER_S, SHUFFLE, ids, order_of, write_rows
from tests.support.tokenize_fns import hangs_on_13, is_starved_on_13, row_id

pytestmark = [pytest.mark.thorough, pytest.mark.faults]

TIMEOUT_S = 1.0
"""A row is tried twice, as the cause may be another row or none: it has this time twice."""


def told(of: str, error: Exception, seconds: float, *names: str, num_tries: int = 1) -> None:
    unnamed = [name for name in names if name not in str(error)]
    record("R13", of, hangs=1, unnamed=len(unnamed), beyond_timeout_s=max(0.0, seconds - num_tries * TIMEOUT_S))
    assert not unnamed, f"{unnamed} not in: {error}"


def told_by_the_timeout(
    of: str, loader: DataLoader, is_over: threading.Event, expected: list[int], *names: str
) -> None:
    """A call for what is ``expected`` times out until ``is_over`` is set, and has consumed nothing."""
    began = time.monotonic()
    with pytest.raises(PrefetchTimeoutError) as caught:
        loader.get_next_batch(len(expected), timeout_s=TIMEOUT_S)
    seconds = time.monotonic() - began
    is_over.set()
    assert ids(loader.get_next_batch(len(expected), timeout_s=NEVER_S)) == expected
    told(of, caught.value, seconds, *names)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_row_that_hangs_is_named_and_the_samples_before_it_come(tmp_path, num_workers):
    path = write_rows(tmp_path / "rows.jsonl", 60)
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
    spin = (
        f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}}); print(flush=True)\nwhile True: pass"
    )
    with ExitStack() as stack:
        for _ in range(2):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE))
            stack.callback(process.kill)
            process.stdout.readline()
        yield


@pytest.mark.usefixtures("busy_core")
def test_a_row_that_waits_for_a_core_does_not_hang(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 60)
    knobs: dict[str, Any] = {"limits": Limits(row_timeout_s=TIMEOUT_S), "num_workers": 1, "timeout_s": NEVER_S}
    with DataLoader(path, tokenize_fn=is_starved_on_13, shuffle=False, **knobs) as loader:
        assert ids(loader.get_next_batch(60)) == list(range(60))
        assert loader.statistics().worker_restarts_total == 0


def test_a_row_that_hangs_without_a_worker_is_told_by_the_timeout(tmp_path):
    path, began, is_over = write_rows(tmp_path / "rows.jsonl", 60), threading.Event(), threading.Event()

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
