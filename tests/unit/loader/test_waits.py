"""Waits count while they last, and each once."""

from __future__ import annotations

from asyncdata.loader.waits import Waits


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def test_waits_that_last_count_until_now():
    clock, seen = Clock(), []
    waits = Waits(clock)
    waits.on_begin = waits.on_end = lambda wait, now: seen.append((wait, now))
    waits.begin("a")
    clock.now = 11.0
    waits.begin("b")
    clock.now = 14.0

    assert (waits.totals(), waits.ended) == ((2, 7.0), (0, 0.0))

    waits.end("a")
    clock.now = 15.0
    assert (waits.totals(), waits.ended) == ((2, 8.0), (1, 4.0))

    waits.end("b")
    waits.end("b")  # an interrupt may have come between
    assert waits.totals() == waits.ended == (2, 8.0)
    assert seen[:3] == [("a", 10.0), ("b", 11.0), ("a", 14.0)]
