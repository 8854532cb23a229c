"""Threads of the library: daemons, whose names begin with ``asyncdata``, and which may find no room. And how a thread
wakes an event loop without waiting for it, which is the one thing that anyio has no name for.
"""

from __future__ import annotations

import atexit
import contextvars
import ctypes
import signal
import sys
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING

from asyncdata.core.errors import WorkerError
from asyncdata.core.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("call_soon_in_this_loop", "started")

_EXIT_TIMEOUT_S = 60.0
_log = get_logger(__name__)
_awaited: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()
"""Threads that the process waits for when it ends, and what is said of one that does not end."""


def started(target: Callable[[], object], name: str, *, if_stuck: str = "") -> threading.Thread:
    """A thread that runs ``target``.

    :param if_stuck: for a thread that calls code in C++, such as torch's: what is logged if it is still there
        at the end of the process, which waits for it.
    :raises WorkerError: if the system has no room for one more.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise WorkerError(
            f"AD426 the loader cannot start a thread ({error}): the limit of processes (ulimit -u, or pids.max of the "
            "container) or of memory (ulimit -v) is reached; raise it, or stop what uses it up"
        ) from error

    if if_stuck:
        _awaited[thread] = if_stuck
    return thread


def _end_all() -> None:
    """At exit: wait for the threads that call C++, up to a minute for all of them together."""
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


atexit.register(_end_all)  # after what is registered later, by which loaders end their threads


def call_soon_in_this_loop() -> Callable[[Callable[[], object]], object]:
    """A function that, from any thread, has a callable run in the loop that is running here.

    It does nothing when that loop has ended.
    """
    if (trio := sys.modules.get("trio")) is not None:
        try:
            token = trio.lowlevel.current_trio_token()
        except RuntimeError:
            pass
        else:
            return _quietly(token.run_sync_soon, trio.RunFinishedError)

    import asyncio

    # In this task's context: that of the calling thread does not tell anyio which loop it is in.
    in_context = partial(asyncio.get_running_loop().call_soon_threadsafe, context=contextvars.copy_context())
    return _quietly(in_context, RuntimeError)


def _quietly(
    call_soon: Callable[[Callable[[], object]], object], ended: type[BaseException]
) -> Callable[[Callable[[], object]], object]:
    def call(function: Callable[[], object]) -> None:
        try:
            call_soon(function)
        except ended:
            return

    return call
