"""The trainer is killed with SIGKILL: no worker outlives it, whatever it is doing, and wherever it lives."""

from __future__ import annotations

import importlib.util
import json
import random
import signal
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.faults.support.streaming import SHUFFLE, delivered, read_log
from tests.support.faults import Program, num_rounds, say, until
from tests.support.figures import record
from tests.support.loading import NEVER_S, order_of, write_rows

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(600)]

ROUNDS = num_rounds(quick=1, full=12)
"""For each of the things that workers may be doing; in full 12 each."""
RAY_ROUNDS = num_rounds(quick=2, full=10)
BUSY = {
    "idle": "tests.support.tokenize_fns:row_id",
    "starting": "tests.support.tokenize_fns:row_id",
    "not started yet": "tests.support.tokenize_fns:row_id",
    "not asked for yet": "tests.support.tokenize_fns:row_id",
    "waiting": "tests.support.worker_fns:waits",
    "waiting, their fork server stopped": "tests.support.worker_fns:waits",
    "waiting, their fork server just killed": "tests.support.worker_fns:waits",
    "in C with the GIL": "tests.faults.support.idling:multiplies",
    "in C with the GIL, not killed by the kernel": "tests.support.worker_fns:stuck_in_c_and_orphaned",
}


def kill_trainer(folder: Path, doing: str, chance: random.Random, *, forks: bool = False) -> tuple[int, float]:
    """How many workers there were when it was killed, and how long they took to be gone.

    :param forks: whether it has forked a child, which lives on.
    """
    folder.mkdir()
    began, ready = folder / "began", folder / "ready"
    rows = {i: {"began": str(began), "gate": str(folder / "never")} for i in range(500)}
    path = write_rows(folder / "rows.jsonl", 500, rows)
    state = {"idle": "idle", "not asked for yet": "none"}.get(doing, "busy")
    settings = {"path": str(path), "tokenize_fn": BUSY[doing], "ready": str(ready), "state": state, "num_workers": 2}
    with Program.of("idling", {**settings, "forks": forks}) as trainer:
        if doing == "starting":
            until(lambda: len(trainer.alive()) > 2)
            time.sleep(chance.random() * 0.2)
        elif doing == "not started yet":
            until(lambda: len(trainer.alive()) > 1)
            time.sleep(chance.random() * 0.1)
        elif doing == "not asked for yet":
            until(ready.exists)
        else:
            until(lambda: ready.exists() and (doing == "idle" or began.exists()))
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
    seen = [kill_trainer(tmp_path / str(number), doing, chance) for number in range(ROUNDS)]

    num_workers = sum(number for number, _ in seen)
    slowest = max(seconds for _, seconds in seen)
    record("R7", doing, kills=ROUNDS, processes=num_workers, left=0, gone_s=slowest)
    assert num_workers >= ROUNDS
    say(
        f"trainer SIGKILLed, workers {doing}: {ROUNDS} kills, {num_workers} processes, 0 left; "
        f"the last was gone after {slowest:.3f} s"
    )


@pytest.mark.parametrize("doing", ["idle", "in C with the GIL", "in C with the GIL, not killed by the kernel"])
def test_no_worker_outlives_the_trainer_for_a_child_that_it_has_forked(tmp_path, doing):
    """The child has all that the trainer had: its ends of the workers' sockets, and of the pipe that tells its end."""
    num_workers, seconds = kill_trainer(tmp_path / "fork", doing, random.Random(0), forks=True)

    assert num_workers == 3, "two workers and the fork server"
    record("R7", f"{doing}, a forked child lives on", kills=1, processes=num_workers, left=0, gone_s=seconds)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_no_worker_outlives_a_ray_actor_and_the_next_one_goes_on_from_its_snapshot(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    path = write_rows(tmp_path / "rows.jsonl", 1500)
    stream = {
        "paths": [str(path)],
        "snapshot": str(tmp_path / "snapshot"),
        "batch_size": 5,
        "save_every": 2,
        "step_s": 0.002,
        "knobs": {"epochs": 2, "num_workers": 2},
    }
    settings = {"folder": str(tmp_path), "kills": RAY_ROUNDS, "settings": stream}
    with Program.of("ray_kills", settings) as program:
        status, said = program.end(2 * NEVER_S + 20 * RAY_ROUNDS)
        assert status == 0, said[-3000:]
    kills = json.loads(said.splitlines()[-1])

    logs = [read_log(tmp_path / f"log.{number}") for number in range(RAY_ROUNDS + 1)]
    assert all(log is not None and log.entries for log in logs)
    assert [log.resumed_at > 0 for log in logs if log is not None] == [False] + [True] * RAY_ROUNDS
    found = [entry[4] for entry in delivered([log for log in logs if log is not None])]
    assert found == order_of(path, 2, shuffle=SHUFFLE)
    num_workers, slowest = sum(item["num_processes"] - 1 for item in kills), max(item["gone_s"] for item in kills)
    assert num_workers >= 2 * RAY_ROUNDS, "a worker and the fork server at least"
    record("R7", "a Ray actor", kills=RAY_ROUNDS, processes=num_workers, left=0, gone_s=slowest)
    say(f"Ray actor killed: {RAY_ROUNDS} kills, {num_workers} processes, the last was gone after {slowest:.3f} s")
