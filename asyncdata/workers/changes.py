"""What the coroutines of the service wait for: a value that comes later, or a change.

All of it is used in the service's thread. Who changes a condition calls :class:`Changes`, which looks at once for each
coroutine that waits. So no wake-up is lost, no coroutine wakes in vain, and what a look sends is sent without a tick of
the loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar, cast

import anyio

T = TypeVar("T")
SENT: Any = object()
"""What a look finds that has sent something and waits on."""


class Promise(Generic[T]):
    """A value, or an error, that comes later: await it, once; or have a function called with the value.

    :ivar is_kept: whether it is there.
    """

    _event: anyio.Event | None = None
    _calls: tuple[Callable[[T], object], ...] = ()
    _value: T | None = None
    _error: Exception | None = None
    is_kept = False

    def keep(self, value: T | None, error: Exception | None = None) -> None:
        """It is there."""
        self._value, self._error, self.is_kept = value, error, True
        if self._event is not None:
            self._event.set()
        for call in self._calls if error is None else ():
            call(cast("T", value))

    def then(self, call: Callable[[T], object]) -> None:
        """Call it with the value, as soon as that comes: without a tick of the loop. The last one is called first."""
        self._calls = call, *self._calls

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
