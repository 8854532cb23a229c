"""Autotuning: as many workers and as much read-ahead as the trainer needs, within the limits, and then no changes."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata.loader.autotune import Autotuner, Change, Observation, Settled
from asyncdata.loader.executors import TuningLimits
from tests.support.examples import in_ci
from tests.support.simulated import Simulation, Step, limits, steps

# A worker makes 1,000 rows a second, so a trainer that takes 100 rows in 0.02 s is as fast as five of them.
ROW_S = 0.001

thorough = pytest.mark.thorough


def simulated(trainer: Iterable[Step], seconds: float, **settings: Any) -> Simulation:
    loader = Simulation(iter(trainer), **{"row_s": ROW_S, **settings})
    loader.run(seconds)
    return loader


def reasons(simulation: Simulation) -> list[str]:
    return [change.reason for change in simulation.changes]


@pytest.mark.parametrize("seconds", [0.15, pytest.param(2.0, marks=thorough)])
def test_a_trainer_that_one_worker_can_feed_gets_no_more_and_is_left_alone(seconds):
    loader = simulated(steps(100, seconds), 100)

    assert (loader.changes, loader.settled) == ([], ["fed"])


@pytest.mark.parametrize(
    "seconds", [0.02, *(pytest.param(each, marks=thorough) for each in (0.09, 0.06, 0.03, 0.0226, 0.0167))]
)
def test_at_any_speed_of_the_trainer_it_ends_with_no_waits_and_few_decisions(seconds):
    loader = simulated(steps(100, seconds), 30)

    assert loader.run(100) < 0.01
    assert (loader.num_workers - 2) * seconds * 1000 < 100 <= loader.num_workers * seconds * 1000
    assert len(loader.changes) <= 6


def test_with_a_slow_function_more_workers_come_while_the_first_batch_is_waited_for():
    loader = simulated(steps(1000, 0.0), 60, row_s=0.5)

    assert (loader.num_delivered, loader.num_workers) == (0, 8)


@pytest.mark.parametrize(
    ("settings", "num_workers", "settled"),
    [
        ({}, 8, ["max_workers"]),
        ({"allowed": limits(max_workers=1)}, 1, ["max_workers"]),
        ({"allowed": limits(max_workers=3)}, 3, ["max_workers"]),
        ({"worker_bytes": 100, "allowed": limits(max_worker_bytes=350)}, 3, ["max_memory_bytes"]),
        ({"worker_bytes": 1000, "allowed": limits(max_worker_bytes=1)}, 1, ["max_memory_bytes"]),
    ],
)
def test_a_trainer_that_always_waits_gets_the_maximum_of_workers_within_seconds(settings, num_workers, settled):
    loader = simulated(steps(32, 0.0), 6, **settings)

    assert (loader.num_workers, loader.max_workers or 1) == (num_workers, num_workers)
    assert set(reasons(loader)) <= {"workers_busy"}
    loader.run(60)
    assert (loader.num_workers, loader.settled) == (num_workers, settled)


@pytest.mark.parametrize("seconds", [0.0, 10.0])
def test_workers_or_a_read_ahead_that_is_given_is_left_alone(seconds):
    loader = simulated(steps(100, seconds), 200, allowed=limits(min_workers=3, max_workers=3))
    assert loader.num_workers == 3
    assert all(change.what == "capacity" for change in loader.changes)

    loader = simulated(steps(3000, 6.0), 600, allowed=limits(max_capacity=1000))
    assert loader.num_workers > 1, "bursts are a matter of more workers then"
    assert {change.what for change in loader.changes} == {"num_workers"}


def test_workers_that_grow_beyond_the_memory_budget_are_removed_for_good():
    loader = simulated(steps(32, 0.0), 10, worker_bytes=100, allowed=limits(max_worker_bytes=800))
    found = [loader.num_workers]
    for worker_bytes in (200, 100):
        loader.worker_bytes = worker_bytes
        loader.run(10)
        found.append(loader.num_workers)

    assert found == [8, 4, 4]
    assert reasons(loader).count("max_memory_bytes") == 1


@pytest.mark.parametrize(
    ("trainer", "settings", "capacity"),
    [
        (itertools.chain([Step(32, 5.0)], steps(3000, 6.0)), {}, 4000),
        pytest.param(steps(50_000, 100.0), {}, 64_000, marks=thorough),
        (steps(3000, 6.0), {"allowed": limits(max_workers=1, max_ready_bytes=2_500_000)}, 2500),
        (steps(3000, 6.0), {"allowed": limits(max_workers=1, max_capacity=1000)}, 1000),
    ],
    ids=["bursts", "a rollout of minutes", "as many bytes as allowed", "as many samples as allowed"],
)
def test_what_a_trainer_asks_for_at_once_is_read_ahead_as_far_as_is_allowed(trainer, settings, capacity):
    loader = simulated(trainer, 3600, sample_bytes=1000, **settings)

    assert loader.capacity == capacity
    assert loader.num_workers == 1
    assert settings or loader.run(3600) < 0.01


def test_a_read_ahead_that_makes_chunks_of_a_cheap_function_too_small_grows():
    loader = simulated(steps(512, 0.0), 5, row_s=5e-6, allowed=limits(max_workers=2))
    before = loader.num_delivered
    loader.run(2)

    assert loader.changes[0].reason == "small_chunks"
    assert loader.capacity >= 4000
    assert (loader.num_delivered - before) / 2 > 0.9 * 2 / 5e-6


@pytest.mark.parametrize(("row_s", "seconds", "capacities"), [(5e-6, 0.001, [4000]), (1e-4, 0.01, [])])
def test_it_grows_for_a_trainer_that_does_not_wait_too_if_small_chunks_cost_it_cpu_time(row_s, seconds, capacities):
    loader = simulated(steps(32, seconds), 30, row_s=row_s, allowed=limits(max_workers=1))

    assert [change.after for change in loader.changes] == capacities
    assert set(reasons(loader)) <= {"small_chunks"}


def test_when_the_trainer_becomes_faster_and_slower_again_workers_follow():
    slow, fast = [Step(100, 0.2)] * 500, [Step(100, 0.02)] * 5000
    loader = simulated(itertools.chain(slow, fast, steps(100, 0.2)), 100)
    assert loader.num_workers == 1

    loader.run(30)
    assert loader.num_workers in (5, 6)
    loader.run(600)
    assert loader.num_workers == 1
    assert loader.run(100) < 0.01


@thorough
def test_a_trainer_that_changes_all_the_time_is_not_followed_all_the_time_nor_one_that_pauses():
    """What was let go too early stays longer the next time, so that it ends."""
    loader = simulated(itertools.cycle([Step(100, 0.2)] * 100 + [Step(100, 0.02)] * 500), 600)
    num_changes = len(loader.changes)
    loader.run(600)
    assert num_changes <= 30
    assert len(loader.changes) - num_changes <= 6

    pauses = itertools.chain([Step(100, 0.2)] * 100, [Step(100, 7200.0)], steps(100, 0.2))
    assert simulated(pauses, 3 * 3600).changes == []


TOTALS = ("now_s", "num_replies", "num_rows", "starved_s", "work_s")


def observation(**values: float) -> Observation:
    """One worker and nothing done, except for what is given."""
    there = {"num_workers": 1, "num_ready_workers": 1, "capacity": 1000}
    return Observation(**{**dict.fromkeys(TOTALS, 0), **there, **values})


def after(seconds: float, *, starved: float = 0.0, **values: float) -> Observation:
    """What has happened in so many seconds, ten replies of a hundred rows each second."""
    done = {"num_replies": 10 * seconds, "num_rows": 1000 * seconds, "work_s": seconds, "starved_s": seconds * starved}
    return observation(now_s=seconds, **{**done, **values})


def test_few_replies_and_short_times_are_not_looked_at():
    tuner = Autotuner(limits())
    assert tuner.step(observation()) is None
    tuner.step(after(1))

    due = [tuner.is_due(*now) for now in ((1.4, 100, 1), (9.0, 13, 1), (1.6, 14, 1), (1.6, 14, 2))]
    assert due == [False, False, True, False]


MORE = Change("num_workers", 1, 2, "workers_busy")
DEEPER = Change("capacity", 1000, 4000, "no_room")
MANY = {"num_workers": 24, "num_ready_workers": 24}
FIRST = {"starved": 1.0, "has_delivered": False}
FULL_BEFORE = [
    after(1),
    after(2, starved=0.3, was_full=True),
    *(after(at, starved=at / 10 + 0.1, capacity=4000) for at in (3, 4)),
    after(5, starved=0.6, was_full=True, capacity=4000),
]
BEFORE_THE_FIRST = [*(after(number / 10, **FIRST) for number in range(1, 10)), after(1, **FIRST), after(2, **FIRST)]
STARTING = [after(number, starved=1.0, num_ready_workers=0) for number in range(1, 20)]
DEEPER_STILL = Change("capacity", 4000, 16000, "no_room")
EIGHTH = Change("num_workers", 24, 28, "workers_busy")
DECISIONS: dict[str, tuple[list[Observation], list[Change | Settled | None]]] = {
    "while the trainer waits a worker is added": ([after(2, starved=0.3)], [MORE]),
    "a short wait has to be seen twice": ([after(2, starved=0.02), after(3, starved=0.04)], [None, MORE]),
    "while workers start nothing is measured": (STARTING, [None] * 19),
    "the first batch is not looked at unless it takes long": (BEFORE_THE_FIRST, [None] * 10 + [MORE]),
    "a channel that was full is made larger, and then has to be full again": (
        FULL_BEFORE,
        [None, DEEPER, None, None, DEEPER_STILL],
    ),
    "of many workers an eighth more is added": ([observation(**MANY), after(10, starved=0.99, **MANY)], [None, EIGHTH]),
}


@pytest.mark.parametrize(("seen", "wanted"), DECISIONS.values(), ids=DECISIONS)
def test_it_decides_that(seen, wanted):
    tuner = Autotuner(limits(max_workers=64))
    tuner.step(observation(has_delivered=seen[0].has_delivered, num_workers=seen[0].num_workers))

    assert [tuner.step(item) for item in seen] == wanted


all_limits = st.builds(
    lambda least, more, **limits: TuningLimits(min_workers=least, max_workers=least + more, **limits),
    st.integers(1, 4),
    st.sampled_from([0, 1, 7, 60]),
    max_capacity=st.sampled_from([100, 1000, 1 << 40]),
    max_worker_bytes=st.sampled_from([0, 1000, 1 << 40]),
    max_ready_bytes=st.sampled_from([1, 100_000, 1 << 40]),
)
added = st.fixed_dictionaries(
    {
        "now_s": st.sampled_from([0.0, 0.001, 0.6, 5.0, 1e5]),
        "num_replies": st.sampled_from([0, 1, 50, 5000]),
        "num_rows": st.sampled_from([0, 1, 64, 5_000_000]),
        "starved_s": st.floats(0, 1e5),
        "work_s": st.floats(0, 1e5),
    }
)
states = st.fixed_dictionaries(
    {
        "was_full": st.booleans(),
        "has_delivered": st.booleans(),
        "sample_bytes": st.sampled_from([0.0, 700.0, 1e9]),
        "worker_bytes": st.sampled_from([0, 90, 10_000]),
    }
)


@in_ci(max_examples=30)
@given(allowed=all_limits, seen=st.lists(st.tuples(added, states, st.booleans()), max_size=60))
def test_limits_are_kept_and_decisions_are_of_what_is_there(allowed, seen):
    tuner, totals = Autotuner(allowed), dict.fromkeys(TOTALS, 0)
    num_workers, capacity = allowed.min_workers, min(1000, allowed.max_capacity)
    for more, state, is_starting in seen:
        totals = {name: totals[name] + more[name] for name in totals}
        there = {"num_workers": num_workers, "num_ready_workers": num_workers - is_starting, "capacity": capacity}
        now = Observation(**totals, **there, **state)
        change = tuner.step(now)
        if not isinstance(change, Change):
            continue

        assert change.before == (num_workers if change.what == "num_workers" else capacity) != change.after
        if change.what == "num_workers":
            num_workers, grows = change.after, change.after > change.before
            assert allowed.min_workers <= num_workers <= allowed.max_workers
            assert not grows or num_workers * now.worker_bytes <= allowed.max_worker_bytes
            assert num_workers <= 2 * change.before or not grows
        else:
            assert change.before < change.after <= allowed.max_capacity
            capacity = change.after
            assert capacity * now.sample_bytes <= allowed.max_ready_bytes
