"""Borrowers: objects with views into free slots."""

from __future__ import annotations

import os
import warnings

from asyncdata.workers.slots import Slots


class Reader:
    """Counts how often it was told to copy."""

    def __init__(self) -> None:
        self.num_told = 0

    def own(self) -> None:
        self.num_told += 1


def borrowed(number: int, *slots_of_readers: int) -> tuple[Slots, list[Reader]]:
    """So many free slots, and readers of these."""
    slots, readers = Slots(number), [Reader() for _ in slots_of_readers]
    assert [slots.hold() for _ in range(number)] == list(range(number))
    for slot in range(number):
        slots.release(slot)
    for slot, reader in zip(slots_of_readers, readers, strict=True):
        slots.borrowers.add(slot, reader)
    return slots, readers


def told(readers: list[Reader]) -> list[int]:
    return [reader.num_told for reader in readers]


def test_a_slot_without_borrowers_is_taken_first_and_before_another_one_is_its_borrowers_copy_once():
    slots, readers = borrowed(3, 0, 1)

    assert slots.hold() == 2
    assert told(readers) == [0, 0]
    assert slots.hold() == 0
    assert told(readers) == [1, 0]
    slots.release(0)
    assert slots.hold() == 0, "it has no borrowers any more"
    assert told(readers) == [1, 0]


def test_borrowers_that_were_deleted_do_not_count():
    slots, readers = borrowed(2, 0, 0, 1)
    del readers[:2]

    assert slots.borrowers.number(0) == 0
    assert slots.hold() == 0
    assert told(readers) == [0]


def test_before_a_fork_all_borrowers_copy():
    slots, readers = zip(borrowed(2, 0), borrowed(1, 0), strict=True)
    assert len(slots) == 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns about a fork in a process with threads
        child = os.fork()
    if child == 0:
        os._exit(sum(told([reader for some in readers for reader in some])))

    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 2
