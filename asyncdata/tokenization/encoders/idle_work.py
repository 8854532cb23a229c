"""Deferred work that a worker does while it has no request."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet


class IdleTask(Protocol):
    """Something in a worker that has deferred work."""

    def on_pause(self) -> None:
        """Run the deferred work. It must not raise: there is no caller to report to."""
        ...


_waiting: WeakSet[IdleTask] = WeakSet()


def wait_for_pause(task: IdleTask) -> None:
    """Call ``on_pause`` of ``task`` once, when the worker is idle. In the trainer's process this never happens."""
    _waiting.add(task)


def is_awaited() -> bool:
    """Whether there is deferred work."""
    return bool(_waiting)


def pause() -> None:
    """The worker is idle: run all deferred work once."""
    while _waiting:
        _waiting.pop().on_pause()
