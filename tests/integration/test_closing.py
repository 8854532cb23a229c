"""``DataLoader``: forked and unclosed loaders, and what closing one ends, waits for and leaves."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import LoaderClosedError, LoaderForkedError
from asyncdata.prefetch.producer import Producer
from tests.support.closing import is_alive, num_closing, service_of, slow_to_close
from tests.support.faults import until
from tests.support.loaders import gated, make, num_waiting
from tests.support.loading import NEVER_S, ids, order_of, write_rows
from tests.support.tokenize_fns import waits_for_a_file

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_ROWS = 200


@pytest.fixture
def path(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


# Processes


def in_a_forked_child(function: Callable[[], None]) -> int:
    """The exit status of a forked child that runs ``function``: 0 if it returns, 1 if it raises, -14 if it hangs."""
    import signal

    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            function()
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_refused_and_the_parent_goes_on(path):
    with make(path, num_workers=1, batch_size=2) as loader:
        loader.get_next_batch(5)

        def use_it() -> None:
            calls: list[Callable[[], Any]] = [
                lambda: loader.get_next_batch(1),
                lambda: loader.get_samples(1),
                lambda: next(iter(loader)),
                lambda: loader.add_samples([]),
                lambda: loader.load_state_dict(state),
                lambda: loader.set_epoch(1),
                lambda: loader.start(),
            ]
            for call in calls:
                with pytest.raises(LoaderForkedError, match="^AD503 the loader was made in process"):
                    call()
            loader.close()
            loader.close()

        state = loader.state_dict()
        assert in_a_forked_child(use_it) == 0
        assert ids(loader.get_next_batch(5)) == order_of(path)[5:10]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_may_close_whatever_the_parents_threads_were_doing(path):
    """Here the lock is held for ever in the child, as the thread that holds it is not there."""
    with make(path) as loader:
        loader.get_next_batch(1)
        lock = loader._engine.coordinator._lock  # noqa: SLF001 - to be in the middle of a delivery
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with lock:
                held.set()
                done.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        try:
            assert in_a_forked_child(loader.close) == 0
        finally:
            done.set()
            holder.join()


UNCLOSED = """
import sys
from asyncdata import DataLoader
from tests.support.tokenize_fns import row_id

loader = DataLoader(sys.argv[1], tokenize_fn=row_id, num_workers=int(sys.argv[2]), buffer_size=50)
sys.stdout.write(str(len(loader.get_next_batch(5))))
if sys.argv[3] == "del":
    del loader
"""


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", ["0", "2"])
@pytest.mark.parametrize("way", ["del", "exit"])
def test_an_unclosed_loader_is_warned_about_and_does_not_delay_the_exit(path, num_workers, way):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", UNCLOSED, str(path), num_workers, way]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=NEVER_S, check=False)

    assert (done.returncode, done.stdout) == (0, "5")
    assert "ResourceWarning: unclosed DataLoader: use `with`, or call close()" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:unclosed DataLoader:ResourceWarning")
def test_a_loader_may_be_collected_by_its_own_thread_whatever_that_is_doing(path, monkeypatch):
    start = Producer.start
    monkeypatch.setattr(Producer, "start", lambda *arguments: gc.collect() and None or start(*arguments))
    loader = make(path, num_workers=1)
    loader.get_next_batch(1)
    thread = next(thread for thread in threading.enumerate() if thread.name == "asyncdata-service")
    gc.disable()
    try:
        cycle: list[Any] = [loader]
        cycle.append(cycle)
        loader.set_epoch(3)  # its thread is to begin anew, and collects
        del loader, cycle
        thread.join(NEVER_S / 2)
    finally:
        gc.enable()

    assert not thread.is_alive()


def test_a_loader_that_was_never_used_need_not_be_closed(path):
    loader = make(path)
    del loader


def test_a_loader_cannot_be_copied(path):
    with make(path) as loader:
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                copied(loader)


# Closing


def test_closing_ends_a_wait(tmp_path):
    path, gate = gated(tmp_path, 0)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            loader.get_next_batch(1, timeout_s=NEVER_S)
        except LoaderClosedError as error:
            caught.append(error)

    with make(path, waits_for_a_file, shuffle=False, num_workers=1) as loader:
        waiting = [threading.Thread(target=wait) for _ in range(3)]
        for thread in waiting:
            thread.start()
        until(lambda: num_waiting(loader) == 3)
        loader.close()
        for thread in waiting:
            thread.join(NEVER_S / 2)
    gate.touch()

    assert [str(error) for error in caught] == ["AD502 the loader was closed by close()"] * 3


def test_a_second_close_waits_for_the_first(path, monkeypatch):
    loader = make(path)
    loader.get_next_batch(1)
    should, may = slow_to_close(loader, monkeypatch)
    was_alive: list[bool] = []

    def close() -> None:
        loader.close()
        was_alive.append(is_alive(loader))

    first, second = threading.Thread(target=close), threading.Thread(target=close)
    first.start()
    assert should.wait(NEVER_S)
    second.start()
    until(lambda: not second.is_alive() or num_closing() == 2)
    may.set()
    first.join(NEVER_S)
    second.join(NEVER_S)

    assert was_alive == [False, False]


def test_a_close_that_was_interrupted_is_finished_by_the_next(path, monkeypatch):
    loader = make(path)
    loader.get_next_batch(1)
    service = service_of(loader)
    with monkeypatch.context() as patch:
        patch.setattr(service, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loader.close()

    loader.close()

    assert not is_alive(loader)


def interrupted() -> None:
    raise KeyboardInterrupt


def test_closing_while_workers_start_is_closing(path):
    for _ in range(3):
        loader = make(path, num_workers=2)
        loader.start()
        loader.close()


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_unclosed_loader_is_closed_even_if_warnings_are_errors(path, num_workers, monkeypatch):
    """The warning cannot leave ``__del__``; nothing may stay alive for it."""
    told = []
    with monkeypatch.context() as patched, warnings.catch_warnings():
        patched.setattr(sys, "unraisablehook", lambda unraisable: told.append(str(unraisable.exc_value)))
        warnings.simplefilter("error", ResourceWarning)
        loader = make(path, num_workers=num_workers)
        loader.get_next_batch(1)
        del loader
        gc.collect()

    assert told == ["unclosed DataLoader: use `with`, or call close()"]


def test_closing_does_not_wait_for_a_row_that_never_ends(tmp_path):
    """Inline, the thread is left; it ends here with its gate."""
    path, gate = gated(tmp_path, 0)
    loader = make(path, waits_for_a_file, shuffle=False)
    loader.start()
    until(lambda: loader.statistics().workers[0].state == "busy")
    loader.close()
    gate.touch()
