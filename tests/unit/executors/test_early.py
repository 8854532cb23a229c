"""The template that a loader's constructor starts: it loads while the trainer imports, and goes if nobody needs it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from asyncdata import ConfigError, DataLoader, SourceError, WorkerError
from asyncdata.executors.early import EarlyTemplate
from tests.support import worker_fns
from tests.support.executors import NEVER_S
from tests.support.loading import ids, write_rows
from tests.support.tokenize_fns import row_id

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def path(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", 50)


def until(condition: Callable[[], object]) -> None:
    """Until another process has done its part."""
    deadline = time.monotonic() + NEVER_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncdata")]


def test_the_function_is_loaded_before_anything_is_asked_and_once(path, tmp_path):
    starts = tmp_path / "starts"
    starts.mkdir()
    function = worker_fns.Opening("is counted", str(starts))
    with_loader = DataLoader(path, tokenize_fn=function, num_workers=2, shuffle=False)
    until(lambda: list(starts.iterdir()))
    (template,) = psutil.Process().children()
    with with_loader as loader:
        assert ids(loader.get_next_batch(20)) == list(range(20))
        assert psutil.Process().children() == [template]

    assert len(list(starts.iterdir())) == 1
    assert not template.is_running()


def test_a_loader_that_is_dropped_before_its_start_leaves_nothing_and_says_nothing(path):
    loader = DataLoader(path, tokenize_fn=row_id, num_workers=2)
    assert len(own_threads()) == 1

    del loader
    gc.collect()
    assert psutil.Process().children() == []
    until(lambda: own_threads() == [])


def test_so_does_one_that_is_closed_before_its_start(path):
    loader = DataLoader(path, tokenize_fn=row_id, num_workers=2)
    loader.close()
    loader.close()

    assert psutil.Process().children() == []
    until(lambda: own_threads() == [])


@pytest.mark.parametrize(
    ("source", "function", "knobs", "error"),
    [
        ("rows.jsonl", row_id, {"batch_size": -1}, ConfigError),
        ("nowhere.jsonl", row_id, {}, SourceError),
        ("rows.jsonl", lambda row: [row["id"]], {}, ConfigError),
        ("rows.jsonl", "tests.support.nowhere:fn", {}, ConfigError),
    ],
)
def test_a_constructor_that_fails_leaves_nothing(path, source, function, knobs, error):
    with pytest.raises(error):
        DataLoader(path.parent / source, tokenize_fn=function, num_workers=2, **knobs)

    assert psutil.Process().children() == []
    until(lambda: own_threads() == [])


def test_without_workers_nothing_is_started(path):
    with DataLoader(path, tokenize_fn=row_id, num_workers=0, shuffle=False) as loader:
        assert ids(loader.get_next_batch(3)) == [0, 1, 2]
        assert psutil.Process().children() == []


@pytest.mark.parametrize("num_workers", [0, -1, "two", 1.5])
def test_for_a_number_of_workers_that_is_none_nothing_is_started(num_workers):
    assert EarlyTemplate.for_workers(num_workers) is None


def test_one_that_dies_before_the_start_is_replaced(path):
    loader = DataLoader(path, tokenize_fn=row_id, num_workers=2, shuffle=False)
    (template,) = psutil.Process().children()
    template.kill()
    template.wait()
    with loader:
        assert ids(loader.get_next_batch(50)) == list(range(50))
        assert loader.statistics().worker_restarts_total == 1


def test_a_loader_may_be_made_in_a_thread_that_ends(path):
    made: list[DataLoader] = []
    function = "tests.support.tokenize_fns:row_id"
    maker = threading.Thread(
        target=lambda: made.append(DataLoader(path, tokenize_fn=function, num_workers=2, shuffle=False))
    )
    maker.start()
    maker.join()
    with made[0] as loader:
        assert ids(loader.get_next_batch(50)) == list(range(50))
        assert loader.statistics().worker_restarts_total == 0


def test_what_takes_time_is_imported_after_the_template_has_begun():
    heavy = "{'numpy', 'structlog', 'tokenizers', 'asyncio', 'jinja2'}"
    code = f"import sys; from asyncdata import DataLoader, PromptTokenizeFn; assert not {heavy} & set(sys.modules)"

    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_function_that_fails_after_rows_were_read_is_an_error_at_every_call(path, tmp_path):
    function = worker_fns.Opening("waits and raises", str(tmp_path))
    with DataLoader(path, tokenize_fn=function, num_workers=2, timeout_s=NEVER_S) as loader:
        until(lambda: loader.statistics().in_flight_rows)
        (tmp_path / "open").touch()
        for _ in range(2):
            with pytest.raises(WorkerError, match="^AD426 the tokenize function cannot be opened: FileNotFoundError"):
                loader.get_next_batch(1)
