"""Whether the workers have the CPUs that they need: for how long they waited for one, as the system counts it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdata.telemetry.call_times import CpuShare
from asyncdata.workers.machine import cpu_times

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("CpuWatch",)


class CpuWatch:
    """Looks at the workers' times. One thread at a time.

    :param pids: returns the workers' processes.
    """

    def __init__(self, pids: Callable[[], list[int]], times: Callable[[int], tuple[float, float]] = cpu_times) -> None:
        self._pids, self._times = pids, times
        self._before: dict[int, tuple[float, float]] = {}

    def share(self) -> CpuShare:
        """What has come since the last call."""
        now = {pid: self._times(pid) for pid in self._pids()}
        ran_s = waited_s = longest_s = 0.0
        for pid, (ran, waited) in now.items():
            ran_before, waited_before = self._before.get(pid, (0.0, 0.0))
            ran_s += max(0.0, ran - ran_before)
            added = max(0.0, waited - waited_before)
            waited_s, longest_s = waited_s + added, max(longest_s, added)
        self._before = now
        return CpuShare(waited_s / (ran_s + waited_s) if waited_s else 0.0, longest_s)
