"""What a pool keeps of its workers: each process, the requests it has, and what it is doing."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import anyio

from asyncdata.executors.base import WorkerState

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


class Worker:
    """A process, and what it has been asked."""

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self.calls: deque[Call] = deque()
        self.is_ready = False
        self.is_dismissed = False
        self.busy_since = 0.0
        self.seen_progress = (0, 0)
        self.num_looks = 0  # in a row that saw no progress
        self.patience = anyio.CancelScope()
        self.conversation = anyio.CancelScope()


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
