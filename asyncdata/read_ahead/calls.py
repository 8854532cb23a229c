"""What the coroutines of the read-ahead wait for: changes, replies of workers, free slots, their turn.

All of it is used in the service's thread. Who changes a condition calls :class:`Changes`, which looks at once for each
coroutine that waits. So no wake-up is lost, no coroutine wakes in vain, and what a look sends is sent without a tick of
the loop.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import anyio

from asyncdata.core.errors import AsyncDataError
from asyncdata.workers.base import MAX_LOSSES, error_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from anyio.abc import TaskGroup

    from asyncdata.core.messages import Reply, Request
    from asyncdata.workers.base import Crashed, Executor, OnReply

T = TypeVar("T")
SENT: Any = object()
"""What a look finds that has sent something and waits on."""


class Promise(Generic[T]):
    """A value, or an error, that comes later: await it, once.

    :ivar is_kept: whether it is there.
    """

    _event: anyio.Event | None = None
    _value: T | None = None
    _error: Exception | None = None
    is_kept = False

    def keep(self, value: T | None, error: Exception | None = None) -> None:
        """It is there."""
        self._value, self._error, self.is_kept = value, error, True
        if self._event is not None:
            self._event.set()

    def __await__(self) -> Generator[Any, None, T]:
        if not self.is_kept:
            self._event = anyio.Event()
            yield from self._event.wait().__await__()
        if self._error is not None:
            raise self._error

        return cast("T", self._value)


class Look(Promise[T]):
    """A coroutine that waits until ``look`` finds something but :data:`SENT`; it may send what it finds."""

    def __init__(self, look: Callable[[], T | None]) -> None:
        self._look = look
        self._is_looking = self._is_due = False

    def again(self) -> bool:
        """Look once more, unless it has found something; return whether it has found or sent something now."""
        self._is_due = not self.is_kept
        if self._is_looking or self.is_kept:  # it has made this change itself
            return False

        self._is_looking, has_sent = True, False
        while self._is_due:
            self._is_due = False
            try:
                found = self._look()
            except Exception as error:  # it is the waiting coroutine's
                self.keep(None, error)
                break

            has_sent = has_sent or found is SENT
            if found is not None and found is not SENT:
                self.keep(found)
                break

        self._is_looking = False
        return has_sent or self.is_kept


class Changes:
    """Call it after a change: who waits for one looks then, in turn, until nobody finds or sends any more."""

    def __init__(self) -> None:
        self._looks: deque[Look[Any]] = deque()

    def __call__(self) -> None:
        while any(map(self._looks_again, [*self._looks])):
            pass

    def offer(self) -> bool:
        """Let the first who finds or sends something do so; return whether there was one."""
        return any(map(self._looks_again, [*self._looks]))

    def _looks_again(self, look: Look[Any]) -> bool:
        """Let one look; if it has found or sent something, the others come first the next time."""
        if not look.again():
            return False

        self._looks.remove(look)
        self._looks.append(look)
        return True

    @property
    def num_waiting(self) -> int:
        """How many wait."""
        return sum(not look.is_kept for look in self._looks)

    async def until(self, look: Callable[[], T | None]) -> T:
        """What ``look`` finds that is neither None nor :data:`SENT`; it is called now, and after each change."""
        return await self.next(look, lambda _: self())

    async def next(self, look: Callable[[], T | None], then: Callable[[Look[T]], object] = bool) -> T:
        """The same, without a look before the next change.

        :param then: called once it waits.
        """
        waiting = Look(look)
        self._looks.append(waiting)
        try:
            then(waiting)
            return await waiting
        finally:
            self._looks.remove(waiting)


class Later(Promise[T]):
    """What a coroutine gives that has begun: await it, once. An error of ours is raised then, others in the group."""

    def __init__(self, group: TaskGroup, make: Callable[[], Awaitable[T]]) -> None:
        super().__init__()
        group.start_soon(self._run, make)

    async def _run(self, make: Callable[[], Awaitable[T]]) -> None:
        try:
            self.keep(await make())
        except AsyncDataError as error:
            self.keep(None, error)


class Calls:
    """What the coroutines of one source ask workers for, and the slots that they hold.

    :ivar changed: call it after a change of what they wait for.
    :ivar group: in which they run, from one start to the next.
    """

    group: TaskGroup

    def __init__(self, executor: Executor) -> None:
        self.executor, self.slots = executor, executor.slots
        self.changes = Changes()
        self._held: set[int] = set()
        self._lasting: dict[Promise[Any], Request] = {}

    @property
    def num_workers(self) -> int:
        """How many workers are to be kept busy."""
        return self.executor.num_workers

    def changed(self) -> None:
        """Something has changed: a reply came, a slot or a worker is free, there is room."""
        self.changes()

    def submit(self, request: Request, on_reply: OnReply, max_losses: int = MAX_LOSSES) -> int:
        """Queue a request, as the executor does: for what has no sequence."""
        return self.executor.submit(request, on_reply, max_losses)

    def asked(self, request: Request, max_losses: int = MAX_LOSSES) -> Promise[Reply | Crashed]:
        """Send the request; await what this returns for the reply."""
        reply: Promise[Reply | Crashed] = Promise()
        self.submit(request, reply.keep, max_losses)
        return reply

    async def ask(self, request: Request, kind: type[T]) -> T:
        """The reply to ``request``.

        :raises AsyncDataError: if it is of another kind.
        """
        return checked(await self.asked(request), kind)

    async def ask_again(self, request: Request) -> Reply | Crashed:
        """The reply to ``request``; a restart sends it again, and the coroutine waits on."""
        reply: Promise[Reply | Crashed] = Promise()
        self._lasting[reply] = request
        try:
            self.submit(request, reply.keep)
            return await reply
        finally:
            del self._lasting[reply]

    async def turn(self, look: Callable[[], T | None]) -> T:
        """What ``look`` finds that is not None; it is called only while workers want more."""
        return await self.changes.until(lambda: look() if self.executor.num_wanted > 0 else None)

    async def slot(self) -> int:
        """A slot, once one is free; :meth:`release` gives it back."""
        return await self.changes.until(self._hold)

    def _hold(self) -> int | None:
        slot = self.slots.hold()
        if slot is not None:  # here: who waits may have been cancelled
            self._held.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """No further request will refer to ``slot``."""
        if slot in self._held:
            self._held.remove(slot)
            self.slots.release(slot)

    def restart(self) -> None:
        """Forget what was asked; what lasts is asked again."""
        self.executor.forget()
        self.repeat()

    def repeat(self) -> None:
        """Ask again for what lasts."""
        for reply, request in self._lasting.items():
            if not reply.is_kept:
                self.submit(request, reply.keep)

    def release_all(self) -> None:
        """Give back the slots of coroutines that a restart has cancelled."""
        for slot in [*self._held]:
            self.release(slot)

    def later(self, make: Callable[..., Awaitable[T]], *args: Any) -> Later[T]:
        """What ``make`` gives, which begins now."""
        return Later(self.group, partial(make, *args))


def checked(reply: Reply | Crashed, kind: type[T]) -> T:
    """The reply, if it is of this kind.

    :raises AsyncDataError: if it is not.
    """
    if not isinstance(reply, kind):
        raise error_of(reply)

    return reply
