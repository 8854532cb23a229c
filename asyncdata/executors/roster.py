"""What a pool keeps of its workers: each process, the requests it has, and what it is doing."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import anyio

from asyncdata.executors.base import WorkerState
from asyncdata.log import get_logger
from asyncdata.machine import resident_memory

if TYPE_CHECKING:
    from asyncdata.executors.base import OnReply
    from asyncdata.executors.offspring import WorkerProcess
    from asyncdata.wire import Request

__all__ = ("Call", "Worker", "state_of")


class Call:
    """A request under way.

    :ivar suspect: the row that was being worked on when it lost its last worker.
    """

    __slots__ = ("on_reply", "request", "request_id", "strikes", "suspect")

    def __init__(self, request_id: int, request: Request, on_reply: OnReply | None, strikes: int) -> None:
        self.request_id = request_id
        self.request = request
        self.on_reply = on_reply
        self.strikes = strikes
        self.suspect: int | None = None


_LOOK_EVERY_S = 0.5
_log = get_logger(__name__)


class Worker:
    """A process, and what it has been asked.

    :param max_bytes: memory that it may take.
    :ivar num_bytes: memory that it took when it was looked at.
    :ivar has_outgrown: whether that was more than it may take.
    """

    def __init__(self, process: WorkerProcess, max_bytes: int | None = None) -> None:
        self.process = process
        self.num_bytes = 0
        self.has_outgrown = False
        self._max_bytes = max_bytes
        self._next_look = 0.0
        self.calls: deque[Call] = deque()
        self.is_ready = False
        self.is_dismissed = False
        self.busy_since = 0.0
        self.seen_progress = (0, 0)
        self.num_looks = 0  # in a row that saw no progress
        self.patience = anyio.CancelScope()
        self.conversation = anyio.CancelScope()

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
