"""The whole loader in one thread, under thousands of schedules: each follows from its seed and can be run again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("trio")

from tests.faults.support.simulated_sources import WAYS, Outcome, simulate_way
from tests.support.faults import num_rounds, say
from tests.support.figures import record

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(0)]

ROUNDS = dict.fromkeys(WAYS, num_rounds(quick=2, full=300, long=20_000))
ROUNDS["blocks"] = num_rounds(quick=100, full=2000, long=200_000)


def explore(way: str, seeds: Iterable[int]) -> list[Outcome]:
    """The outcome of each; the first one that fails says how to run it again, and its last events."""
    outcomes = []
    for seed in seeds:
        outcomes.append(Outcome())
        try:
            simulate_way(way, seed, outcomes[-1])
        except BaseException as error:
            again = f"run again with: python -m tests.faults.support.simulated_sources {way!r} {seed}"
            raise AssertionError("\n".join([f"{error!r}", again, *outcomes[-1][-40:]])) from error

    return outcomes


@pytest.mark.parametrize("way", WAYS)
def test_under_every_schedule_what_is_delivered_is_d_and_what_can_be_done_is_always_being_done(way):
    """Whatever windows are made of: no wake-up is lost, as each moment is looked at in which all tasks wait."""
    for module in WAYS[way].needs:
        pytest.importorskip(module)
    began, rounds = time.monotonic(), ROUNDS[way]
    outcomes = explore(way, range(rounds))

    num_samples, num_given_up = sum(item.num_samples for item in outcomes), sum(item.num_given_up for item in outcomes)
    num_restores, seconds = sum(item.num_restores for item in outcomes), time.monotonic() - began
    assert num_samples > rounds
    if way == "blocks":
        assert num_samples > 20 * rounds
        assert num_given_up > rounds
        assert num_restores > rounds // 4
        record("SIM", "trio, mock clock", schedules=rounds, lost=0, repeated=0, out_of_order=0)
    say(
        f"simulation, {way}: {rounds} schedules, {rounds / seconds * 60:.0f} a minute: {num_samples} samples, "
        f"{num_given_up} calls given up, {num_restores} restores; all is D, and no wake-up was lost"
    )
