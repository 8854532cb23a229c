"""The requests of a pool: each is a call, and those that no worker has are the backlog."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

import anyio

from asyncdata.workers.pool.deadlines import patience_of_a_request

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.messages import Request
    from asyncdata.workers.base import OnReply
    from asyncdata.workers.slots import Slots

__all__ = ("Backlog", "Call")


class Call:
    """A request under way.

    :ivar num_losses: workers that were lost while they processed it.
    :ivar suspect: the row that was processed when its last worker was lost.
    :ivar shortages: counts its failures because of a shortage of a system resource.
    """

    __slots__ = ("max_losses", "num_losses", "on_reply", "request", "request_id", "shortages", "suspect")

    def __init__(self, request_id: int, request: Request, on_reply: OnReply | None, max_losses: int) -> None:
        self.request_id = request_id
        self.request = request
        self.on_reply = on_reply
        self.max_losses = max_losses
        self.num_losses = 0
        self.suspect: int | None = None
        self.shortages = patience_of_a_request()


class Backlog:
    """The requests that no worker has: a queue, and requests that return to its front at a given time.

    :param on_due: called when a request has returned to the queue.
    """

    def __init__(self, slots: Slots, on_due: Callable[[], object]) -> None:
        self._slots = slots
        self._on_due = on_due
        self._queue: deque[Call] = deque()
        self._later: list[tuple[float, Call]] = []
        self._wake: anyio.Event | None = None  # belongs to the loop that runs it

    def __len__(self) -> int:
        return len(self._queue) + len(self._later)

    @property
    def has_next(self) -> bool:
        """Whether one could be given to a worker now."""
        return bool(self._queue)

    def add(self, call: Call) -> None:
        """Append it to the queue."""
        self._queue.append(call)

    def add_first(self, call: Call) -> None:
        """Put it at the front of the queue."""
        self._queue.appendleft(call)

    def add_later(self, call: Call, wait_s: float) -> None:
        """Put it at the front of the queue after ``wait_s`` seconds."""
        self._later.append((anyio.current_time() + wait_s, call))
        if self._wake is not None:
            self._wake.set()

    def take(self) -> Call:
        """Remove and return the next one. The queue must not be empty."""
        return self._queue.popleft()

    def take_all(self) -> list[Call]:
        """Remove and return all of them."""
        calls = [*self._queue, *(call for _, call in self._later)]
        self._queue.clear()
        self._later.clear()
        return calls

    def forget(self) -> None:
        """Drop all of them; their replies are no longer needed."""
        for call in self.take_all():
            self._slots.done(call.request.slot)

    async def run(self) -> None:
        """Return requests to the queue when they are due, until cancelled."""
        while True:
            self._wake = anyio.Event()
            with anyio.CancelScope(deadline=min((due for due, _ in self._later), default=math.inf)):
                await self._wake.wait()
            self._bring_back(anyio.current_time())

    def _bring_back(self, now: float) -> None:
        due = [call for when, call in self._later if when <= now]
        if not due:
            return

        self._later = [entry for entry in self._later if entry[0] > now]
        self._queue.extendleft(reversed(due))
        self._on_due()
