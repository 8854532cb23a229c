"""The requests of a pool: each is a call, and those that no worker has are the backlog."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

import anyio
import msgspec

from asyncdata.core.messages import Short
from asyncdata.workers.pool.deadlines import Patience, given_up, patience_of_a_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from asyncdata.core.messages import Failed, Reply, Request
    from asyncdata.workers.base import Crashed, OnReply
    from asyncdata.workers.slots import Slots


class Call(msgspec.Struct, eq=False):
    """A request under way.

    :ivar num_losses: workers that were lost while they processed it.
    :ivar suspect: the row that was processed when its last worker was lost.
    :ivar shortages: counts its failures because of a shortage of a system resource.
    """

    request_id: int
    request: Request
    on_reply: OnReply | None
    max_losses: int
    num_losses: int = 0
    suspect: int | None = None
    shortages: Patience = msgspec.field(default_factory=patience_of_a_request)


class Backlog:
    """The requests that no worker has: a queue, and requests that return to its front at a given time.

    :param on_due: called when a request has returned to the queue.
    :ivar num_open: requests that are not answered, here or with a worker, and count, as :meth:`count` says.
    """

    def __init__(self, slots: Slots, on_due: Callable[[], object]) -> None:
        self._slots = slots
        self._on_due = on_due
        self._counts: Callable[[Request], bool] = lambda _: True
        self.num_open = 0
        self._next_id = 1
        self._queue: deque[Call] = deque()
        self._later: list[tuple[float, Call]] = []
        self._wake: anyio.Event | None = None  # belongs to the loop that runs it

    def __len__(self) -> int:
        return len(self._queue) + len(self._later)

    def calls(self) -> list[Call]:
        """All of them."""
        return [*self._queue, *(call for _, call in self._later)]

    def count(self, counts: Callable[[Request], bool]) -> None:
        """Count the requests for which ``counts`` is true; no worker has one yet."""
        self._counts = counts
        self.num_open = sum(counts(call.request) for call in self.calls())

    def submit(self, request: Request, on_reply: OnReply, max_losses: int) -> int:
        """Append a new call to the queue, and return its id; it uses its slot until it ends."""
        self._slots.use(request.slot)
        self._queue.append(Call(self._next_id, request, on_reply, max_losses))
        self.num_open += self._counts(request)
        self._next_id += 1
        return self._next_id - 1

    def add_first(self, call: Call) -> None:
        """Put it at the front of the queue."""
        self._queue.appendleft(call)

    def take(self, takes: Callable[[Request], bool]) -> Call | None:
        """Remove and return the next one of those whose request is taken; None if there is none."""
        for number, call in enumerate(self._queue):
            if takes(call.request):
                del self._queue[number]
                return call

        return None

    def _take_all(self) -> list[Call]:
        """Remove and return all of them."""
        calls = self.calls()
        self._queue.clear()
        self._later.clear()
        return calls

    def hand_over(self, call: Call, reply: Reply) -> None:
        """Pass the reply to the caller; after a shortage, try the request again, as another worker may succeed."""
        if isinstance(reply, Short):
            wait_s = call.shortages.failed(may_pass=True) if call.on_reply is not None else None
            if wait_s is not None:
                self._add_later(call, wait_s)
                return

            reply = given_up(reply, call.shortages.num_failures)
        self.end(call, reply)

    def _add_later(self, call: Call, wait_s: float) -> None:
        """Put it at the front of the queue after ``wait_s`` seconds."""
        self._later.append((anyio.current_time() + wait_s, call))
        if self._wake is not None:
            self._wake.set()

    def end(self, call: Call, outcome: Reply | Crashed) -> None:
        """Pass the outcome to the caller, unless it is no longer needed."""
        self.num_open -= self._counts(call.request)
        if call.on_reply is not None:
            call.on_reply(outcome)
        self._slots.done(call.request.slot)  # after on_reply: it may have requested the same rows again

    def drop(self, call: Call) -> None:
        """It has no caller any more, and is over."""
        self.num_open -= self._counts(call.request)
        self._slots.done(call.request.slot)

    def end_all(self, sent: Iterable[Call], reason: Failed) -> None:
        """End these calls and all of the backlog with ``reason``: no worker will answer them."""
        for call in [*sent, *self._take_all()]:
            self.end(call, reason)

    def forget(self) -> None:
        """Drop all of them; their replies are no longer needed."""
        for call in self._take_all():
            self.drop(call)

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
