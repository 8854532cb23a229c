"""Work in forked processes."""

from __future__ import annotations

import os

import pytest

from asyncdata.tokenization.encoders.forked_parts import ForkedParts

# The process that proves has one thread; that of pytest-xdist has more, of which Python 3.12 and later warn.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


def test_every_part_but_the_first_is_made_in_a_process_of_its_own() -> None:
    found = ForkedParts(4, lambda number: f"{number} {os.getppid()}".encode() * 100_000).results()

    assert sorted(found) == [f"{number} {os.getpid()}".encode() * 100_000 for number in (1, 2, 3)]


def test_they_keep_the_scheduling_of_the_process_that_forks_them() -> None:
    policy = os.sched_getscheduler(0)
    (found,) = ForkedParts(2, lambda _: bytes([os.sched_getscheduler(0)])).results()

    assert found == bytes([policy])


def test_a_part_that_fails_is_an_error_and_no_missing_result() -> None:
    def work(number: int) -> bytes:
        return b"x" * (1 // (number - 2))

    with pytest.raises(ChildProcessError, match=r"exit statuses \[0, 1, 0\]"):
        ForkedParts(4, work).results()
