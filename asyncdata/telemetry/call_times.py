"""When calls for data were made, and for what they waited: from these, the trainer's own time follows.

A wait has a reason at each moment of it: a call waits for the workers to start, and then for them to tokenize. So what
is missing is looked at again while a wait lasts, and the time since the last look is counted for what was missing then.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.errors import InvalidGroupError
from asyncdata.delivery.buffer_filters import versions_of
from asyncdata.telemetry.records import EDGES, RewardCounts
from asyncdata.workers.machine import cpu_times

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from asyncdata.workers.pool import Pool

_MAX_MOMENTS = 1 << 17
_EDGES = np.array(EDGES)
_TABLE_SIZE = 1 << 16
_BUCKETS = np.repeat(np.arange(len(EDGES)), np.diff(np.minimum(_EDGES, _TABLE_SIZE), append=_TABLE_SIZE)).astype(
    np.uint8
)
"""The bucket of each small number: a table is ten times as fast as a search."""


class Wait(msgspec.Struct):
    """A call that had to wait. All but ``began`` is changed only by the thread that settles.

    :ivar began: on the clock of the calls.
    :ivar stage: what was missing when it was looked at last.
    :ivar seconds: that are counted; in the end, how long it took.
    """

    began: float
    stage: str
    seconds: float = 0.0
    is_new: bool = True


class CpuShare(NamedTuple):
    """How processes had to share the CPUs for some time.

    :ivar share: of the time in which they had something to run, how much they waited for a CPU, 0 to 1.
    :ivar seconds: how long one of them waited, the longest.
    """

    share: float
    seconds: float


class CallTimes:
    """Totals of calls and waits, those included that still last.

    The trainer's threads only append; one other thread at a time computes the totals.

    :param waits_for: returns what is missing now.
    :param cpu_share: returns how the workers had to share the CPUs since its last call.
    :ivar num_lost: calls and waits that found the queue full.
    :ivar wait_s: seconds of waiting, by what was missing; ``first_s``: the share of the first call in them.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        waits_for: Callable[[], str] = lambda: "read",
        cpu_share: Callable[[], CpuShare] = lambda: CpuShare(0.0, 0.0),
    ) -> None:
        self._clock, self._waits_for, self._cpu_share = clock, waits_for, cpu_share
        self._moments: deque[float | tuple[Wait, float]] = deque()
        self._lasting: dict[object, Wait] = {}
        self._last: float | None = None
        self._waited_s = 0.0
        self._step_ms, self._wait_ms = Histogram(), Histogram()
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
        self._lasting[wait] = Wait(now, stage)

    def wait_ends(self, wait: object, now: float) -> None:
        """It has waited, or has given up. From any thread."""
        lasting = self._lasting.pop(wait, None)
        if lasting is None:
            return

        if len(self._moments) < _MAX_MOMENTS:
            self._moments.append((lasting, now - lasting.began))
        else:
            self.num_lost += 1

    def totals(self) -> dict[str, Any]:
        """The fields of an interval."""
        return {
            "calls": self.num_calls,
            "waits": self.num_waits,
            "wait_s": dict(self.wait_s),
            "first_s": dict(self.first_s),
            "waiting_s": max((lasting.seconds for lasting in list(self._lasting.values())), default=0.0),
            "step_s": self.step_s,
            "step_ms": self._step_ms.counts(),
            "wait_ms": self._wait_ms.counts(),
        }

    def settle(self) -> None:
        """Add what came since the last time to the totals."""
        calls, waited_s = list[float](), list[float]()
        for _ in range(len(self._moments)):
            moment = self._moments.popleft()
            if isinstance(moment, tuple):
                wait, seconds = moment
                is_first = self.num_calls + len(calls) <= 1
                self._count(wait, seconds, is_first=is_first)
                self._wait_ms.add([] if is_first else [int(seconds * 1000)])
            else:
                calls.append(moment)
                waited_s.append(self._waited_s)
                self._waited_s = 0.0
        self._add_calls(calls, waited_s)
        for lasting in list(self._lasting.values()):
            self._count(lasting, self._clock() - lasting.began, is_first=self.num_calls <= 1)
            lasting.stage = self._waits_for()
        self._split()

    def _count(self, wait: Wait, seconds: float, *, is_first: bool) -> None:
        """Count a wait of so many seconds by now: those that are not counted yet."""
        added = max(0.0, seconds - wait.seconds)
        self.num_waits += wait.is_new
        wait.seconds, wait.is_new = wait.seconds + added, False
        self._waited_s += added
        self._unsplit[wait.stage, is_first] = self._unsplit.get((wait.stage, is_first), 0.0) + added

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


class Histogram:
    """Counts of whole numbers from 0 on, by bucket."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(EDGES), np.int64)

    def add(self, numbers: Iterable[int]) -> None:
        """Count a few numbers."""
        for number in numbers:
            self._counts[bisect_right(EDGES, max(0, number)) - 1] += 1

    def add_many(self, numbers: np.ndarray[Any, Any]) -> None:
        """Count an array of integers from 0 on."""
        is_small = numbers < _TABLE_SIZE
        if not is_small.all():
            large = np.searchsorted(_EDGES, numbers[~is_small], side="right") - 1
            self._counts += np.bincount(large, minlength=len(EDGES))
            numbers = numbers[is_small]
        self._counts += np.bincount(_BUCKETS[numbers], minlength=len(EDGES))

    def counts(self) -> dict[int, int]:
        """The lower bound of each bucket that has numbers, and how many."""
        found = self._counts.copy()  # another thread may add to it
        return {EDGES[bucket]: int(found[bucket]) for bucket in np.flatnonzero(found).tolist()}


class Rollouts:
    """Totals, from the trainer's threads.

    :ivar num_returned: groups given back; ``num_degenerate``: scored groups of which all scores were equal.
    """

    def __init__(self) -> None:
        self._staleness, self._sizes, self._rewards = Histogram(), dict[int, int](), dict[str, RewardCounts]()
        self._version_lags, self._newest = Histogram(), 0
        self.num_returned = self.num_degenerate = 0

    def returned(self, groups: Sequence[list[Any]], num_groups: int) -> None:
        """Groups were given back, when ``num_groups`` had been delivered from the stream."""
        indexes = [group[0].group_index for group in groups if len(group)]
        self.num_returned += len(indexes)
        self._staleness.add([num_groups - 1 - index for index in indexes if index is not None])
        with suppress(InvalidGroupError):  # a version that is no number
            versions = [some for group in groups if (some := versions_of(group))]
            self._newest = max([self._newest, *map(max, versions)])
            self._version_lags.add([self._newest - min(some) for some in versions])

    def scored(self, scores: Iterable[tuple[str, Sequence[float | None]]]) -> None:
        """Scores of groups were reported, each with the key of its reward."""
        for key, given in scores:
            group = [score for score in given if score is not None]
            is_degenerate = len(group) > 1 and min(group) == max(group)
            if key:
                more = RewardCounts(1, len(group), len(given) - len(group), int(is_degenerate), math.fsum(group))
                self._rewards[key] = self._rewards.get(key, RewardCounts()) + more
            else:
                self._sizes[len(group)] = self._sizes.get(len(group), 0) + 1
                self.num_degenerate += is_degenerate

    def totals(self) -> dict[str, Any]:
        """The fields of an interval."""
        return {
            "returned": self.num_returned,
            "staleness": self._staleness.counts(),
            "version_lags": self._version_lags.counts(),
            "group_sizes": dict(sorted(self._sizes.copy().items())),
            "degenerate": self.num_degenerate,
            "rewards": self._rewards.copy(),
        }


class CpuWatch:
    """Looks at the times of the workers on this machine. One thread at a time."""

    def __init__(self, executor: Pool, times: Callable[[int], tuple[float, float]] = cpu_times) -> None:
        self._executor, self._times = executor, times
        self._before: dict[int, tuple[float, float]] = {}

    def share(self) -> CpuShare:
        """What has come since the last call."""
        pids = [worker.pid for worker in self._executor.statistics().workers]
        now = {pid: self._times(pid) for pid in pids if pid is not None}
        ran_s = waited_s = longest_s = 0.0
        for pid, (ran, waited) in now.items():
            ran_before, waited_before = self._before.get(pid, (0.0, 0.0))
            ran_s += max(0.0, ran - ran_before)
            added = max(0.0, waited - waited_before)
            waited_s, longest_s = waited_s + added, max(longest_s, added)
        self._before = now
        return CpuShare(waited_s / (ran_s + waited_s) if waited_s else 0.0, longest_s)
