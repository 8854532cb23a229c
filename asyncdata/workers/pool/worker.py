"""The state of a worker in the pool: its process, its requests, and what it is doing."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING

import anyio

from asyncdata.core.log import get_logger
from asyncdata.workers.base import WorkerState
from asyncdata.workers.machine import resident_memory

if TYPE_CHECKING:
    from asyncdata.workers.pool.calls import Call
    from asyncdata.workers.pool.processes import WorkerProcess

__all__ = ("Worker", "state_of")


_LOOK_EVERY_S = 0.5
_LOOKS = 4
"""Checks of the progress within the row timeout. With one check, a worker that hangs after its first row would be
detected only after twice that time."""
_log = get_logger(__name__)


class Worker:
    """A process, and its requests.

    :param max_bytes: memory that it may use; None means no limit.
    :param row_timeout_s: seconds that a row may take.
    :ivar num_bytes: memory that it used at the last check.
    :ivar patience: the cancel scope in which replies are received; its deadline is the next check of the progress.
    :ivar has_outgrown: whether it used more than ``max_bytes``.
    :ivar is_short: whether it ran into a shortage of a system resource; another worker may succeed.
    :ivar lacks: what it needs to start and does not get; empty if that is not known, or it has started.
    :ivar is_outdated: whether later workers have opened the tokenize function anew.
    :ivar ended: set when its process has ended.
    """

    def __init__(self, process: WorkerProcess, max_bytes: int | None, row_timeout_s: float) -> None:
        self.process = process
        self.num_bytes = 0
        self.has_outgrown = False
        self.is_short = False
        self.is_outdated = False
        self.lacks = ""
        self.ended = anyio.Event()
        self._max_bytes = max_bytes
        self._row_timeout_s = row_timeout_s
        self._next_look = 0.0
        self.calls: deque[Call] = deque()
        self.is_ready = False
        self.is_dismissed = False
        self.busy_since = 0.0
        self._seen_progress = (0, 0)
        self._num_looks = 0  # consecutive checks without progress
        self.patience = anyio.CancelScope()
        self.conversation = anyio.CancelScope()

    @property
    def is_spent(self) -> bool:
        """Whether to replace it after it has answered its requests."""
        return self.has_outgrown or self.is_short or self.is_outdated

    def be_patient(self) -> None:
        """Start the timer for the first of its calls; no timer if it has none."""
        self.busy_since = time.monotonic()
        self._seen_progress = self.process.progress() if self.calls else (0, 0)
        self._num_looks = 0
        self.look_later()

    def look_later(self) -> None:
        """Set the deadline of :attr:`patience` to the next check of its progress."""
        look_s = self._row_timeout_s / _LOOKS
        self.patience.deadline = anyio.current_time() + look_s if self.calls else math.inf

    def is_at_work(self) -> bool:
        """Whether it has made progress within the row timeout. Called whenever :attr:`patience` ends."""
        if self.process.progress() != self._seen_progress:
            self.be_patient()
        else:
            self._num_looks += 1
        return self._num_looks < _LOOKS

    def look_at_memory(self) -> None:
        """Measure its memory, but not at every reply: each measurement is a system call."""
        now = time.monotonic()
        if self._max_bytes is None or self.has_outgrown or now < self._next_look:
            return

        self._next_look = now + _LOOK_EVERY_S
        self.num_bytes = resident_memory(self.process.pid)
        self.has_outgrown = self.num_bytes > self._max_bytes
        if self.has_outgrown:
            number, pid = self.process.number, self.process.pid
            _log.warning("worker.outgrown", worker=number, pid=pid, num_bytes=self.num_bytes, max_bytes=self._max_bytes)

    def run_short(self, reason: str) -> None:
        """It ran into a shortage of a system resource."""
        if not self.is_short:
            self.is_short = True
            _log.warning("worker.short", worker=self.process.number, pid=self.process.pid, reason=reason)


def state_of(worker: Worker | None) -> WorkerState:
    """What ``worker`` is doing; None is one whose process does not exist yet."""
    if worker is None:
        return WorkerState(state="starting")

    if not worker.calls:
        if not worker.is_ready:
            return WorkerState(state="starting", pid=worker.process.pid, lacks=worker.lacks)

        return WorkerState(state="idle", pid=worker.process.pid)

    busy_s = time.monotonic() - worker.busy_since
    return WorkerState(
        state="busy", pid=worker.process.pid, busy_s=busy_s, num_rows_done=max(0, worker.process.progress()[1])
    )
