"""The slots of shared memory that windows are read into."""

from __future__ import annotations

import copy
import mmap
from collections.abc import Callable

from asyncdata.core.callbacks import no_op
from asyncdata.core.messages import NO_SLOT

NUM_SLOTS = 3
"""One for the window that is delivered, one for the window that is read, and one for the canaries."""


class Slots:
    """Tracks which slots are free. A slot is reused after every request that refers to it is answered.

    :param on_free: called when a slot becomes free.
    :ivar numbers: their numbers.
    :ivar limit: how many of them may be held.
    """

    def __init__(self, num_slots: int, on_free: Callable[[], object] = no_op) -> None:
        self.numbers = range(num_slots)
        self.limit = num_slots
        self._num_requests = [0] * num_slots
        self._is_held = [False] * num_slots
        self._tells: dict[int, Callable[[], object]] = {}
        self.on_free = on_free

    def of_part(self, part: int, num_parts: int) -> Slots:
        """The slots of one part of a mixture; it may hold none until its limit is set."""
        own = copy.copy(self)  # the lists, and who is told, are the same
        own.numbers, own.limit, own.on_free = self.numbers[part::num_parts], 0, lambda: self.on_free()
        return own

    def tell(self, on_free: Callable[[], object]) -> None:
        """Call ``on_free`` when one of these became free, before the general call."""
        self._tells.update(dict.fromkeys(self.numbers, on_free))

    def hold(self) -> int | None:
        """Take a free slot; None if all are in use, or enough are held."""
        free = (slot for slot in self.numbers if not self._is_held[slot] and self._num_requests[slot] == 0)
        slot = next(free, None) if self.num_held() < self.limit else None
        if slot is not None:
            self._is_held[slot] = True
        return slot

    def num_held(self) -> int:
        """How many of them are held."""
        return sum(self._is_held[slot] for slot in self.numbers)

    def release(self, slot: int) -> None:
        """Give ``slot`` back: no further request will refer to it."""
        if slot == NO_SLOT:
            return

        self._is_held[slot] = False
        self._freed(slot)

    def use(self, slot: int) -> None:
        """A request that refers to ``slot``, which is held, is under way."""
        if slot == NO_SLOT:
            return

        assert self._is_held[slot] or self._num_requests[slot], "a free slot may get another window's content"
        self._num_requests[slot] += 1

    def done(self, slot: int) -> None:
        """A request that refers to ``slot`` is answered, or its worker has certainly ended."""
        if slot == NO_SLOT:
            return

        self._num_requests[slot] -= 1
        self._freed(slot)

    def _freed(self, slot: int) -> None:
        if not self._is_held[slot] and self._num_requests[slot] == 0:
            self._tells.get(slot, no_op)()
            self.on_free()


def anonymous_slots(num_bytes: int, num_parts: int) -> list[memoryview]:
    """The memory of all slots, for workers that share none. Only pages that are written to use physical memory.

    :param num_bytes: the size of a slot.
    :param num_parts: parts of a mixture; there are ``NUM_SLOTS`` for each.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return [
        memoryview(mmap.mmap(-1, num_bytes, flags=flags) if num_bytes else b"") for _ in range(NUM_SLOTS * num_parts)
    ]
