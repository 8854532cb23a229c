"""Cancels a coroutine at exactly its n-th await that waits: by its task, as asyncio does it, or by a scope."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from tests.support.loading import NEVER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

__all__ = ("MOMENTS", "WAYS", "Cut", "Ended", "cancelled_at", "num_tasks")

MOMENTS = ("when it begins to wait", "when it is about to go on")
WAYS = {
    "asyncio, task.cancel()": ("asyncio", {}),
    "uvloop, task.cancel()": ("asyncio", {"use_uvloop": True}),
    "asyncio, scope": ("asyncio", {}),
    "trio, scope": ("trio", {}),
}
"""How a call may be cancelled, and the backend that it takes."""


class Cut:
    """Awaits ``coroutine``, and calls ``cancel`` at one of its awaits.

    :param point: the number of the await, from 0; those that need not wait do not count.
    :param moment: one of :data:`MOMENTS`. The second is when its result is there and it has not seen it yet: what was
        handed over then is lost if anybody takes it for received.
    :param on_wait: called at each await.
    :ivar num_awaits: so many there have been.
    """

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], point: int, moment: str, on_wait: Callable[[], object]
    ) -> None:
        self.num_awaits = 0
        self._on_wait = on_wait
        self.cancel: Callable[[], object] = bool
        self._coroutine = coroutine
        self._point = point
        self._is_late = moment == MOMENTS[1]

    def __await__(self) -> Generator[Any, Any, Any]:
        result, error = None, None
        while True:
            try:
                wanted = self._coroutine.send(result) if error is None else self._coroutine.throw(error)
            except StopIteration as stop:
                return stop.value

            is_here = self.num_awaits == self._point
            self.num_awaits += 1
            self._on_wait()
            if is_here:
                self._cancel_at(wanted)
            result = error = None
            try:
                result = yield wanted
            except BaseException as raised:
                error = raised
            if is_here and self._is_late and not isinstance(wanted, asyncio.Future | None):  # trio
                self.cancel()

    def _cancel_at(self, wanted: Any) -> None:
        if not self._is_late:
            self.cancel()
        elif isinstance(wanted, asyncio.Future):
            wanted.add_done_callback(lambda _: self.cancel())  # before the task's own, which is added after it
        elif wanted is None:
            asyncio.get_running_loop().call_soon(self.cancel)


class Ended(NamedTuple):
    """How a call ended.

    :ivar was_cut: whether it was cancelled; then it has no result.
    :ivar is_over: whether it had fewer awaits than it was to be cancelled at.
    """

    result: Any
    was_cut: bool
    is_over: bool


async def cancelled_at(
    point: int, moment: str, way: str, coroutine: Coroutine[Any, Any, Any], on_wait: Callable[[], object] = bool
) -> Ended:
    """Cancel the coroutine there, and wait for its end.

    :param on_wait: called at each of its awaits.
    :raises TimeoutError: if it does not end.
    """
    cut = Cut(coroutine, point, moment, on_wait)

    async def call() -> Any:
        return await cut

    if way.endswith("scope"):
        was_cut, result = await _in_a_scope(cut, call)
    else:
        was_cut, result = await _in_a_task(cut, call)
    return Ended(result, was_cut, cut.num_awaits <= point)


async def _in_a_scope(cut: Cut, call: Callable[[], Coroutine[Any, Any, Any]]) -> tuple[bool, Any]:
    with anyio.fail_after(NEVER_S), anyio.CancelScope() as scope:
        cut.cancel = scope.cancel
        return False, await call()

    return True, None


async def _in_a_task(cut: Cut, call: Callable[[], Coroutine[Any, Any, Any]]) -> tuple[bool, Any]:
    task = asyncio.ensure_future(call())
    cut.cancel = task.cancel
    done, _ = await asyncio.wait({task}, timeout=NEVER_S)
    if not done:
        raise TimeoutError("a cancelled call hangs")

    return (True, None) if task.cancelled() else (False, task.result())


def num_tasks(way: str) -> int:
    """How many tasks this loop has."""
    if way.startswith("trio"):
        import trio

        return trio.lowlevel.current_statistics().tasks_living

    return len(asyncio.all_tasks())
