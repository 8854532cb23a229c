"""Calls and waits become totals, from which the trainer's own time follows."""

from __future__ import annotations

import pytest

from asyncdata.telemetry import call_times
from asyncdata.telemetry.call_times import CallTimes


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_time_between_calls_is_the_trainers_without_the_waits():
    clock = Clock()
    times = CallTimes(clock)
    for at, waited_s in ((0.0, 3.0), (4.0, 0.0), (5.5, 0.25), (6.0, 0.0)):
        clock.now = at
        times.called()
        if waited_s:
            times.waited(at, waited_s, "read")

    waits = times.settle()

    assert [(wait.began, wait.seconds) for wait in waits] == [(0.0, 3.0), (5.5, 0.25)]
    assert (times.num_calls, times.num_waits, times.wait_s) == (4, 2, {"read": 3.25})
    assert times.step_s == pytest.approx(1.0 + 1.5 + 0.25)
    assert times.step_ms == {215: 1, 861: 1, 1448: 1}


def test_calls_of_several_threads_never_make_a_negative_time():
    clock = Clock()
    times = CallTimes(clock)
    times.called()
    times.called()
    times.waited(0.0, 5.0, "read")
    clock.now = 1.0
    times.called()
    times.settle()

    assert times.step_s == 0.0


def test_what_does_not_fit_in_the_queue_is_counted(monkeypatch):
    monkeypatch.setattr(call_times, "_MAX_MOMENTS", 3)
    times = CallTimes()
    for _ in range(5):
        times.called()
    times.waited(0.0, 1.0, "read")
    times.settle()
    times.called()
    times.settle()

    assert (times.num_calls, times.num_waits, times.num_lost) == (4, 0, 3)
