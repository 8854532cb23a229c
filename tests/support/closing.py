"""A loader that takes its time to close, and who waits for it meanwhile."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from asyncdata import AsyncDataLoader, DataLoader
from asyncdata.loader.service import Service
from tests.support.loading import NEVER_S

if TYPE_CHECKING:
    import pytest


def service_of(loader: DataLoader | AsyncDataLoader) -> Service:
    return loader._engine.service  # noqa: SLF001 - nothing public says whether it is alive


def is_alive(loader: DataLoader | AsyncDataLoader) -> bool:
    thread = service_of(loader)._thread  # noqa: SLF001 - as above
    return thread is not None and thread.is_alive()


def slow_to_close(
    loader: DataLoader | AsyncDataLoader, monkeypatch: pytest.MonkeyPatch
) -> tuple[threading.Event, threading.Event]:
    """Its thread ends only when the second event is set; the first says that it should."""
    should, may = threading.Event(), threading.Event()
    (transport,) = service_of(loader)._executor._transports  # noqa: SLF001 - closed last, in the service's thread
    close = transport.close

    def close_late() -> None:
        should.set()
        may.wait()
        close()

    monkeypatch.setattr(transport, "close", close_late)
    monkeypatch.setattr("asyncdata.loader.base._CLOSE_TIMEOUT_S", NEVER_S)
    monkeypatch.setattr(type(service_of(loader)).close, "__defaults__", (NEVER_S,))
    return should, may


def num_closing() -> int:
    """How many threads stand in a lock of closing, or wait for another thread to end."""
    waiting = {"_close", "join", "_wait_for_tstate_lock"}
    frames = sys._current_frames().values()  # noqa: SLF001 - nothing else tells where a thread stands
    return sum(frame.f_code.co_name in waiting for frame in frames)
