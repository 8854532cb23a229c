"""Ctrl-C and timeouts at random instants: what the caller has, and what comes next, is D.

Cancellations are in ``test_cancellation.py``, at each await.
"""

import json
import os
import random
import signal
import time

import pytest

from asyncdata import DataLoader
from asyncdata.errors import PrefetchTimeoutError
from tests.faults.support.streaming import SHUFFLE, entry
from tests.support.faults import Program, num_rounds, record
from tests.support.loading import NEVER_S, id_and_text, order_of

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(1200)]

ROUNDS = num_rounds(quick=100, full=300)
NUM_ROWS = 2000
TIGHT, AMPLE = {"num_workers": 2, "buffer_size": 30}, {"num_workers": 1}


def check(path, found: list[list[int]], of: str, interrupts: int) -> None:
    wanted = order_of(path, 1 + len(found) // NUM_ROWS, shuffle=SHUFFLE)[: len(found)]
    num_repeated = len(found) - len({tuple(item[1:4]) for item in found})
    assert [item[4] for item in found] == wanted
    assert [item[0] for item in found] == list(range(len(found)))
    record("R9", of, interrupts=interrupts, lost=0, repeated=num_repeated, out_of_order=0)


STORMS = {"one, tight": (TIGHT, 1), "one, ample": (AMPLE, 1), "three in microseconds": (TIGHT, 3)}


@pytest.mark.parametrize(("knobs", "most"), STORMS.values(), ids=list(STORMS))
def test_a_storm_of_keyboard_interrupts(path, knobs, most):
    settings = {"do": "storm", "path": str(path), "number": ROUNDS, "most": most, "knobs": knobs}
    # An interrupt that comes while coverage notes a line leaves its lock held for good.
    with Program.of("trainers", settings, is_measured=False) as program:
        seen = json.loads(program.said(600).splitlines()[-1])

    assert seen["raised"] >= ROUNDS
    assert seen["restarts"] == 0
    check(path, seen["found"], f"KeyboardInterrupt, up to {most} at once, {knobs}", seen["raised"])


def test_ctrl_c_to_the_whole_group_does_not_disturb_the_workers(path):
    settings = {"do": "group", "path": str(path), "number": min(ROUNDS, 200), "knobs": {"num_workers": 2}}
    chance, num_sent = random.Random(3), 0
    with Program.of("trainers", settings, own_group=True) as program:
        program.wait_until_said("go")
        while not program.has_ended:
            os.killpg(program.pid, signal.SIGINT)
            num_sent += 1
            time.sleep(chance.random() * 0.01)
        seen = json.loads(program.said(600).splitlines()[-1])

    assert seen["restarts"] == 0
    check(path, seen["found"], "SIGINT to the group, from the start of its workers", num_sent)


def test_timeouts(path):
    chance, num_timeouts = random.Random(4), 0
    with DataLoader(path, tokenize_fn=id_and_text, shuffle=SHUFFLE, num_workers=2, buffer_size=20) as loader:
        found = list(map(entry, loader.get_next_batch(1, timeout_s=NEVER_S)))
        while num_timeouts < ROUNDS:
            try:
                batch = loader.get_next_batch(chance.choice([1, 10, 100]), timeout_s=chance.choice([1e-6, 1e-4, 2e-3]))
            except PrefetchTimeoutError:
                num_timeouts += 1
            else:
                found += map(entry, batch)
        found += map(entry, loader.get_next_batch(200, timeout_s=NEVER_S))
    check(path, found, "timeouts", num_timeouts)
