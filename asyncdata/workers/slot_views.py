"""Who still looks into slots that are free: before such a slot is filled again, they copy what is theirs.

So are they before a fork. The child shares the slots with workers that it knows nothing of, and what it holds must
stay as it is.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ("Borrower", "Borrowers")


class Borrower(Protocol):
    """Something whose bytes lie in a slot."""

    def own(self) -> None:
        """Copy them, and look into the slot no more. Any thread may say so."""
        ...


class Borrowers:
    """The borrowers of some slots. Whoever is gone needs nothing."""

    def __init__(self, num_slots: int) -> None:
        self._of: list[list[weakref.ref[Borrower]]] = [[] for _ in range(num_slots)]
        _everywhere.add(self)

    def add(self, slot: int, borrower: Borrower) -> None:
        """It looks into the slot from now on."""
        self._of[slot].append(weakref.ref(borrower))

    def number(self, slot: int) -> int:
        """How many look into the slot."""
        return sum(found() is not None for found in self._of[slot])

    def evict(self, slot: int) -> None:
        """Nobody looks into the slot any more."""
        for found in self._of[slot]:
            borrower = found()
            if borrower is not None:
                borrower.own()
        self._of[slot].clear()

    def evict_all(self) -> None:
        """Likewise, of every slot."""
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
