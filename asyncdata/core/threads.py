"""Threads of the library: daemons, whose names begin with ``asyncdata``, and which may find no room. And how a thread
wakes an event loop without waiting for it, which is the one thing that anyio has no name for.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable
from functools import partial

from asyncdata.core.errors import WorkerError


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
