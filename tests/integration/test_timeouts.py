"""How long calls may wait, as users say it; and what calls come to where the system has no room for one more thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncdata import AsyncDataLoader, ConfigError, DataLoader, LoaderClosedError, WorkerError
from tests.support.loading import NEVER_S, SHUFFLE, ids, write_rows
from tests.support.tokenize_fns import row_id

if TYPE_CHECKING:
    from pathlib import Path


def make(path: Path, **knobs: Any) -> DataLoader:
    return DataLoader(path, tokenize_fn=row_id, **{"shuffle": SHUFFLE, "num_workers": 0, "timeout_s": NEVER_S} | knobs)


@pytest.mark.parametrize("value", [float("inf"), 1e300, np.float32("inf")])
def test_a_call_may_wait_for_ever_by_infinity(tmp_path, value):
    with make(write_rows(tmp_path / "rows.jsonl", 30), timeout_s=value) as loader:
        assert len(loader.get_next_batch(3)) == 3
        loader.set_epoch(3)
        assert len(loader.get_next_batch(3, timeout_s=value)) == 3


@pytest.mark.parametrize("value", ["1", float("nan"), True])
def test_a_calls_timeout_that_is_no_number_is_named_and_nothing_is_consumed(tmp_path, value):
    with make(write_rows(tmp_path / "rows.jsonl", 30), shuffle=False) as loader:
        for num_done in (0, 5):  # with nothing ready, and with rows that are
            with pytest.raises(ConfigError, match="^`timeout_s` is a number of seconds, or None for no limit; got "):
                loader.get_next_batch(5, timeout_s=value)
            assert ids(loader.get_next_batch(5)) == list(range(num_done, num_done + 5))


def test_the_row_index_may_be_waited_for_for_ever_by_infinity(tmp_path):
    with make(write_rows(tmp_path / "rows.jsonl", 30), shuffle="full") as loader:
        assert loader.num_rows(timeout_s=float("inf")) == 30
        with pytest.raises(ConfigError, match="^`timeout_s` is a number of seconds"):
            loader.num_rows(timeout_s="1")


@pytest.mark.asyncio
async def test_the_awaited_calls_take_the_same(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 30)
    async with AsyncDataLoader(path, tokenize_fn=row_id, num_workers=0, timeout_s=float("inf")) as loader:
        assert len(await loader.get_next_batch(3)) == 3
        assert len(await loader.get_next_batch(3, timeout_s=float("inf"))) == 3
        with pytest.raises(ConfigError, match="^`timeout_s` is a number of seconds"):
            await loader.get_next_batch(3, timeout_s="1")


# No room for threads


@pytest.fixture
def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From here on the system has no room for one more of the threads that the loop starts; their names."""
    refused, start = [], threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if "AnyIO" in thread.name:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return refused


def test_workers_need_no_thread_of_the_trainers(tmp_path, no_more_threads):
    with make(write_rows(tmp_path / "rows.jsonl", 30), shuffle=False, num_workers=1) as loader:
        assert ids(loader.get_next_batch(60)) == 2 * list(range(30))
    assert not no_more_threads, "the trainer's process asked for no thread"


def test_without_workers_a_thread_that_cannot_be_started_is_named(tmp_path, no_more_threads):
    loader = make(write_rows(tmp_path / "rows.jsonl", 30))
    for _ in range(2):
        with pytest.raises(
            WorkerError, match="^AD426 the loader cannot continue: can't start new thread; raise the limit"
        ):
            loader.get_next_batch(3)
    loader.close()
    assert no_more_threads


@pytest.mark.asyncio
async def test_a_loader_is_closed_without_a_thread(tmp_path, no_more_threads):
    loader = AsyncDataLoader(write_rows(tmp_path / "rows.jsonl", 30), tokenize_fn=row_id, num_workers=1)
    assert len(await loader.get_next_batch(3)) == 3
    await loader.aclose()

    assert no_more_threads
    with pytest.raises(LoaderClosedError):
        await loader.get_next_batch(3)
