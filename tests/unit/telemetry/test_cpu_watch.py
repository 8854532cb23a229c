"""For how long workers waited for a CPU, from what the system counts."""

from __future__ import annotations

import pytest

from asyncdata.telemetry.cpu_watch import CpuWatch
from asyncdata.workers.machine import cpu_times


def test_only_what_is_new_counts_and_the_longest_wait_is_told():
    times = {1: (1.0, 0.0), 2: (1.0, 5.0)}
    watch = CpuWatch(lambda: list(times), lambda pid: times[pid])
    assert watch.share() == pytest.approx((5 / 7, 5.0))
    assert watch.share() == (0.0, 0.0)

    times[1], times[2], times[3] = (2.0, 1.0), (1.5, 5.5), (0.0, 0.0)
    assert watch.share() == pytest.approx((0.5, 1.0))


def test_workers_that_ran_at_once_waited_for_nothing():
    times = {1: (1.0, 0.0)}
    assert CpuWatch(lambda: list(times), lambda pid: times[pid]).share() == (0.0, 0.0)


@pytest.mark.parametrize(
    ("text", "expected"), [("1500000000 250000000 7\n", (1.5, 0.25)), ("", (0.0, 0.0)), (None, (0.0, 0.0))]
)
def test_the_systems_counters_are_read_where_they_are(tmp_path, text, expected):
    (tmp_path / "proc/12").mkdir(parents=True)
    if text is not None:
        (tmp_path / "proc/12/schedstat").write_text(text)

    assert cpu_times(12, tmp_path) == expected
