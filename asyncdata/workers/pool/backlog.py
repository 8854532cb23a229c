"""The requests of a pool that no worker has: those that wait for one, and those that are tried again after a while."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.messages import Request
    from asyncdata.workers.pool.worker_state import Call
    from asyncdata.workers.slots import Slots

__all__ = ("Backlog",)


class Backlog:
    """A queue, and beside it what comes back to its front at a time of its own.

    :param on_due: called when something has come back.
    """

    def __init__(self, slots: Slots, on_due: Callable[[], object]) -> None:
        self._slots = slots
        self._on_due = on_due
        self._queue: deque[Call] = deque()
        self._later: list[tuple[float, Call]] = []
        self._wake: anyio.Event | None = None  # of the loop that runs it

    def __len__(self) -> int:
        return len(self._queue) + len(self._later)

    @property
    def has_next(self) -> bool:
        """Whether one could be given to a worker now."""
        return bool(self._queue)

    @property
    def next_request(self) -> Request | None:
        """What is asked for next."""
        return self._queue[0].request if self._queue else None

    def add(self, call: Call) -> None:
        """It is the last."""
        self._queue.append(call)

    def add_first(self, call: Call) -> None:
        """It is the next."""
        self._queue.appendleft(call)

    def add_later(self, call: Call, wait_s: float) -> None:
        """It is the next, in a while."""
        self._later.append((anyio.current_time() + wait_s, call))
        if self._wake is not None:
            self._wake.set()

    def take(self) -> Call:
        """The next one; there must be one."""
        return self._queue.popleft()

    def take_all(self) -> list[Call]:
        """All there are: none is left."""
        calls = [*self._queue, *(call for _, call in self._later)]
        self._queue.clear()
        self._later.clear()
        return calls

    def forget(self) -> None:
        """Drop them all: their replies are not wanted."""
        for call in self.take_all():
            self._slots.done(call.request.slot)

    async def run(self) -> None:
        """Bring back what is due, until cancelled."""
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
