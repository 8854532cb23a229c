"""What a pool keeps of its workers: each process, the requests it has, and what it is doing."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING

import anyio

from asyncdata.core.log import get_logger
from asyncdata.workers.base import WorkerState
from asyncdata.workers.machine import resident_memory
from asyncdata.workers.pool.deadlines import patience_of_a_request

if TYPE_CHECKING:
    from asyncdata.core.messages import Request
    from asyncdata.workers.base import OnReply
    from asyncdata.workers.pool.processes import WorkerProcess

__all__ = ("Call", "Worker", "state_of")


class Call:
    """A request under way.

    :ivar suspect: the row that was being worked on when it lost its last worker.
    :ivar shortages: how often the system was short of something for it.
    """

    __slots__ = ("on_reply", "request", "request_id", "shortages", "strikes", "suspect")

    def __init__(self, request_id: int, request: Request, on_reply: OnReply | None, strikes: int) -> None:
        self.request_id = request_id
        self.request = request
        self.on_reply = on_reply
        self.strikes = strikes
        self.suspect: int | None = None
        self.shortages = patience_of_a_request()


_LOOK_EVERY_S = 0.5
_LOOKS = 4
"""In the time that a row may take: looked at once, a worker that hangs behind its first row would have it twice."""
_log = get_logger(__name__)


class Worker:
    """A process, and what it has been asked.

    :param max_bytes: memory that it may take; None does not limit it.
    :param row_timeout_s: what a row may take.
    :ivar num_bytes: memory that it took when it was looked at.
    :ivar patience: the scope in which it is listened to.
    :ivar has_outgrown: whether that was more than it may take.
    :ivar is_short: whether the system had no more of something for it: another may do better.
    """

    def __init__(self, process: WorkerProcess, max_bytes: int | None, row_timeout_s: float) -> None:
        self.process = process
        self.num_bytes = 0
        self.has_outgrown = False
        self.is_short = False
        self._max_bytes = max_bytes
        self._row_timeout_s = row_timeout_s
        self._next_look = 0.0
        self.calls: deque[Call] = deque()
        self.is_ready = False
        self.is_dismissed = False
        self.busy_since = 0.0
        self._seen_progress = (0, 0)
        self._num_looks = 0  # in a row that saw no progress
        self.patience = anyio.CancelScope()
        self.conversation = anyio.CancelScope()

    @property
    def is_spent(self) -> bool:
        """Whether it is to be replaced when it has answered what it was asked."""
        return self.has_outgrown or self.is_short

    def be_patient(self) -> None:
        """Wait for the first of its calls from now on, or for ever if it has none."""
        self.busy_since = time.monotonic()
        self._seen_progress = self.process.progress() if self.calls else (0, 0)
        self._num_looks = 0
        self.look_later()

    def look_later(self) -> None:
        """Have :attr:`patience` end when it is time to look at its progress."""
        look_s = self._row_timeout_s / _LOOKS
        self.patience.deadline = anyio.current_time() + look_s if self.calls else math.inf

    def is_at_work(self) -> bool:
        """Whether it has done a row in the time that one may take; looked at whenever :attr:`patience` ends."""
        if self.process.progress() != self._seen_progress:
            self.be_patient()
        else:
            self._num_looks += 1
        return self._num_looks < _LOOKS

    def look_at_memory(self) -> None:
        """How much does it take? Not more often than the answer changes: the kernel has to be asked."""
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
        """The system had no more of something for it."""
        if not self.is_short:
            self.is_short = True
            _log.warning("worker.short", worker=self.process.number, pid=self.process.pid, reason=reason)


def state_of(worker: Worker | None) -> WorkerState:
    """What ``worker`` is doing; None is one that is still to be born."""
    if worker is None:
        return WorkerState(state="starting")

    if not worker.calls:
        return WorkerState(state="idle" if worker.is_ready else "starting", pid=worker.process.pid)

    busy_s = time.monotonic() - worker.busy_since
    return WorkerState(
        state="busy", pid=worker.process.pid, busy_s=busy_s, num_rows_done=max(0, worker.process.progress()[1])
    )
