"""An actor as the pool sees it: what it was asked, how far it is, and whether it is lost."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from asyncdata.workers.pool.worker import Worker
from asyncdata.workers.ray.cluster import WATCH, kill

if TYPE_CHECKING:
    from concurrent.futures import Future

    from asyncdata.workers.pool.lost_workers import Lost

__all__ = ("Actor", "RemoteWorkerState", "answer_of")


class Actor:
    """The process of a worker on another node: what :class:`~asyncdata.workers.pool.worker.Worker` asks of one.

    :ivar pid: None, as it is no process of this machine.
    """

    pid = None

    def __init__(self, number: int, handle: Any) -> None:
        self.number = number
        self.handle = handle
        self._seen = (0, -1)

    def progress(self) -> tuple[int, int]:
        """The number of the request that it worked on when it was last asked, and its row."""
        return self._seen

    async def ask_progress(self, call_soon: Any, timeout_s: float) -> None:
        """Ask it; it may not answer, if a library that it has called holds the interpreter."""
        with anyio.move_on_after(timeout_s):
            try:
                ref = self.handle.progress.options(concurrency_group=WATCH).remote()
                found = (await answer_of(ref, call_soon)).result()
            except Exception:  # it is lost: the answers to its requests say so as well
                return
            self._seen = tuple(found)

    def kill(self) -> None:
        """Kill it."""
        kill(self.handle)


class RemoteWorkerState(Worker):
    """A worker that is an actor.

    :ivar lost: why it was lost; None while it is not.
    :ivar over: set when it is lost, or dismissed.
    """

    process: Any

    def __init__(self, actor: Actor, row_timeout_s: float) -> None:
        super().__init__(actor, None, row_timeout_s)  # type: ignore[arg-type]
        self.lost: Lost | None = None
        self.over = anyio.Event()

    def end(self, lost: Lost | None = None) -> None:
        """It gets no more requests."""
        self.lost = self.lost or lost
        self.is_dismissed = True
        self.over.set()


async def answer_of(ref: Any, call_soon: Any) -> Future[Any]:
    """The finished future of an object that Ray makes. No thread waits for it."""
    done = anyio.Event()
    future: Future[Any] = ref.future()
    future.add_done_callback(partial(_wake, call_soon, done))
    await done.wait()
    return future


def _wake(call_soon: Any, done: anyio.Event, _: object) -> None:
    call_soon(done.set)
