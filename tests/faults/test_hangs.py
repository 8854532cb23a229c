"""What hangs, hangs no trainer: a row, a stream, a disk. The error names it; how long that took is a figure."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

from asyncdata import AsyncDataError, BadRowError, DataLoader, IterableSource, PrefetchTimeoutError
from tests.support.faults import say
from tests.support.figures import record
from tests.support.loading import NEVER_S, SHUFFLE, ids, order_of, write_rows
from tests.support.tokenize_fns import hangs_on_13, row_id

pytestmark = [pytest.mark.thorough, pytest.mark.faults]

TIMEOUT_S = 1.0
"""A row is tried twice, as the cause may be another row or none: it has this time twice."""


def told(of: str, error: AsyncDataError, seconds: float, *names: str, num_tries: int = 1) -> None:
    """The error names what hangs."""
    unnamed = [name for name in names if name not in str(error)]
    record("R13", of, hangs=1, unnamed=len(unnamed), beyond_timeout_s=max(0.0, seconds - num_tries * TIMEOUT_S))
    say(f"{of}: told after {seconds:.2f} s, with a timeout of {TIMEOUT_S:g} s")
    assert not unnamed, f"{unnamed} not in: {error}"


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_row_that_hangs_is_named_and_the_samples_before_it_come(tmp_path, num_workers):
    path = write_rows(tmp_path / "rows.jsonl", 60)
    wanted = order_of(path)
    before = wanted.index(13)
    settings: dict[str, Any] = {"shuffle": SHUFFLE, "limits": {"row_timeout_s": TIMEOUT_S}, "timeout_s": NEVER_S}
    with DataLoader(path, tokenize_fn=hangs_on_13, num_workers=num_workers, **settings) as loader:
        loader.start()
        began = time.monotonic()
        found = ids(loader.get_next_batch(before))
        with pytest.raises(BadRowError, match="AD422") as caught:
            loader.get_next_batch(1)
        seconds = time.monotonic() - began

    assert found == wanted[:before]
    assert caught.value.line == 14
    told(f"a row, {num_workers} workers", caught.value, seconds, f"{path}:14", "AD422", num_tries=2)


def test_a_row_that_hangs_without_a_worker_is_told_by_the_timeout(tmp_path):
    path, began, is_over = write_rows(tmp_path / "rows.jsonl", 60), threading.Event(), threading.Event()

    def hangs(row: dict[str, Any]) -> list[int]:
        if row["id"] == 13:
            began.set()
            assert is_over.wait(NEVER_S)
        return [row["id"]]

    with DataLoader(path, tokenize_fn=hangs, shuffle=False, num_workers=0) as loader:
        assert began.wait(NEVER_S)
        since = time.monotonic()
        with pytest.raises(PrefetchTimeoutError) as caught:
            loader.get_next_batch(40, timeout_s=TIMEOUT_S)
        seconds = time.monotonic() - since
        is_over.set()
        assert ids(loader.get_next_batch(40, timeout_s=NEVER_S)) == list(range(40)), "nothing was consumed"
    told("a row, no worker", caught.value, seconds, str(path), "tokenize")


def test_a_stream_that_hangs_is_told_by_the_timeout():
    is_over = threading.Event()

    def examples(_epoch: int) -> Any:
        for number in range(100):
            assert number != 50 or is_over.wait(NEVER_S)
            yield {"id": number}

    with DataLoader(IterableSource(examples), tokenize_fn=row_id, shuffle=False, num_workers=0) as loader:
        began = time.monotonic()
        with pytest.raises(PrefetchTimeoutError) as caught:
            loader.get_next_batch(60, timeout_s=TIMEOUT_S)
        seconds = time.monotonic() - began
        is_over.set()
        assert ids(loader.get_next_batch(60, timeout_s=NEVER_S)) == list(range(60)), "nothing was consumed"
    told("a stream", caught.value, seconds, "read")


def test_a_disk_that_hangs_is_told_by_the_timeout(tmp_path, monkeypatch):
    path, is_over = write_rows(tmp_path / "rows.jsonl", 500), threading.Event()
    read, num_reads = os.pread, 0

    def pread(fd: int, num_bytes: int, offset: int) -> bytes:
        nonlocal num_reads
        num_reads += 1
        assert num_reads < 10 or is_over.wait(NEVER_S)
        return read(fd, num_bytes, offset)

    with DataLoader(path, tokenize_fn=row_id, shuffle=SHUFFLE, num_workers=0) as loader:
        monkeypatch.setattr(os, "pread", pread)
        began = time.monotonic()
        with pytest.raises(PrefetchTimeoutError) as caught:
            loader.get_next_batch(400, timeout_s=TIMEOUT_S)
        seconds = time.monotonic() - began
        is_over.set()
        assert ids(loader.get_next_batch(400, timeout_s=NEVER_S)) == order_of(path)[:400], "nothing was consumed"
    assert num_reads >= 10
    told("a disk", caught.value, seconds, "read")
