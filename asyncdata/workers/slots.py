"""The slots of shared memory that windows are read into."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from asyncdata.core.callbacks import no_op
from asyncdata.core.messages import NO_SLOT
from asyncdata.workers.slot_views import Borrowers

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ("Slots", "anonymous_memory")


class Slots:
    """Tracks which slots are free. A slot is reused after every request that refers to it is answered.

    :param on_free: called when a slot becomes free.
    :ivar number: the number of slots.
    :ivar borrowers: objects with views into slots, including free slots.
    """

    def __init__(self, num_slots: int, on_free: Callable[[], object] = no_op) -> None:
        self.number = num_slots
        self._num_requests = [0] * num_slots
        self._is_held = [False] * num_slots
        self.on_free = on_free
        self.borrowers = Borrowers(num_slots)

    def hold(self, among: range | None = None) -> int | None:
        """Take a free slot, after its borrowers have copied their data; None if all slots are in use.

        :param among: the slots to choose from; None: all.
        """
        among = range(self.number) if among is None else among
        free = [slot for slot in among if not self._is_held[slot] and self._num_requests[slot] == 0]
        if not free:
            return None

        slot = min(free, key=self.borrowers.number)  # fewer borrowers, fewer copies
        self.borrowers.evict(slot)
        self._is_held[slot] = True
        return slot

    def num_held(self, among: range) -> int:
        """How many of the slots ``among`` are held."""
        return sum(self._is_held[slot] for slot in among)

    def release(self, slot: int) -> None:
        """Give ``slot`` back: no further request will refer to it."""
        if slot == NO_SLOT:
            return

        self._is_held[slot] = False
        self._freed(slot)

    def use(self, slot: int) -> None:
        """A request that refers to ``slot`` is under way.

        :raises RuntimeError: if the slot is free: another window could be read into it before the request is answered.
        """
        if slot == NO_SLOT:
            return

        if not (self._is_held[slot] or self._num_requests[slot]):
            raise RuntimeError(f"slot {slot} is free, so its content may be another window's")

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


def anonymous_memory(num_bytes: int) -> memoryview:
    """Anonymous memory, as large as the largest row may be. Only pages that are written to use physical memory."""
    if num_bytes == 0:
        return memoryview(bytearray())

    return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
