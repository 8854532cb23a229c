"""No wake-up is lost: in no state is there work to do and nothing pending that would have it done.

All kinds of windows are read under many schedules, from a cold start, and each moment is looked at in which all tasks
wait: :mod:`tests.faults.support.liveness` says for what.
"""

from __future__ import annotations

import pytest

pytest.importorskip("trio")

from tests.faults.support.simulated_sources import WAYS, Outcome, simulate_way
from tests.support.faults import num_rounds, say

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(0)]

ROUNDS = num_rounds(quick=2, full=300, long=20_000)


@pytest.mark.parametrize("name", WAYS)
def test_what_can_be_done_is_always_being_done(name):
    """The first schedule that fails says how to run it again."""
    for module in WAYS[name].needs:
        pytest.importorskip(module)
    num_samples = 0
    for seed in range(ROUNDS):
        outcome = Outcome()
        try:
            simulate_way(name, seed, outcome)
        except BaseException as error:
            again = f"python -m tests.faults.support.simulated_sources {name!r} {seed}"
            raise AssertionError("\n".join([f"{error!r}", f"run again with: {again}", *outcome[-20:]])) from error

        num_samples += outcome.num_samples
    assert num_samples > ROUNDS
    say(f"liveness, {name}: {ROUNDS} schedules, {num_samples} samples, no wake-up lost")
