"""The requests of a pool: each is a call, and those that no worker has are the backlog."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

import anyio

from asyncdata.core.callbacks import no_op
from asyncdata.core.messages import Failed, Short
from asyncdata.workers.pool.deadlines import given_up, patience_of_a_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from asyncdata.core.messages import Reply, Request
    from asyncdata.workers.base import Crashed, OnReply
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
    :ivar is_for_reader: whether a request is for the reader, and not for the other workers.
    :ivar on_end: called with each call that ends, and its outcome, before the caller.
    """

    def __init__(self, slots: Slots, on_due: Callable[[], object]) -> None:
        self._slots = slots
        self._on_due = on_due
        self.is_for_reader: Callable[[Request], bool] = lambda _: False
        self.on_end: Callable[[Call, Reply | Crashed], object] = no_op
        self._next_id = 1
        self._queue: deque[Call] = deque()
        self._later: list[tuple[float, Call]] = []
        self._wake: anyio.Event | None = None  # belongs to the loop that runs it

    def __len__(self) -> int:
        return len(self._queue) + len(self._later)

    def count(self, is_counted: Callable[[Request], bool]) -> int:
        """How many of their requests are such."""
        return sum(is_counted(call.request) for call in (*self._queue, *(call for _, call in self._later)))

    @property
    def num_for_workers(self) -> int:
        """How many of them are not for the reader."""
        calls = [*self._queue, *(call for _, call in self._later)]
        return sum(not self.is_for_reader(call.request) for call in calls)

    def submit(self, request: Request, on_reply: OnReply, max_losses: int) -> None:
        """Append a new call to the queue; it uses its slot until it ends."""
        self._slots.use(request.slot)
        self._queue.append(Call(self._next_id, request, on_reply, max_losses))
        self._next_id += 1

    def add_first(self, call: Call) -> None:
        """Put it at the front of the queue."""
        self._queue.appendleft(call)

    def add_later(self, call: Call, wait_s: float) -> None:
        """Put it at the front of the queue after ``wait_s`` seconds."""
        self._later.append((anyio.current_time() + wait_s, call))
        if self._wake is not None:
            self._wake.set()

    def take(self, *, is_reader: bool) -> Call | None:
        """Remove and return the next one for the reader, or for another worker; None if there is none."""
        for number, call in enumerate(self._queue):
            if self.is_for_reader(call.request) == is_reader:
                del self._queue[number]
                return call

        return None

    def take_all(self) -> list[Call]:
        """Remove and return all of them."""
        calls = [*self._queue, *(call for _, call in self._later)]
        self._queue.clear()
        self._later.clear()
        return calls

    def hand_over(self, call: Call, reply: Reply) -> None:
        """Pass the reply to the caller; after a shortage, try the request again, as another worker may succeed."""
        if isinstance(reply, Short):
            wait_s = call.shortages.failed(may_pass=True) if call.on_reply is not None else None
            if wait_s is not None:
                self.add_later(call, wait_s)
                return

            reply = given_up(reply, call.shortages.num_failures)
        self.end(call, reply)

    def end(self, call: Call, outcome: Reply | Crashed) -> None:
        """Pass the outcome to the caller, unless it is no longer needed."""
        self.on_end(call, outcome)
        if call.on_reply is not None:
            call.on_reply(outcome)
        self._slots.done(call.request.slot)  # after on_reply: it may have requested the same rows again

    def end_all(self, sent: Iterable[Call], reason: str) -> None:
        """End these calls and all in the queue with ``reason``: no worker will answer them."""
        for call in [*sent, *self.take_all()]:
            self.end(call, Failed("WorkerError", reason))

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
