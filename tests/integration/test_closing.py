"""``DataLoader``: forked and unclosed loaders, and what closing one ends, waits for and leaves."""

import gc
import os
import signal
import threading
from typing import Any
from unittest.mock import Mock

import pytest

from asyncdata.read_ahead.source import ReadAhead
from tests.support.closing import is_alive, service_of
from tests.support.faults import until
from tests.support.loaders import gated, make
from tests.support.loading import NEVER_S
from tests.support.tokenize_fns import waits_for_a_file


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
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                loader.close()
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        done.set()
        holder.join()
        assert status == 0


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:unclosed DataLoader:ResourceWarning")
def test_a_loader_may_be_collected_by_its_own_thread_whatever_that_is_doing(path, monkeypatch):
    start = ReadAhead.start
    monkeypatch.setattr(ReadAhead, "start", lambda *arguments: gc.collect() and None or start(*arguments))
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


def test_a_close_that_was_interrupted_is_finished_by_the_next(path, monkeypatch):
    loader = make(path)
    loader.get_next_batch(1)
    with monkeypatch.context() as patch:
        patch.setattr(service_of(loader), "close", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            loader.close()

    loader.close()

    assert not is_alive(loader)


def test_closing_while_workers_start_is_closing_and_before_the_start_it_is_not_needed(path):
    for _ in range(3):
        loader = make(path, num_workers=2)
        loader.start()
        loader.close()
    del loader
    make(path)  # what was never used need not be closed


def test_closing_does_not_wait_for_a_row_that_never_ends(tmp_path):
    """Inline, the thread is left; it ends here with its gate."""
    path, gate = gated(tmp_path, 0)
    loader = make(path, waits_for_a_file, shuffle=False)
    loader.start()
    until(lambda: loader.statistics().workers[0].state == "busy")
    loader.close()
    gate.touch()
