"""Loaders that are open when the process ends are closed, so that neither the interpreter nor another rank hangs."""

from __future__ import annotations

import atexit
import sys
import weakref
from typing import Any

open_at_exit: weakref.WeakSet[Any] = weakref.WeakSet()
"""Their engines."""


def _close_all() -> None:
    for engine in list(open_at_exit):
        if engine.service.is_here:
            engine.close()
    if (threads := sys.modules.get("asyncdata.core.awaited_threads")) is not None:
        threads.end_all()


atexit.register(_close_all)
