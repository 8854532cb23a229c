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


def free_slots(number: int) -> Slots:
    slots = Slots(number)
    assert [slots.hold() for _ in range(number)] == list(range(number))
    for slot in range(number):
        slots.release(slot)
    return slots


def test_before_a_slot_is_reused_its_borrowers_copy_once_and_no_others_do():
    slots = free_slots(2)
    first, second = Reader(), Reader()
    slots.borrowers.add(0, first)
    slots.borrowers.add(1, second)

    slot = slots.hold()

    assert [first.num_told, second.num_told] == [int(slot == 0), int(slot == 1)]
    slots.release(slot)
    assert slots.hold() == slot, "it has no borrowers any more"
    assert first.num_told + second.num_told == 1


def test_a_slot_without_borrowers_is_taken_first():
    slots = free_slots(3)
    reader = Reader()
    slots.borrowers.add(0, reader)

    assert [slots.hold(), slots.hold()] == [1, 2]
    assert reader.num_told == 0
    assert slots.hold() == 0
    assert reader.num_told == 1


def test_borrowers_that_were_deleted_do_not_count():
    slots = free_slots(2)
    for _ in range(3):
        slots.borrowers.add(0, Reader())
    reader = Reader()
    slots.borrowers.add(1, reader)

    assert slots.borrowers.number(0) == 0
    assert slots.hold() == 0
    assert reader.num_told == 0


def test_before_a_fork_all_borrowers_copy():
    readers, slots = [Reader(), Reader()], [Slots(2), Slots(1)]
    for some, reader in zip(slots, readers, strict=True):
        some.borrowers.add(0, reader)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns about a fork in a process with threads
        child = os.fork()
    if child == 0:
        os._exit(sum(reader.num_told for reader in readers))

    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 2
