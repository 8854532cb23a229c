"""Counts how long calls wait for data, and whether that is shown."""

from __future__ import annotations

import logging
import sys
import threading
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal

from asyncdata.core.errors import get_logger
from asyncdata.core.threads import no_op

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.loader.wait_progress import WaitProgress

    Progress = Literal["auto", "bar", "lines", "log", "none"]

_log = get_logger(__name__)
_TOLD_S = 1.0
"""The shortest time of a held event loop that is logged; later ones, if they are twice as long as the last."""


class NoProgress:
    """Shows no wait."""

    def waiting(self, _: Callable[[], str]) -> nullcontext[None]:
        """During the block, a call waits."""
        return nullcontext()

    def close(self) -> None:
        """Nothing is to be ended."""


def progress_of(progress: Progress, rank: int) -> WaitProgress | NoProgress:
    """What shows the waits of a loader."""
    way = way_of(progress, rank)
    if way == "none":
        return NoProgress()

    from asyncdata.loader.wait_progress import WaitProgress

    return WaitProgress(way)


def way_of(progress: Progress, rank: int) -> Literal["bar", "lines", "log", "none"]:
    """How waits are shown. ``auto`` is a bar on the first rank, if stderr is a terminal or this is a notebook."""
    if progress != "auto":
        return progress

    if rank == 0 and (_is_terminal() or _is_notebook()):
        return "bar"

    structlog = sys.modules.get("structlog")
    is_configured = structlog is not None and structlog.is_configured()
    return "log" if is_configured or logging.getLogger(__name__).isEnabledFor(logging.INFO) else "none"


def _is_terminal() -> bool:
    return bool(sys.stderr and not sys.stderr.closed and sys.stderr.isatty())


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return type(getattr(ipython, "get_ipython", no_op)()).__name__ == "ZMQInteractiveShell"


class Waits:
    """The waits of a loader. From any thread.

    :ivar ended: how many have ended, and their seconds.
    :ivar held_s: seconds for which event loops were held while samples were ready.
    :ivar on_begin: called with a wait and the time at which it begins; ``on_end``: and at which it ends.
    """

    on_begin: Callable[[object, float], object] = staticmethod(no_op)
    on_end: Callable[[object, float], object] = staticmethod(no_op)

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lasting: dict[object, float] = {}
        self._lock = threading.Lock()
        self.ended = (0, 0.0)
        self.held_s, self._held_to, self._told_s = 0.0, 0.0, _TOLD_S / 2
        self._log = _log.owned()

    def begin(self, wait: object) -> None:
        """A call has to wait."""
        now = self._clock()
        with self._lock:
            self._lasting[wait] = now
        self.on_begin(wait, now)

    def end(self, wait: object, ready_at: float = 0.0) -> None:
        """It has waited, or has given up.

        :param ready_at: since when its samples were ready: until now, the caller's event loop did not run it.
        """
        now, held_s = self._clock(), 0.0
        with self._lock:
            began = self._lasting.pop(wait, None)
            if began is not None:
                number, seconds = self.ended
                self.ended = number + 1, seconds + now - began
            if ready_at:  # several calls may wait for the same loop
                held_s, self._held_to = now - max(ready_at, self._held_to), now
            self.held_s += held_s
            is_told = held_s >= 2 * self._told_s
            if is_told:
                self._told_s = held_s
        self.on_end(wait, now)
        if is_told:
            self._log.warning("loader.loop_held", held_s=round(held_s, 1), reason="your code held the event loop")

    def totals(self) -> tuple[int, float]:
        """How many there are, and their seconds by now."""
        with self._lock:
            now, (number, seconds) = self._clock(), self.ended
            return number + len(self._lasting), seconds + sum(now - began for began in self._lasting.values())
