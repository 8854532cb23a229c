"""When calls for data were made, and for what they waited: from these, the trainer's own time follows."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncdata.telemetry.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("CallTimes", "Wait")

_MAX_MOMENTS = 1 << 17


class Wait(NamedTuple):
    """A call that had to wait.

    :ivar began: on the clock of the calls; ``seconds``: how long it took.
    :ivar stage: what was missing when it began.
    """

    began: float
    seconds: float
    stage: str


class CallTimes:
    """Totals of calls and waits.

    The trainer's threads only append; one other thread computes the totals.

    :ivar num_lost: calls and waits that found the queue full.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._moments: deque[float | Wait] = deque()
        self._last: float | None = None
        self._waited_s = 0.0
        self._step_ms = Histogram()
        self.num_calls = self.num_waits = self.num_lost = 0
        self.step_s = 0.0
        self.wait_s: dict[str, float] = {}

    def called(self) -> None:
        """A call begins. From any thread."""
        if len(self._moments) < _MAX_MOMENTS:
            self._moments.append(self._clock())
        else:
            self.num_lost += 1

    def waited(self, began: float, seconds: float, stage: str) -> None:
        """A call had to wait. From any thread."""
        if len(self._moments) < _MAX_MOMENTS:
            self._moments.append(Wait(began, seconds, stage))
        else:
            self.num_lost += 1

    def settle(self) -> list[Wait]:
        """Add what came since the last time to the totals; return the waits among it."""
        waits, calls, waited_s = list[Wait](), list[float](), list[float]()
        for _ in range(len(self._moments)):
            moment = self._moments.popleft()
            if isinstance(moment, Wait):
                self._waited_s += moment.seconds
                waits.append(moment)
            else:
                calls.append(moment)
                waited_s.append(self._waited_s)
                self._waited_s = 0.0
        self._add_calls(calls, waited_s)
        self._add_waits(waits)
        return waits

    def _add_calls(self, calls: list[float], waited_s: list[float]) -> None:
        """Add calls.

        :param waited_s: how long one waited between the call before and each.
        """
        if not calls:
            return

        since = calls[0] if self._last is None else self._last
        steps_s = np.maximum(np.diff(calls, prepend=since) - waited_s, 0.0)[self._last is None :]
        self.step_s += float(steps_s.sum())
        self._step_ms.add_many((steps_s * 1000).astype(np.int64))
        self._last = calls[-1]
        self.num_calls += len(calls)

    def _add_waits(self, waits: list[Wait]) -> None:
        self.num_waits += len(waits)
        for wait in waits:
            self.wait_s[wait.stage] = self.wait_s.get(wait.stage, 0.0) + wait.seconds

    @property
    def step_ms(self) -> dict[int, int]:
        """Histogram of the times between calls, without the waits, in milliseconds."""
        return self._step_ms.counts()
