"""Trainers that are killed, and loaders that are closed: no process is left. Other ends are in ``test_ends.py``."""

import random
import signal
import time

import psutil
import pytest

from tests.support.faults import Program, num_rounds, until
from tests.support.figures import record
from tests.support.loading import write_rows

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(600)]

KILLS = num_rounds(quick=1, full=12)
"""For each of the things that workers may be doing."""
ROW_ID = "tests.support.tokenize_fns:row_id"
WAITS = "tests.support.worker_fns:waits"
BUSY = {
    "idle": ROW_ID,
    "idle, with threads of their own": "tests.support.worker_fns:keeps_a_thread",
    "starting": ROW_ID,
    "not started yet": ROW_ID,
    "not asked for yet": ROW_ID,
    "waiting": WAITS,
    "waiting, their fork server stopped": WAITS,
    "waiting, their fork server just killed": WAITS,
    "in C with the GIL": "tests.support.worker_fns:multiplies",
    "in C with the GIL, not killed by the kernel": "tests.support.worker_fns:stuck_in_c_and_orphaned",
}
STARTS = {"starting": (2, 0.2), "not started yet": (1, 0.1)}
"""More processes than so many are seen before the kill, which comes so many seconds later at most."""


def write(folder) -> str:
    """Rows that announce themselves in ``began``, and wait for ever."""
    folder.mkdir()
    row = {"began": str(folder / "began"), "gate": str(folder / "never")}
    return str(write_rows(folder / "rows.jsonl", 1000, dict.fromkeys(range(1000), row)))


# The trainer is killed, whatever its workers are doing, and wherever it lives


def kill_trainer(folder, doing: str, chance: random.Random, *, forks: bool = False) -> tuple[int, float]:
    """How many workers there were when it was killed, and how long they took to be gone.

    :param forks: whether it has forked a child, which lives on.
    """
    path, began, ready = write(folder), folder / "began", folder / "ready"
    state = "none" if doing == "not asked for yet" else "idle" if doing.startswith("idle") else "busy"
    settings = {"do": "waiting", "path": path, "tokenize_fn": BUSY[doing], "ready": str(ready), "state": state}
    with Program.of("trainers", {**settings, "forks": forks}) as trainer:
        if doing in STARTS:
            num_seen, seconds = STARTS[doing]
            until(lambda: len(trainer.alive()) > num_seen)
            time.sleep(chance.random() * seconds)
        else:
            until(lambda: ready.exists() and (state != "busy" or began.exists()))
        child = [int(ready.read_text())] if forks else []
        num_workers = len(trainer.alive()) - 1 - len(child)  # and the fork server
        if "fork server" in doing:
            (fork_server,) = psutil.Process(trainer.pid).children()
            fork_server.send_signal(signal.SIGSTOP if "stopped" in doing else signal.SIGKILL)
        trainer.kill()
        seconds = trainer.assert_gone(*child)
        assert all(psutil.Process(pid).is_running() for pid in child)
        return num_workers, seconds


@pytest.mark.parametrize("doing", BUSY)
def test_no_worker_outlives_the_trainer(tmp_path, doing):
    chance = random.Random(doing)
    seen = [kill_trainer(tmp_path / str(number), doing, chance) for number in range(KILLS)]

    num_workers, slowest = sum(number for number, _ in seen), max(seconds for _, seconds in seen)
    record("R7", doing, kills=KILLS, processes=num_workers, left=0, gone_s=slowest)
    assert num_workers >= KILLS


@pytest.mark.parametrize("doing", ["idle", "in C with the GIL, not killed by the kernel"])
def test_no_worker_outlives_the_trainer_for_a_child_that_it_has_forked(tmp_path, doing):
    """The child has all that the trainer had: its ends of the workers' sockets, and of the pipe that tells its end."""
    num_workers, seconds = kill_trainer(tmp_path / "fork", doing, random.Random(0), forks=True)

    assert num_workers == 3, "two workers and the fork server"
    record("R7", f"{doing}, a forked child lives on", kills=1, processes=num_workers, left=0, gone_s=seconds)
