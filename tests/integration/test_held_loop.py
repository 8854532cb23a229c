"""User code that holds the event loop: the samples are ready, and it is not the data that the trainer waits for."""

from __future__ import annotations

import re
import time

import anyio
import pytest
from structlog.testing import capture_logs

from asyncdata import AsyncDataLoader
from asyncdata.telemetry.reader import read
from tests.support.faults import until
from tests.support.html_page import read_page
from tests.support.loaders import gated, num_waiting
from tests.support.loading import ids
from tests.support.report_pages import page_of
from tests.support.tokenize_fns import waits_for_a_file

HELD = r"the samples are ready, and your code has held the event loop for (\d+\.\d) s"
NUM_CALLS = 3


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_loop_that_other_code_holds_is_named_and_is_no_wait_for_data(tmp_path, backend):
    path, gate = gated(tmp_path, 0)
    taken: list[list[int]] = []
    began = time.monotonic()

    async def main():
        knobs = {"shuffle": False, "num_workers": 0, "progress": "log", "telemetry": tmp_path / "run"}
        async with AsyncDataLoader(path, tokenize_fn=waits_for_a_file, **knobs) as loader:

            async def take():  # with a timeout that is over before the loop runs it
                taken.append(ids(await loader.get_next_batch(10, timeout_s=1.5)))

            async with anyio.create_task_group() as group:
                for _ in range(NUM_CALLS):
                    group.start_soon(take)
                while num_waiting(loader) < NUM_CALLS:
                    await anyio.lowlevel.checkpoint()
                gate.touch()
                until(lambda: any(float(held) >= 1.5 for held in told()))  # blocks: this is the fault
                waited_s = loader.statistics().data_wait_seconds_total
            return waited_s, loader.statistics()

    def told():
        return re.findall(HELD, " ".join(log["reason"] for log in logs if log["event"] == "loader.waiting"))

    with capture_logs() as logs:
        waited_s, now = anyio.run(main, backend=backend)
    elapsed_s = time.monotonic() - began

    assert sorted(taken) == [list(range(first, first + 10)) for first in range(0, 10 * NUM_CALLS, 10)]
    assert 1.5 <= now.loop_held_seconds_total <= elapsed_s, "a loop that three calls wait for counts once"
    assert now.data_wait_seconds_total <= NUM_CALLS * (elapsed_s - now.loop_held_seconds_total)
    assert (now.waits_total, now.data_wait_seconds_total) == (NUM_CALLS, waited_s), "it grew while the loop was held"
    (event,) = [log for log in logs if log["event"] == "loader.loop_held"]
    assert (event["log_level"], event["held_s"] >= 1.5) == ("warning", True)
    totals = read(tmp_path / "run").totals
    assert totals is not None and totals.held_s == now.loop_held_seconds_total
    assert sum(totals.wait_s.values()) == pytest.approx(now.data_wait_seconds_total)
    assert "Your code held the event loop for " in read_page(page_of(tmp_path / "run", tmp_path / "r.html")).text


def test_a_call_that_a_free_loop_runs_at_once_is_a_wait_for_data(tmp_path):
    path, gate = gated(tmp_path, 0)

    async def main():
        async with AsyncDataLoader(path, tokenize_fn=waits_for_a_file, shuffle=False, num_workers=0) as loader:
            async with anyio.create_task_group() as group:
                group.start_soon(loader.get_next_batch, 10)
                while loader.statistics().data_wait_seconds_total < 1.5:
                    await anyio.lowlevel.checkpoint()
                gate.touch()
            return loader.statistics()

    with capture_logs() as logs:
        now = anyio.run(main)
    assert now.data_wait_seconds_total >= 1.5
    assert [log for log in logs if log["event"] == "loader.loop_held"] == []
