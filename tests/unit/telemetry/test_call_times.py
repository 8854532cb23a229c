"""Calls and waits become totals, from which the trainer's own time follows; and what the system counts of workers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import in_ci
from tests.support.inner import change
from tests.support.parts import EDGES, CallTimes, CpuShare, CpuWatch, Histogram, cpu_times


class Watched:
    """The times of calls, with a clock, what is missing at each look, and how the workers shared the CPUs."""

    def __init__(self):
        self.now, self.stage, self.cpus = 0.0, "start", CpuShare(0.0, 0.0)
        self.times = CallTimes(lambda: self.now, lambda: self.stage, lambda: self.cpus)

    def look(self, now, stage="", cpus=None):
        """Settle at a moment, since which a stage is missing."""
        self.now, self.stage, self.cpus = now, stage or self.stage, cpus or self.cpus
        self.times.settle()

    def call(self, now, waited_s=0.0):
        self.now = now
        self.times.called()
        if waited_s:
            self.times.wait_begins(now, now, "read")
            self.times.wait_ends(now, now + waited_s)

    def call_and_wait(self, name, now, stage):
        self.call(now)
        self.times.wait_begins(name, now, stage)


@pytest.fixture
def waiting():
    """A first call waits since 0."""
    watched = Watched()
    watched.call_and_wait("first", 0.0, "start")
    return watched


def test_the_time_between_calls_is_the_trainers_without_the_waits():
    watched = Watched()
    for at, waited_s in ((0.0, 3.0), (4.0, 0.0), (5.5, 0.25), (6.0, 0.0)):
        watched.call(at, waited_s)
    watched.look(6.0)
    times = watched.times
    assert (times.num_calls, times.num_waits, times.wait_s) == (4, 2, {"read": 3.25})
    assert times.step_s == pytest.approx(1.0 + 1.5 + 0.25)
    assert times.totals()["step_ms"] == {215: 1, 861: 1, 1448: 1}
    assert times.totals()["wait_ms"] == {215: 1}  # the first is start-up


def test_calls_of_several_threads_never_make_a_negative_time():
    watched = Watched()
    for at, waited_s in ((0.0, 0.0), (0.0, 5.0), (1.0, 0.0)):
        watched.call(at, waited_s)
    watched.look(1.0)
    assert watched.times.step_s == 0.0


def test_what_does_not_fit_in_the_queue_is_counted(monkeypatch):
    change(monkeypatch, most_moments=3)
    times = CallTimes()
    for _ in range(5):
        times.called()
    times.wait_begins("first", 0.0, "read")
    times.wait_ends("first", 1.0)
    times.settle()
    times.called()
    times.settle()
    assert (times.num_calls, times.num_waits, times.num_lost) == (4, 0, 3)


def test_a_wait_is_split_by_what_is_missing_and_the_first_ones_is_start_up_and_no_time_of_the_trainer(waiting):
    for now, stage in ((1.0, "tokenize"), (2.0, "tokenize"), (4.0, "read")):
        waiting.look(now, stage)
    waiting.times.wait_ends("first", 4.5)
    waiting.call_and_wait("second", 7.0, "tokenize")
    waiting.look(8.0, "tokenize")
    assert waiting.times.first_s == {"start": 1.0, "tokenize": 3.0, "read": 0.5}
    assert waiting.times.wait_s == {"start": 1.0, "tokenize": 4.0, "read": 0.5}
    assert waiting.times.step_s == 2.5


def test_time_in_which_the_workers_had_no_cpu_is_named(waiting):
    waiting.look(4.0, cpus=CpuShare(0.75, 3.0))
    assert waiting.times.wait_s == {"start": 1.0, "cpu": 3.0}
    waiting.look(8.0, cpus=CpuShare(0.75, 0.5))  # the workers slept most of the time
    assert waiting.times.wait_s == waiting.times.first_s == {"start": 4.5, "cpu": 3.5}


def watch_of(times):
    """Of workers with these times, by their pids."""

    def statistics():
        return SimpleNamespace(workers=[SimpleNamespace(pid=pid) for pid in (None, *times)])

    return CpuWatch(SimpleNamespace(statistics=statistics), lambda pid: times[pid])


def test_only_what_is_new_counts_and_the_longest_wait_is_told():
    times = {1: (1.0, 0.0), 2: (1.0, 5.0)}
    watch = watch_of(times)
    assert watch.share() == pytest.approx((5 / 7, 5.0))
    assert watch.share() == (0.0, 0.0)
    times[1], times[2], times[3] = (2.0, 1.0), (1.5, 5.5), (0.0, 0.0)
    assert watch.share() == pytest.approx((0.5, 1.0))
    assert watch_of({1: (1.0, 0.0)}).share() == (0.0, 0.0), "it ran at once"


@pytest.mark.parametrize(
    ("text", "expected"), [("1500000000 250000000 7\n", (1.5, 0.25)), ("", (0.0, 0.0)), (None, (0.0, 0.0))]
)
def test_the_systems_counters_are_read_where_they_are(tmp_path, text, expected):
    (tmp_path / "proc/12").mkdir(parents=True)
    if text is not None:
        (tmp_path / "proc/12/schedstat").write_text(text)
    assert cpu_times(12, tmp_path) == expected


SIZE = 1 << 16
"""Numbers below it are looked up, others are searched."""

around = st.sampled_from([*EDGES, SIZE]).flatmap(lambda edge: st.integers(max(0, edge - 2), edge + 2))


@in_ci(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 300) | around, max_size=20), max_size=5))
def test_each_number_is_in_the_bucket_with_the_largest_edge_not_above_it_one_by_one_or_together(parts):
    together, single = Histogram(), Histogram()
    for numbers in parts:
        together.add_many(np.array(numbers, np.int64))
        single.add(numbers)
    buckets = [max(edge for edge in EDGES if edge <= number) for numbers in parts for number in numbers]
    expected = {bucket: buckets.count(bucket) for bucket in sorted(set(buckets))}
    assert together.counts() == single.counts() == expected
