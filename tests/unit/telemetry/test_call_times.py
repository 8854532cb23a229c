"""Calls and waits become totals, from which the trainer's own time follows."""

from __future__ import annotations

import pytest

from asyncdata.telemetry import call_times
from asyncdata.telemetry.call_times import CallTimes, CpuShare, Wait


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


class Stages:
    """What is missing at each look; and how the workers shared the CPUs."""

    def __init__(self) -> None:
        self.now, self.cpus = "start", CpuShare(0.0, 0.0)

    def __call__(self) -> str:
        return self.now

    def cpu_share(self) -> CpuShare:
        return self.cpus


def a_waiting_call(clock: Clock, stages: Stages) -> CallTimes:
    """A first call that waits since 0."""
    times = CallTimes(clock, stages, stages.cpu_share)
    times.called()
    times.wait_begins("first", 0.0, stages.now)
    return times


def test_a_wait_counts_while_it_lasts():
    clock, stages = Clock(), Stages()
    times = a_waiting_call(clock, stages)
    for clock.now in (1.0, 30.0):
        assert times.settle() == []

    totals = times.totals()
    assert (totals["calls"], totals["waits"], totals["wait_s"], totals["waiting_s"]) == (1, 1, {"start": 30.0}, 30.0)

    times.wait_ends("first", 31.0)
    assert times.settle() == [Wait(0.0, 31.0, "start")]
    totals = times.totals()
    assert (totals["waits"], totals["wait_s"], totals["waiting_s"]) == (1, {"start": 31.0}, 0.0)


def test_a_wait_for_several_things_is_split_by_time():
    clock, stages = Clock(), Stages()
    times = a_waiting_call(clock, stages)
    for clock.now, stages.now in ((1.0, "tokenize"), (2.0, "tokenize"), (20.0, "read")):
        times.settle()
    times.wait_ends("first", 20.5)
    times.settle()

    assert times.wait_s == {"start": 1.0, "tokenize": 19.0, "read": 0.5}


def test_the_first_calls_wait_is_start_up_and_no_time_of_the_trainer():
    clock, stages = Clock(), Stages()
    times = a_waiting_call(clock, stages)
    clock.now, stages.now = 4.0, "tokenize"
    times.settle()
    times.wait_ends("first", 5.0)
    clock.now = 7.0
    times.called()
    times.wait_begins("second", 7.0, "tokenize")
    clock.now = 8.0
    times.settle()

    assert times.first_s == {"start": 4.0, "tokenize": 1.0}
    assert times.wait_s == {"start": 4.0, "tokenize": 2.0}
    assert times.step_s == 2.0


def test_time_in_which_the_workers_had_no_cpu_is_named():
    clock, stages = Clock(), Stages()
    times = a_waiting_call(clock, stages)
    stages.cpus = CpuShare(0.75, 3.0)
    clock.now = 4.0
    times.settle()
    assert times.wait_s == {"start": 1.0, "cpu": 3.0}

    stages.cpus = CpuShare(0.75, 0.5)  # the workers slept most of the time
    clock.now = 8.0
    times.settle()
    assert times.wait_s == times.first_s == {"start": 4.5, "cpu": 3.5}
