"""The requests of a pool that no worker has: those that wait for a worker, and those that are retried later."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.workers.pool.worker_state import Call
    from asyncdata.workers.slots import Slots

__all__ = ("Backlog",)


class Backlog:
    """A queue, and requests that return to its front at a given time.

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
