"""Work that nobody waits for, done by a worker while it has nothing else to do."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

__all__ = ("Restless", "is_awaited", "pause", "wait_for_pause")


class Restless(Protocol):
    """Something in a worker that has such work."""

    def on_pause(self) -> None:
        """Do it. It must not raise: there is nobody to tell."""
        ...


_waiting: WeakSet[Restless] = WeakSet()


def wait_for_pause(who: Restless) -> None:
    """Have ``who`` told of the next pause, if there is one: in the trainer's process there is none."""
    _waiting.add(who)


def is_awaited() -> bool:
    """Whether anybody waits for a pause."""
    return bool(_waiting)


def pause() -> None:
    """There is a pause: everybody who waits for one works in it, once."""
    while _waiting:
        _waiting.pop().on_pause()
