"""The slots of shared memory that windows are read into."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdata.core.callbacks import no_op
from asyncdata.core.messages import NO_SLOT
from asyncdata.workers.slot_views import Borrowers

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ("Slots",)


class Slots:
    """Tracks which slots are free. A slot is reused after every request that refers to it is answered.

    :param on_free: called when a slot becomes free.
    :ivar borrowers: objects with views into slots, including free slots.
    """

    def __init__(self, num_slots: int, on_free: Callable[[], object] = no_op) -> None:
        self._num_requests = [0] * num_slots
        self._is_held = [False] * num_slots
        self.on_free = on_free
        self.borrowers = Borrowers(num_slots)

    def hold(self) -> int | None:
        """Take a free slot, after its borrowers have copied their data; None if all slots are in use."""
        places = zip(self._is_held, self._num_requests, strict=True)
        free = [slot for slot, (held, num_requests) in enumerate(places) if not held and num_requests == 0]
        if not free:
            return None

        slot = min(free, key=self.borrowers.number)  # fewer borrowers, fewer copies
        self.borrowers.evict(slot)
        self._is_held[slot] = True
        return slot

    def release(self, slot: int) -> None:
        """Give ``slot`` back: no further request will refer to it."""
        if slot == NO_SLOT:
            return

        self._is_held[slot] = False
        self._freed(slot)

    def use(self, slot: int) -> None:
        """A request that refers to ``slot`` is under way."""
        if slot == NO_SLOT:
            return

        self._num_requests[slot] += 1

    def done(self, slot: int) -> None:
        """A request that refers to ``slot`` is answered, or its worker has certainly ended."""
        if slot == NO_SLOT:
            return

        self._num_requests[slot] -= 1
        self._freed(slot)

    def _freed(self, slot: int) -> None:
        if not self._is_held[slot] and self._num_requests[slot] == 0:
            self.on_free()
