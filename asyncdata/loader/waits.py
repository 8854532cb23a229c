"""How many calls had to wait for data, and for how long: those that still wait count, too."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from asyncdata.core.callbacks import no_op

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("Waits",)


class Waits:
    """The waits of a loader. From any thread.

    :ivar ended: how many have ended, and their seconds.
    :ivar on_begin: called with a wait and the time at which it begins; ``on_end``: and at which it ends.
    """

    on_begin: Callable[[object, float], object] = staticmethod(no_op)
    on_end: Callable[[object, float], object] = staticmethod(no_op)

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lasting: dict[object, float] = {}
        self._lock = threading.Lock()
        self.ended = (0, 0.0)

    def begin(self, wait: object) -> None:
        """A call has to wait."""
        now = self._clock()
        with self._lock:
            self._lasting[wait] = now
        self.on_begin(wait, now)

    def end(self, wait: object) -> None:
        """It has waited, or has given up."""
        now = self._clock()
        with self._lock:
            began = self._lasting.pop(wait, None)
            if began is not None:
                number, seconds = self.ended
                self.ended = number + 1, seconds + now - began
        self.on_end(wait, now)

    def totals(self) -> tuple[int, float]:
        """How many there are, and their seconds by now."""
        with self._lock:
            now, (number, seconds) = self._clock(), self.ended
            return number + len(self._lasting), seconds + sum(now - began for began in self._lasting.values())
