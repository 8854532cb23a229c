"""What the coroutines of the read-ahead ask for, in the service's thread: replies of workers, free slots, a turn."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from asyncdata.core.errors import AsyncDataError
from asyncdata.workers.base import MAX_LOSSES, Crashed, error_of
from asyncdata.workers.changes import Promise

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup

    from asyncdata.core.messages import Reply, Request
    from asyncdata.workers.pool import Pool
    from asyncdata.workers.worker import Call

T = TypeVar("T")


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

    def __init__(self, executor: Pool) -> None:
        self.executor, self.slots = executor, executor.slots
        self.changes = executor.changes
        self._held: set[int] = set()
        self._lasting: dict[Promise[Any], Request] = {}

    @property
    def num_workers(self) -> int:
        """How many workers are to be kept busy."""
        return self.executor.num_workers

    def changed(self) -> None:
        """Something has changed: a reply came, a slot or a worker is free, there is room."""
        self.changes()

    def submit(self, request: Request, max_losses: int = MAX_LOSSES) -> Call:
        """Send the request; await what this returns for the reply."""
        return self.executor.submit(request, max_losses)

    async def ask(self, request: Request, kind: type[T]) -> T:
        """The reply to ``request``.

        :raises AsyncDataError: if it is of another kind.
        """
        return checked(await self.submit(request), kind)

    async def ask_again(self, request: Request) -> Reply | Crashed:
        """The reply to ``request``; a restart sends it again, and the coroutine waits on."""
        reply: Promise[Reply | Crashed] = Promise()
        self._lasting[reply] = request
        try:
            self.submit(request).then(reply.keep)
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
                self.submit(request).then(reply.keep)

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
