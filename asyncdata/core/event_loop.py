"""Waking a loop from another thread, without waiting for it: the one thing anyio has no name for."""

from __future__ import annotations

import contextvars
import sys
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("call_soon_in_this_loop",)


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
