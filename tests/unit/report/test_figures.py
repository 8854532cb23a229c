"""The figures of a run, from its telemetry."""

from __future__ import annotations

import msgspec
import pytest

from asyncdata.report.figures import by_rank, origins, quantile, steps_of, summed
from asyncdata.telemetry.reader import read
from tests.support.report_pages import write_run_of
from tests.support.telemetry_files import BEGAN, interval, start, write, write_run


@pytest.mark.parametrize("max_points", [1, 3, 7, 1000])
def test_fewer_steps_have_the_same_totals_and_the_same_ends(tmp_path, max_points):
    write_run_of(tmp_path, ranks=1, samples=0, intervals=50)
    run = read(tmp_path)
    steps = [step for step in steps_of(run.stream, origins(run)[0], max_points) if step is not None]

    assert len(steps) <= max_points + 1
    assert (steps[0].since, steps[-1].until) == (0, 250)
    assert all(before.until == after.since for before, after in zip(steps, steps[1:], strict=False))
    assert sum(step.added.samples for step in steps) == 50 * 4 * 40
    assert sum(step.seconds for step in steps) == 250


def test_the_clock_stands_still_between_a_start_and_the_next_one(tmp_path):
    write_run(tmp_path)
    run = read(tmp_path)
    began, took = origins(run)
    first, second = (start.path for start in run.stream)

    assert (began[first], began[second]) == (BEGAN, BEGAN + 1000 - 20)  # it ran for 20 s, and went on after 1000
    assert took == 20 + 1000


def test_totals_before_and_after_a_state_was_loaded_are_not_compared(tmp_path):
    moments = [interval(0, 0, elapsed, groups, 0) for elapsed, groups in enumerate((0, 40, 80, 20, 60))]
    moments[3] = msgspec.structs.replace(moments[3], begins=True)
    write(tmp_path / "rank-00000-0000.jsonl", [start(), *moments])
    run = read(tmp_path)
    steps = list(steps_of(run.stream, origins(run)[0]))

    assert [None if step is None else step.added.samples for step in steps] == [160, 160, None, 160]
    assert by_rank(run)[0].calls == 40  # the calls of before count: the time was spent


def test_the_time_of_a_call_is_shown_until_it_ended_also_over_moments_without_an_answer(tmp_path):
    moments = [interval(0, 0, elapsed, 40 * elapsed, 0) for elapsed in range(5)]
    nothing = {"calls": 0, "wait_s": {}, "step_s": 0.0}
    moments[1:3] = [msgspec.structs.replace(moment, **nothing) for moment in moments[1:3]]
    write(tmp_path / "rank-00000-0000.jsonl", [start(), *moments])
    run = read(tmp_path)
    steps = steps_of(run.stream, origins(run)[0], of_calls=True)

    assert [(step.since, step.until, step.added.calls) for step in steps if step is not None] == [
        (0, 15, 30),
        (15, 20, 10),
    ]


def test_shares_are_of_the_whole_time_and_at_most_one(tmp_path):
    write_run(tmp_path)
    run = read(tmp_path)
    step = next(iter(steps_of(run.stream, origins(run)[0])))

    assert step is not None
    assert step.shares(["start", "tokenize", "step", "index"]) == pytest.approx([0.1, 0.05, 0.8, 0])


def test_a_quantile_is_the_bucket_that_has_it():
    histogram = {4: 50, 16: 45, 64: 4, 256: 1}

    assert [quantile(histogram, share) for share in (0.01, 0.5, 0.51, 0.95, 0.96, 0.99, 1.0)] == [
        4,
        4,
        16,
        16,
        64,
        64,
        256,
    ]
    assert quantile({}, 0.5) is None


def test_sums_leave_out_what_is_zero():
    assert summed([{"a": 1, "b": 0}, {"a": 2, "c": 3}]) == {"a": 3, "c": 3}
