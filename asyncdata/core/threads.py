"""Callbacks that do nothing, and threads of the library: daemons, whose names begin with ``asyncdata``, and which may
find no room.

How a thread wakes an event loop without waiting for it, which is the one thing that anyio has no name for; and what is
done when a process ends. A child that ``multiprocessing`` has forked ends without ``atexit``.
"""

from __future__ import annotations

import atexit
import contextvars
import ctypes
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from asyncdata.core.errors import ConfigError, WorkerError, get_logger

T = TypeVar("T")


def no_op(*_: object) -> None:
    """The callback before another one is set: does nothing."""


def identity(value: T) -> T:
    """The callback that returns what it is given."""
    return value


def alone(value: T) -> tuple[T]:
    """The callback that returns what it is given as the only one of a tuple."""
    return (value,)


def started(target: Callable[[], object], name: str) -> threading.Thread:
    """A thread that runs ``target``.

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

    return thread


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

    # In this task's context: the calling thread's does not tell anyio which loop it is in.
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


_CALL_TIMEOUT_S = 5.0
_calls: dict[threading.Thread, threading.Event] = {}
"""The threads that call a user's function, and what is set once they no longer do."""
_stopped: set[threading.Thread] = set()
"""Those among them that begin no further row, because the process ends."""


def finished_before_exit(function: Callable[..., T], *args: object) -> T:
    """Call it. If the process ends meanwhile, it waits for this call up to five seconds: see :func:`_freeze`."""
    thread, has_ended = threading.current_thread(), threading.Event()
    _calls[thread] = has_ended
    try:
        return function(*args)
    finally:
        has_ended.set()
        del _calls[thread]


def stand_still_at_exit() -> None:
    """Between two rows of such a call. It never returns while the process ends: no error is raised, since what its
    frames refer to would be kept.
    """
    if _stopped and (thread := threading.current_thread()) in _stopped:
        _calls[thread].set()
        threading.Event().wait()


def end_all() -> None:
    """At exit, after loaders have ended theirs: wait for the calls of users' functions, up to five seconds for all of
    them together, and for the threads, up to a minute.
    """
    until = time.monotonic() + _CALL_TIMEOUT_S
    calls = list(_calls.items())
    _stopped.update(thread for thread, _ in calls)
    for thread, has_ended in calls:
        if thread.is_alive() and not has_ended.wait(max(0.0, until - time.monotonic())):  # a fork has none of them
            _freeze(thread)
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


_functions: list[Callable[[], object]] = []
_watched: set[int] = set()
"""The processes that are watched: this one, and those that it was forked from."""


def at_exit(function: Callable[[], object]) -> None:
    """Call ``function`` when the process ends, before those that were given earlier."""
    atexit.register(function)
    _functions.append(function)


def watch_end() -> None:
    """There is something to end in this process."""
    process = sys.modules.get("multiprocessing.process")
    if process is None or process.parent_process() is None or os.getpid() in _watched:
        return

    from multiprocessing.util import Finalize

    _watched.add(os.getpid())
    Finalize(None, _end_all, exitpriority=0)


def _end_all() -> None:
    for function in reversed(_functions):
        function()


_PR_SET_PDEATHSIG = 1


def check_platform(*, has_workers: bool) -> None:
    """Refuse worker processes on a system other than Linux.

    :raises ConfigError: with what to do there.
    """
    if sys.platform != "linux" and has_workers:
        raise ConfigError(
            f"asyncdata's workers need Linux, and this is {sys.platform}: they share memory by memfd, and die with the "
            "trainer by a signal of Linux. Set num_workers=0, which uses a thread of this process; or run it in a "
            "container, or in WSL 2"
        )


def end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread of ``parent`` that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(0)
