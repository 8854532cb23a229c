"""Threads of the library: daemons, whose names begin with ``asyncdata``, and which may find no room."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from asyncdata.core.errors import WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("started",)


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
