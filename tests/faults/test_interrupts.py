"""Ctrl-C and timeouts at random instants: what the caller has, and what comes next, is D.

Cancellations are in ``test_cancellation.py``, at each await.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import DataLoader, PrefetchTimeoutError
from tests.faults.support.streaming import SHUFFLE, entry
from tests.support.faults import Program, num_rounds, say
from tests.support.figures import record
from tests.support.loading import NEVER_S, order_of, write_rows
from tests.support.tokenize_fns import id_and_text

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(1200)]

ROUNDS = num_rounds(quick=100, full=300)
NUM_ROWS = 2000


@pytest.fixture
def path(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


def check(path: Path, found: list[list[int]], of: str, interrupts: int) -> str:
    num_epochs = 1 + len(found) // NUM_ROWS
    wanted = order_of(path, num_epochs, shuffle=SHUFFLE)[: len(found)]
    got, places = [item[4] for item in found], {tuple(item[1:4]) for item in found}
    first = next((place for place, pair in enumerate(zip(got, wanted, strict=True)) if pair[0] != pair[1]), None)
    assert first is None, f"sample {first} of {len(got)} is {got[first : first + 5]}, not {wanted[first : first + 5]}"
    assert [item[0] for item in found] == list(range(len(found)))
    record("R9", of, interrupts=interrupts, lost=0, repeated=len(found) - len(places), out_of_order=0)
    return f"{len(found)} samples of {num_epochs} epochs; 0 lost, {len(found) - len(places)} repeated, 0 out of order"


def run(folder: Path, do: str, **settings: Any) -> dict[str, Any]:
    log = folder / "log"
    # An interrupt that comes while coverage notes a line leaves its lock held for good.
    with Program.of("interrupted", {"do": do, "log": str(log), **settings}, is_measured=False) as program:
        status, said = program.end(600)
        assert status == 0, said
    return json.loads(log.read_text())


TIGHT, AMPLE = {"num_workers": 2, "buffer_size": 30}, {"num_workers": 1}


@pytest.mark.parametrize(
    ("knobs", "most"),
    [
        pytest.param(TIGHT, 1, id="one, tight"),
        pytest.param(AMPLE, 1, id="one, ample"),
        pytest.param(TIGHT, 3, id="three in microseconds"),
    ],
)
def test_a_storm_of_keyboard_interrupts(tmp_path, path, knobs, most):
    began = time.monotonic()
    seen = run(tmp_path, "storm", path=str(path), number=ROUNDS, most=most, knobs=knobs)

    assert seen["raised"] >= ROUNDS
    assert seen["restarts"] == 0
    said = check(path, seen["found"], f"KeyboardInterrupt, up to {most} at once", seen["raised"])
    say(
        f"KeyboardInterrupt: {seen['raised']} in {seen['calls']} calls, up to {most} in one, {knobs}: {said}; "
        f"{time.monotonic() - began:.0f} s"
    )


def test_ctrl_c_to_the_whole_group_does_not_disturb_the_workers(tmp_path, path):
    number = min(ROUNDS, 200)
    log = tmp_path / "log"
    settings = {"path": str(path), "log": str(log), "do": "group", "number": number, "knobs": {"num_workers": 2}}
    chance = random.Random(3)
    num_sent = 0
    with Program.of("interrupted", settings, own_group=True) as program:
        program.wait_until_said("go")
        while not log.exists() and not program.has_ended:
            os.killpg(program.pid, signal.SIGINT)
            num_sent += 1
            time.sleep(chance.random() * 0.01)
        status, said = program.end()
        assert status == 0, said
    seen = json.loads(log.read_text())

    assert seen["restarts"] == 0, said
    result = check(path, seen["found"], "SIGINT to the group", num_sent)
    say(f"SIGINT to the group, from the workers' birth on: {num_sent} sent, 0 workers lost: {result}")


def test_timeouts(path):
    chance = random.Random(4)
    found: list[list[int]] = []
    num_timeouts = 0
    with DataLoader(path, tokenize_fn=id_and_text, shuffle=SHUFFLE, num_workers=2, buffer_size=20) as loader:
        found += map(entry, loader.get_next_batch(1, timeout_s=NEVER_S))
        while num_timeouts < ROUNDS:
            try:
                batch = loader.get_next_batch(chance.choice([1, 10, 100]), timeout_s=chance.choice([1e-6, 1e-4, 2e-3]))
            except PrefetchTimeoutError:
                num_timeouts += 1
            else:
                found += map(entry, batch)
        found += map(entry, loader.get_next_batch(200, timeout_s=NEVER_S))

    say(f"timeouts: {num_timeouts}: {check(path, found, 'timeouts', num_timeouts)}")
