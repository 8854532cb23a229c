"""When calls for data were made, and for what they waited: from these, the trainer's own time follows.

A wait has a reason at each moment of it: a call waits for the workers to start, and then for them to tokenize. So what
is missing is looked at again while a wait lasts, and the time since the last look is counted for what was missing then.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncdata.telemetry.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("CallTimes", "CpuShare", "Wait")

_MAX_MOMENTS = 1 << 17


class Wait(NamedTuple):
    """A call that had to wait.

    :ivar began: on the clock of the calls; ``seconds``: how long it took.
    :ivar stage: what was missing when it was looked at last.
    """

    began: float
    seconds: float
    stage: str


class CpuShare(NamedTuple):
    """How processes had to share the CPUs for some time.

    :ivar share: of the time in which they had something to run, how much they waited for a CPU, 0 to 1.
    :ivar seconds: how long one of them waited, the longest.
    """

    share: float
    seconds: float


class _Lasting:
    """A wait, while it lasts. All but ``began`` is changed by the thread that settles only.

    :ivar stage: what was missing at the last look; ``counted_s``: the seconds that are counted.
    """

    __slots__ = ("began", "counted_s", "is_new", "stage")

    def __init__(self, began: float, stage: str) -> None:
        self.began, self.stage = began, stage
        self.counted_s, self.is_new = 0.0, True


class CallTimes:
    """Totals of calls and waits, those included that still last.

    The trainer's threads only append; one other thread at a time computes the totals.

    :param waits_for: returns what is missing now.
    :param cpu_share: returns how the workers had to share the CPUs since its last call.
    :ivar num_lost: calls and waits that found the queue full.
    :ivar wait_s: seconds of waiting, by what was missing; ``first_s``: those of the first call among them.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        waits_for: Callable[[], str] = lambda: "read",
        cpu_share: Callable[[], CpuShare] = lambda: CpuShare(0.0, 0.0),
    ) -> None:
        self._clock, self._waits_for, self._cpu_share = clock, waits_for, cpu_share
        self._moments: deque[float | tuple[Wait, _Lasting]] = deque()
        self._lasting: dict[object, _Lasting] = {}
        self._last: float | None = None
        self._waited_s = 0.0
        self._step_ms = Histogram()
        self.num_calls = self.num_waits = self.num_lost = 0
        self.step_s = 0.0
        self.wait_s: dict[str, float] = {}
        self.first_s: dict[str, float] = {}
        self._unsplit: dict[tuple[str, bool], float] = {}

    def called(self) -> None:
        """A call begins. From any thread."""
        if len(self._moments) < _MAX_MOMENTS:
            self._moments.append(self._clock())
        else:
            self.num_lost += 1

    def wait_begins(self, wait: object, now: float, stage: str) -> None:
        """A call has to wait. From any thread."""
        self._lasting[wait] = _Lasting(now, stage)

    def wait_ends(self, wait: object, now: float) -> None:
        """It has waited, or has given up. From any thread."""
        lasting = self._lasting.pop(wait, None)
        if lasting is not None:
            self.waited(lasting.began, now - lasting.began, lasting.stage, lasting)

    def waited(self, began: float, seconds: float, stage: str, lasting: _Lasting | None = None) -> None:
        """A call had to wait. From any thread."""
        if len(self._moments) < _MAX_MOMENTS:
            self._moments.append((Wait(began, seconds, stage), lasting or _Lasting(began, stage)))
        else:
            self.num_lost += 1

    def totals(self) -> dict[str, Any]:
        """The fields of an interval."""
        return {
            "calls": self.num_calls,
            "waits": self.num_waits,
            "wait_s": dict(self.wait_s),
            "first_s": dict(self.first_s),
            "waiting_s": max((lasting.counted_s for lasting in list(self._lasting.values())), default=0.0),
            "step_s": self.step_s,
            "step_ms": self.step_ms,
        }

    def settle(self) -> list[Wait]:
        """Add what came since the last time to the totals; return the waits that ended."""
        waits, calls, waited_s = list[Wait](), list[float](), list[float]()
        for _ in range(len(self._moments)):
            moment = self._moments.popleft()
            if isinstance(moment, tuple):
                wait, lasting = moment
                self._count(lasting, wait.seconds, is_first=self.num_calls + len(calls) <= 1)
                waits.append(wait)
            else:
                calls.append(moment)
                waited_s.append(self._waited_s)
                self._waited_s = 0.0
        self._add_calls(calls, waited_s)
        for lasting in list(self._lasting.values()):
            self._count(lasting, self._clock() - lasting.began, is_first=self.num_calls <= 1)
            lasting.stage = self._waits_for()
        self._split()
        return waits

    def _count(self, lasting: _Lasting, seconds: float, *, is_first: bool) -> None:
        """Count a wait of so many seconds by now: those that are not counted yet."""
        added = max(0.0, seconds - lasting.counted_s)
        self.num_waits += lasting.is_new
        lasting.counted_s, lasting.is_new = lasting.counted_s + added, False
        self._waited_s += added
        self._unsplit[lasting.stage, is_first] = self._unsplit.get((lasting.stage, is_first), 0.0) + added

    def _split(self) -> None:
        """Of the seconds that were added, those belong to the CPUs in which the workers waited for one."""
        if not self._unsplit:
            return

        share, left_s = self._cpu_share()
        for (stage, is_first), seconds in self._unsplit.items():
            of_cpu = min(seconds * share, left_s)
            left_s -= of_cpu
            for name, part in ((stage, seconds - of_cpu), ("cpu", of_cpu)):
                for totals in (self.wait_s, self.first_s) if is_first else (self.wait_s,):
                    if part or name == stage:
                        totals[name] = totals.get(name, 0.0) + part
        self._unsplit.clear()

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

    @property
    def step_ms(self) -> dict[int, int]:
        """Histogram of the times between calls, without the waits, in milliseconds."""
        return self._step_ms.counts()
