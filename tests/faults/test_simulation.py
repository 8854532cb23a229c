"""The whole loader in one thread, under thousands of schedules: each follows from its seed and can be run again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("trio")

from asyncdata.workers.slots import Slots
from tests.faults.support.simulated_sources import Outcome, simulate_way
from tests.support.faults import num_rounds, say
from tests.support.figures import record

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(0)]

ROUNDS = num_rounds(quick=100, full=2000, long=200_000)


def explore(seeds: Iterable[int]) -> list[Outcome]:
    """The outcome of each; the first one that fails says how to run it again, and its last events."""
    outcomes = []
    for seed in seeds:
        outcomes.append(Outcome())
        try:
            simulate_way("blocks", seed, outcomes[-1])
        except BaseException as error:
            again = f"python -m tests.faults.support.simulated_sources blocks {seed}"
            raise AssertionError("\n".join([f"run again with: {again}", *outcomes[-1][-40:]])) from error

    return outcomes


def test_under_every_schedule_what_is_delivered_is_d():
    began = time.monotonic()
    outcomes = explore(range(ROUNDS))

    num_samples, num_given_up = sum(item.num_samples for item in outcomes), sum(item.num_given_up for item in outcomes)
    num_restores, seconds = sum(item.num_restores for item in outcomes), time.monotonic() - began
    assert num_samples > 20 * ROUNDS
    assert num_given_up > ROUNDS
    assert num_restores > ROUNDS // 4
    record("SIM", "trio, mock clock", schedules=ROUNDS, lost=0, repeated=0, out_of_order=0)
    say(
        f"simulation: {ROUNDS} schedules, {ROUNDS / seconds * 60:.0f} a minute: {num_samples} samples, "
        f"{num_given_up} calls given up, {num_restores} restores; all is D"
    )


def test_a_seed_takes_the_same_course_every_time_and_others_take_others():
    courses = [list(course) for course in explore((1, 2, 3, 1, 2, 3))]

    assert courses[:3] == courses[3:]
    assert len({tuple(course) for course in courses}) == 3


def test_a_fault_is_found_and_the_seed_is_told(monkeypatch):
    explore(range(2))  # what is expected is found before there is a fault
    monkeypatch.setattr(Slots, "hold", lambda _: 0)  # all that read or write there now

    with pytest.raises(AssertionError, match=r"again with: python -m tests\.faults\.support\.simulated_sources blocks"):
        explore(range(50))
