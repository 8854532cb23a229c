"""Threads that call code in C++, such as torch's: the process waits for them when it ends."""

from __future__ import annotations

import ctypes
import signal
import threading
import time
import weakref
from collections.abc import Callable

from asyncdata.core.log import get_logger
from asyncdata.core.threads import started

_EXIT_TIMEOUT_S = 60.0
_log = get_logger(__name__)
_awaited: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()
"""The threads, and what is said of one that does not end."""


def started_and_awaited(target: Callable[[], object], name: str, if_stuck: str) -> threading.Thread:
    """As :func:`~asyncdata.core.threads.started`.

    :param if_stuck: what is logged if the thread is still there at the end of the process.
    """
    thread = started(target, name)
    _awaited[thread] = if_stuck
    return thread


def end_all() -> None:
    """At exit, after loaders have ended theirs: wait for the threads, up to a minute for all of them together."""
    until = time.monotonic() + _EXIT_TIMEOUT_S
    for thread, message in list(_awaited.items()):
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            _freeze(thread)
            _log.warning("process.left_thread", name=thread.name, reason=message)


def _freeze(thread: threading.Thread) -> None:
    """Never let a thread return from C++. Until Python 3.14, the interpreter ends a thread that returns to it while it
    is ending itself, and C++ then aborts the process.
    """
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGURG, ctypes.cast(libc.pause, ctypes.c_void_p))  # its handler never returns
    signal.pthread_kill(thread.ident or 0, signal.SIGURG)
