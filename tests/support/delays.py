"""Delays at every await and every callback of the library, so that what rarely comes first does.

This is the only place that knows how: calls are seen as a profiler sees them, so no module of the library is named.
"""

import asyncio
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import asyncdata

PACKAGE = str(Path(asyncdata.__file__).parent)
OFTEN, RARELY, TASKS = 0.25, 0.0005, 0.1
"""How many of the calls of a function are late while it was late less than ``ENOUGH`` times, and later; and how many of
the times that a loop wakes a task."""
ENOUGH = 200
LONGEST_S = 0.003


@contextmanager
def delayed(seed: int) -> Iterator[dict[Any, int]]:
    """In this thread, and in all that begin meanwhile. Gives how often each function was late so far."""
    chance, found, call_soon_in_time = random.Random(seed), dict[Any, int](), asyncio.BaseEventLoop.call_soon

    def pause_s() -> float:
        return chance.choice([0.0, 0.0, 0.1, 1.0]) * chance.random() * LONGEST_S

    def see(frame: Any, event: str, _: object) -> None:
        """A function is called, or a coroutine is resumed."""
        if event != "call":
            return

        number = found.get(code := frame.f_code, 0)
        if chance.random() < (OFTEN if number < ENOUGH else RARELY) and code.co_filename.startswith(PACKAGE):
            found[code] = number + 1
            time.sleep(pause_s())

    def call_soon(loop: Any, callback: Any, *args: Any, context: Any = None) -> Any:
        """A task that may go on does so later, after others; what threads send to the loop keeps its order."""
        if isinstance(getattr(callback, "__self__", None), asyncio.Task) and chance.random() < TASKS:
            return loop.call_later(pause_s(), callback, *args, context=context)

        return call_soon_in_time(loop, callback, *args, context=context)

    with mock.patch.object(asyncio.BaseEventLoop, "call_soon", call_soon):
        threading.setprofile(see)
        sys.setprofile(see)
        try:
            yield found
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
