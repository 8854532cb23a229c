"""Loaders that are open when the process ends are closed, so that neither the interpreter nor another rank hangs."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from asyncdata.core.threads import at_exit, watch_end

open_at_exit: weakref.WeakSet[Any] = weakref.WeakSet()
"""Their engines."""


def begun(engine: Any) -> None:
    """It is to be closed when the process ends."""
    open_at_exit.add(engine)
    watch_end()


def _close_all() -> None:
    for engine in list(open_at_exit):
        if engine.service.is_here:
            engine.close()
    if (threads := sys.modules.get("asyncdata.core.threads")) is not None:
        threads.end_all()


at_exit(_close_all)
