"""Autotuning: as many workers and as much read-ahead as the trainer needs, within the limits, and then no changes."""

from __future__ import annotations

import itertools

import pytest

from asyncdata.loader.autotune.policy import Autotuner, Change, Observation, Settled
from tests.support.simulated import Simulation, Step, limits, steps

# A worker makes 1,000 rows a second, so a trainer that takes 100 rows in 0.02 s is as fast as five of them.
ROW_S = 0.001


def reasons(simulation: Simulation) -> list[str]:
    return [change.reason for change in simulation.changes]


# The trainer is the slow part


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("seconds", [0.2, 0.15, 2.0])
def test_a_trainer_that_one_worker_can_feed_gets_no_more_and_is_left_alone(seed: int, seconds: float) -> None:
    loader = Simulation(steps(100, seconds), row_s=ROW_S, seed=seed)

    loader.run(600)

    assert (loader.changes, loader.settled) == ([], ["fed"])


@pytest.mark.thorough
def test_a_cheap_function_with_a_trainer_that_is_not_so_fast_gets_no_more_workers_either() -> None:
    loader = Simulation(steps(32, 32 * 20e-6), row_s=5e-6)

    loader.run(60)

    assert {change.what for change in loader.changes} == {"capacity"}


# The workers are the slow part


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(5))
def test_a_trainer_as_fast_as_five_workers_gets_five_or_six_and_does_not_wait(seed: int) -> None:
    loader = Simulation(steps(100, 0.02), row_s=ROW_S, seed=seed)

    loader.run(20)

    assert loader.num_workers in (5, 6)
    assert loader.run(300) < 0.01
    assert loader.num_workers in (5, 6)
    assert len(loader.changes) <= 6


@pytest.mark.thorough
@pytest.mark.parametrize("seconds", [0.09, 0.06, 0.03, 0.0226, 0.0167])
def test_at_any_speed_of_the_trainer_it_ends_with_no_waits_and_few_decisions(seconds: float) -> None:
    loader = Simulation(steps(100, seconds), row_s=ROW_S)

    loader.run(30)

    assert loader.run(300) < 0.01
    assert loader.num_workers * seconds * 1000 >= 100
    assert (loader.num_workers - 2) * seconds * 1000 < 100
    assert len(loader.changes) <= 6


def test_a_trainer_that_always_waits_gets_the_maximum_of_workers_within_seconds() -> None:
    loader = Simulation(steps(32, 0.0), row_s=ROW_S)

    loader.run(6)

    assert loader.num_workers == 8
    assert set(reasons(loader)) == {"workers_busy"}
    loader.run(60)
    assert loader.settled == ["max_workers"]


def test_with_a_slow_function_more_workers_come_while_the_first_batch_is_waited_for() -> None:
    loader = Simulation(steps(1000, 0.0), row_s=0.5)

    loader.run(60)

    assert loader.num_delivered == 0
    assert loader.num_workers == 8


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_workers_that_bring_no_gain_are_removed(seed: int) -> None:
    loader = Simulation(steps(32, 0.0), row_s=ROW_S, num_cpus=4, seed=seed)

    loader.run(600)

    assert loader.num_workers in (4, 5)
    assert loader.settled == ["no_gain"]
    assert len(loader.changes) <= 4 + 2 * 8, "tried again after twice as long each time"


@pytest.mark.parametrize(("max_workers", "num_workers"), [(1, 1), (3, 3)])
def test_there_are_never_more_workers_than_allowed(max_workers: int, num_workers: int) -> None:
    loader = Simulation(steps(32, 0.0), row_s=ROW_S, allowed=limits(max_workers=max_workers))

    loader.run(60)

    assert (loader.num_workers, loader.settled) == (num_workers, ["max_workers"])


def test_workers_that_are_given_are_left_alone() -> None:
    for seconds in (0.0, 10.0):
        loader = Simulation(steps(100, seconds), row_s=ROW_S, allowed=limits(min_workers=3, max_workers=3))

        loader.run(200)

        assert loader.num_workers == 3
        assert all(change.what == "capacity" for change in loader.changes)


# Memory


def test_workers_and_what_they_take_stay_below_the_budget() -> None:
    loader = Simulation(steps(32, 0.0), row_s=ROW_S, worker_bytes=100, allowed=limits(max_worker_bytes=350))

    loader.run(60)

    assert (loader.max_workers, loader.num_workers, loader.settled) == (3, 3, ["max_memory_bytes"])


@pytest.mark.thorough
def test_workers_that_grow_beyond_the_memory_budget_are_removed_for_good() -> None:
    loader = Simulation(steps(32, 0.0), row_s=ROW_S, worker_bytes=100, allowed=limits(max_worker_bytes=800))
    loader.run(10)
    assert loader.num_workers == 8

    loader.worker_bytes = 200
    loader.run(10)
    assert loader.num_workers == 4

    loader.worker_bytes = 100
    loader.run(60)
    assert loader.num_workers == 4
    assert reasons(loader).count("max_memory_bytes") == 1


def test_one_worker_stays_even_beyond_the_memory_budget() -> None:
    loader = Simulation(steps(32, 0.0), row_s=ROW_S, worker_bytes=1000, allowed=limits(max_worker_bytes=1))

    loader.run(60)

    assert (loader.num_workers, loader.num_delivered > 0) == (1, True)


# Bursts


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(5))
def test_for_a_trainer_that_comes_in_bursts_more_is_read_ahead_and_one_worker_is_enough(seed: int) -> None:
    trainer = itertools.chain([Step(32, 5.0)], steps(3000, 6.0))
    loader = Simulation(trainer, row_s=ROW_S, seed=seed)

    loader.run(300)

    assert loader.capacity == 4000
    assert loader.run(3600) < 0.01
    assert (loader.capacity, loader.num_workers) == (4000, 1)
    assert len(loader.changes) <= 6


@pytest.mark.thorough
def test_what_a_rollout_of_minutes_asks_for_at_once_is_read_ahead_during_it() -> None:
    loader = Simulation(steps(50_000, 100.0), row_s=ROW_S)

    loader.run(3600)

    assert loader.capacity == 64_000
    assert loader.run(3600) < 0.01


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("given", "capacity"), [({"max_ready_bytes": 2_500_000}, 2500), ({"max_capacity": 1000}, 1000)]
)
def test_no_more_is_read_ahead_than_allowed(given: dict[str, int], capacity: int) -> None:
    allowed = limits(max_workers=1, **given)
    loader = Simulation(steps(3000, 6.0), row_s=ROW_S, sample_bytes=1000, allowed=allowed)

    loader.run(3600)

    assert loader.capacity == capacity


def test_a_read_ahead_that_is_given_makes_bursts_a_matter_of_more_workers() -> None:
    loader = Simulation(steps(3000, 6.0), row_s=ROW_S, allowed=limits(max_capacity=1000))

    loader.run(600)

    assert loader.num_workers > 1
    assert {change.what for change in loader.changes} == {"num_workers"}


# Small chunks


def test_a_read_ahead_that_makes_chunks_of_a_cheap_function_too_small_grows() -> None:
    loader = Simulation(steps(512, 0.0), row_s=5e-6, allowed=limits(max_workers=2))
    loader.run(5)

    before = loader.num_delivered
    loader.run(2)

    assert loader.changes[0].reason == "small_chunks"
    assert loader.capacity >= 4000
    assert (loader.num_delivered - before) / 2 > 0.9 * 2 / 5e-6


def test_it_grows_for_a_trainer_that_does_not_wait_too_as_small_chunks_cost_it_cpu_time() -> None:
    loader = Simulation(steps(32, 0.001), row_s=5e-6, allowed=limits(max_workers=1))

    loader.run(30)

    assert [(change.what, change.after, change.reason) for change in loader.changes] == [
        ("capacity", 4000, "small_chunks")
    ]


def test_a_function_that_gives_chunks_enough_work_is_read_ahead_no_further_for_a_trainer_that_does_not_wait() -> None:
    loader = Simulation(steps(32, 0.01), row_s=1e-4, allowed=limits(max_workers=1))

    loader.run(30)

    assert loader.changes == []


# The trainer changes


@pytest.mark.thorough
def test_when_the_trainer_becomes_faster_and_slower_again_workers_follow() -> None:
    slow, fast = [Step(100, 0.2)] * 500, [Step(100, 0.02)] * 5000
    loader = Simulation(itertools.chain(slow, fast, steps(100, 0.2)), row_s=ROW_S)

    loader.run(100)
    assert loader.num_workers == 1

    loader.run(30)
    assert loader.num_workers in (5, 6)
    assert loader.run(30) < 0.01

    loader.run(600)
    assert loader.num_workers == 1
    assert loader.run(100) < 0.01


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_a_trainer_that_changes_all_the_time_is_not_followed_all_the_time(seed: int) -> None:
    """What was let go too early stays longer the next time, so that it ends."""
    both = [Step(100, 0.2)] * 100 + [Step(100, 0.02)] * 500
    loader = Simulation(itertools.cycle(both), row_s=ROW_S, seed=seed)

    loader.run(600)
    num_changes = len(loader.changes)
    loader.run(600)

    assert num_changes <= 30
    assert len(loader.changes) - num_changes <= 6


@pytest.mark.thorough
def test_a_trainer_that_pauses_for_hours_changes_nothing() -> None:
    loader = Simulation(itertools.chain([Step(100, 0.2)] * 100, [Step(100, 7200.0)], steps(100, 0.2)), row_s=ROW_S)

    loader.run(3 * 3600)

    assert loader.changes == []


@pytest.mark.thorough
def test_a_settled_state_is_reported_once() -> None:
    loader = Simulation(steps(32, 0.0), row_s=ROW_S, num_cpus=4)

    loader.run(200)

    assert len(loader.changes) > 4
    assert loader.settled == ["no_gain"]


# What it looks at


def observation(**values: float) -> Observation:
    """One worker and nothing done, except for what is given."""
    none = dict.fromkeys(("now_s", "num_replies", "num_rows", "starved_s", "work_s"), 0)
    return Observation(**{**none, "num_workers": 1, "num_ready_workers": 1, "capacity": 1000, **values})


def after(seconds: float, *, starved: float = 0.0, **values: float) -> Observation:
    """What has happened in so many seconds, ten replies of a hundred rows each second."""
    done = {"num_replies": 10 * seconds, "num_rows": 1000 * seconds, "work_s": seconds, "starved_s": seconds * starved}
    return observation(now_s=seconds, **{**done, **values})


def decision(*seen: Observation, **allowed: int) -> Change | Settled | None:
    """What is decided at the last of these."""
    tuner = Autotuner(limits(**allowed))
    decided = None
    for item in (observation(), *seen):
        decided = tuner.step(item)
    return decided


def test_a_single_look_decides_nothing() -> None:
    assert decision() is None


def test_few_replies_and_short_times_are_not_looked_at() -> None:
    tuner = Autotuner(limits())
    tuner.step(observation())
    tuner.step(after(1))

    assert not tuner.is_due(1.4, 100, 1)
    assert not tuner.is_due(9.0, 13, 1)
    assert tuner.is_due(1.6, 14, 1)
    assert not tuner.is_due(1.6, 14, 2)


def test_while_workers_start_nothing_is_measured() -> None:
    tuner = Autotuner(limits())
    starting = [after(number, starved=1.0, num_ready_workers=0) for number in range(1, 20)]

    assert [tuner.step(item) for item in starting] == [None] * 19


def test_what_the_first_batch_takes_is_not_looked_at_unless_it_is_long() -> None:
    tuner = Autotuner(limits())
    early = [after(number / 10, starved=1.0, has_delivered=False) for number in range(9)]

    assert [tuner.step(item) for item in early] == [None] * 9
    assert tuner.step(after(1, starved=1.0, has_delivered=False)) is None
    assert tuner.step(after(2, starved=1.0, has_delivered=False)) == Change("num_workers", 1, 2, "workers_busy")


def test_while_the_trainer_waits_a_worker_is_added() -> None:
    assert decision(after(2, starved=0.3)) == Change("num_workers", 1, 2, "workers_busy")


def test_a_short_wait_has_to_be_seen_twice() -> None:
    assert decision(after(2, starved=0.02)) is None
    assert decision(after(2, starved=0.02), after(3, starved=0.04)) == Change("num_workers", 1, 2, "workers_busy")


def test_a_trainer_that_waits_after_the_channel_was_full_gets_more_read_ahead() -> None:
    assert decision(after(2, starved=0.3, was_full=True)) == Change("capacity", 1000, 4000, "no_room")


def test_a_larger_read_ahead_is_not_judged_before_it_has_been_full() -> None:
    tuner = Autotuner(limits())
    for item in (observation(), after(1), after(2, starved=0.3, was_full=True)):
        decided = tuner.step(item)

    assert decided == Change("capacity", 1000, 4000, "no_room")
    assert tuner.step(after(3, starved=0.4, capacity=4000)) is None
    assert tuner.step(after(4, starved=0.5, capacity=4000)) is None
    assert tuner.step(after(5, starved=0.6, was_full=True, capacity=4000)) == Change("capacity", 4000, 16000, "no_room")


def test_an_eighth_more_is_added_where_there_are_many_workers() -> None:
    many = {"num_workers": 24, "num_ready_workers": 24}
    tuner = Autotuner(limits(max_workers=64))
    tuner.step(observation(**many))

    decided = tuner.step(after(10, starved=0.99, **many))

    assert decided == Change("num_workers", 24, 28, "workers_busy")
