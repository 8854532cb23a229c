"""A worker of a pool, in a process, an actor or a thread: its requests, and what it is doing."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any

import anyio

from asyncdata.workers.base import WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from asyncdata.core.messages import Reply
    from asyncdata.workers.pool.calls import Call
    from asyncdata.workers.pool.deadlines import Lost

_LOOKS = 4
"""Checks of the progress within the row timeout. With one check, a worker that hangs after its first row would be
detected only after twice that time."""


class Worker(ABC):
    """What the pool needs of every worker. It answers its requests in their order.

    :param row_timeout_s: seconds that a row may take.
    :ivar pid: its process; None if it is no process of this machine.
    :ivar lacks: what it needs to start and does not get; empty if that is not known, or it has started.
    :ivar is_dismissed: whether it gets no more requests, and ends.
    :ivar is_spent: whether to replace it after it has answered its requests.
    :ivar is_outdated: whether later workers have opened the tokenize function anew.
    :ivar patience: the cancel scope in which replies are received; its deadline is the next check of the progress.
    :ivar conversation: the cancel scope of all that is done with it.
    :ivar ended: set when it has ended.
    """

    pid: int | None = None
    is_spent = False
    is_outdated = False

    def __init__(self, number: int, row_timeout_s: float) -> None:
        self.number = number
        self.calls: deque[Call] = deque()
        self.lacks = ""
        self.is_ready = self.is_dismissed = False
        self.row_timeout_s = row_timeout_s
        self.patience = anyio.CancelScope()
        self.conversation = anyio.CancelScope()
        self.ended = anyio.Event()
        self._busy_since = 0.0
        self._seen_progress = (0, 0)
        self._num_looks = 0  # consecutive checks without progress
        self._waited_s = math.inf  # at the first of them

    # How it runs

    def tasks(self) -> list[Callable[[], Coroutine[Any, Any, Any]]]:
        """What is to run as long as the pool uses it."""
        return []

    @abstractmethod
    async def begin(self, has_started: Callable[[], bool]) -> None:
        """Wait until it takes requests.

        :param has_started: whether another one has: then a failure may pass. Asked when it fails.
        :raises EOFError: if it is lost.
        :raises AsyncDataError: if none will ever serve.
        """

    @abstractmethod
    def send(self, call: Call) -> None:
        """Send it a request, without waiting. If it is lost, :meth:`receive` says so."""

    @abstractmethod
    async def receive(self) -> tuple[int, Reply]:
        """The next reply, and the id of its request. May be cancelled, and called again.

        :raises EOFError: if it is lost; the message, if there is one, is the reason.
        """

    @abstractmethod
    def progress(self) -> tuple[int, int]:
        """The id of the request that it is working on (0: none), and the row (-1: all rows at once)."""

    async def ask_progress(self) -> None:  # noqa: B027 - a worker that shares memory need not be asked
        """Bring what :meth:`progress` returns up to date."""

    def waited_s(self) -> float:
        """How long it could have run, and had no core, since it started; 0 where that is not known."""
        return 0.0

    @abstractmethod
    async def end(self, lost: Lost | None) -> Lost | None:
        """Kill it, and wait until it has ended. Until then, it could still write into a slot that is reused.

        :param lost: how it was lost; None if it was dismissed.
        :return: ``lost``, with what is known after its end.
        """

    @abstractmethod
    def kill(self) -> None:
        """Kill it; block until it has ended, if it shares memory. Calling this again does nothing."""

    # Its progress

    def be_patient(self) -> None:
        """Start the timer for the first of its calls; no timer if it has none."""
        self._busy_since = time.monotonic()
        self._look_anew()

    def _look_anew(self) -> None:
        self._seen_progress = self.progress() if self.calls else (0, 0)
        self._num_looks, self._waited_s = 0, math.inf
        self.look_later()

    def look_later(self) -> None:
        """Set the deadline of :attr:`patience` to the next check of its progress."""
        self.patience.deadline = anyio.current_time() + self.look_s if self.calls else math.inf

    @property
    def look_s(self) -> float:
        """Seconds from one check of its progress to the next."""
        return self.row_timeout_s / _LOOKS

    def is_at_work(self) -> bool:
        """Whether it has made progress within the row timeout, in which time that it waited for a core does not count.
        Called whenever :attr:`patience` ends.
        """
        waited_s = self.waited_s()
        if self.progress() != self._seen_progress:
            self._look_anew()
        else:
            self._num_looks += 1
        self._waited_s = min(self._waited_s, waited_s)
        num_looks = self._num_looks - (waited_s - self._waited_s) / self.look_s
        return num_looks < _LOOKS - 0.1  # also one that hangs waits for a core for an instant

    def state(self) -> WorkerState:
        """What it is doing."""
        if not self.calls:
            state, lacks = ("idle", "") if self.is_ready else ("starting", self.lacks)
            return WorkerState(state=state, pid=self.pid, lacks=lacks)

        busy_s = time.monotonic() - self._busy_since
        return WorkerState(state="busy", pid=self.pid, busy_s=busy_s, num_rows_done=max(0, self.progress()[1]))
