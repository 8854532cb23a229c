"""Borrowers: holders of memoryviews into released slots. They copy their data out before a slot is reused.

They also copy it before this process forks: the child shares the slots with the workers, and its data must not change.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ("Borrower", "Borrowers")


class Borrower(Protocol):
    """Something whose bytes lie in a slot."""

    def own(self) -> None:
        """Copy them, and drop the view into the slot. Any thread may call this."""
        ...


class Borrowers:
    """The borrowers of some slots, as weak references."""

    def __init__(self, num_slots: int) -> None:
        self._of: list[list[weakref.ref[Borrower]]] = [[] for _ in range(num_slots)]
        _everywhere.add(self)

    def add(self, slot: int, borrower: Borrower) -> None:
        """Register a borrower of the slot."""
        self._of[slot].append(weakref.ref(borrower))

    def number(self, slot: int) -> int:
        """The number of borrowers of the slot that still exist."""
        return sum(found() is not None for found in self._of[slot])

    def evict(self, slot: int) -> None:
        """Make all borrowers of the slot copy their data."""
        for found in self._of[slot]:
            borrower = found()
            if borrower is not None:
                borrower.own()
        self._of[slot].clear()

    def evict_all(self) -> None:
        """As :meth:`evict`, for every slot."""
        for slot in range(len(self._of)):
            for found in tuple(self._of[slot]):
                borrower = found()
                if borrower is not None:
                    borrower.own()


_everywhere: weakref.WeakSet[Borrowers] = weakref.WeakSet()


def _before_fork() -> None:
    for borrowers in tuple(_everywhere):
        borrowers.evict_all()


os.register_at_fork(before=_before_fork)
