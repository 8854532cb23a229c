"""Trainers that are killed, and interpreters that end without ``close()``: in time, and no process is left."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from asyncdata import DataLoader
from tests.faults.support import streaming
from tests.support.faults import GONE_S, Program, num_rounds, say, until
from tests.support.figures import record
from tests.support.loading import NEVER_S, SHUFFLE, order_of, write_rows

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(600)]


# The trainer is killed, whatever its workers are doing, and wherever it lives


KILLS = num_rounds(quick=1, full=12)
"""For each of the things that workers may be doing; in full 12 each."""


RAY_KILLS = num_rounds(quick=2, full=10)


BUSY = {
    "idle": "tests.support.tokenize_fns:row_id",
    "idle, with threads of their own": "tests.faults.support.idling:keeps_a_thread",
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
    state = "none" if doing == "not asked for yet" else "idle" if doing.startswith("idle") else "busy"
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
            until(lambda: ready.exists() and (state == "idle" or began.exists()))
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

    num_workers = sum(number for number, _ in seen)
    slowest = max(seconds for _, seconds in seen)
    record("R7", doing, kills=KILLS, processes=num_workers, left=0, gone_s=slowest)
    assert num_workers >= KILLS
    say(
        f"trainer SIGKILLed, workers {doing}: {KILLS} kills, {num_workers} processes, 0 left; "
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
    settings = {"folder": str(tmp_path), "kills": RAY_KILLS, "settings": stream}
    with Program.of("ray_kills", settings) as program:
        status, said = program.end(2 * NEVER_S + 20 * RAY_KILLS)
        assert status == 0, said[-3000:]
    kills = json.loads(said.splitlines()[-1])

    logs = [streaming.read_log(tmp_path / f"log.{number}") for number in range(RAY_KILLS + 1)]
    assert all(log is not None and log.entries for log in logs)
    assert [log.resumed_at > 0 for log in logs if log is not None] == [False] + [True] * RAY_KILLS
    found = [entry[4] for entry in streaming.delivered([log for log in logs if log is not None])]
    assert found == order_of(path, 2, shuffle=streaming.SHUFFLE)
    num_workers, slowest = sum(item["num_processes"] - 1 for item in kills), max(item["gone_s"] for item in kills)
    assert num_workers >= 2 * RAY_KILLS, "a worker and the fork server at least"
    record("R7", "a Ray actor", kills=RAY_KILLS, processes=num_workers, left=0, gone_s=slowest)
    say(f"Ray actor killed: {RAY_KILLS} kills, {num_workers} processes, the last was gone after {slowest:.3f} s")


# It ends without close()


EXITS = num_rounds(quick=1, full=15)


END_S = 120.0
"""How long a program may take from its first line to its end."""


ENDS = {
    "falls off the end": 0,
    "exception": 1,
    "sys.exit": 3,
    "os._exit": 4,
    "in a waiting thread": 0,
    "from a thread": 0,
    "garbage": 0,
}


WORK = {"reading": "tests.support.tokenize_fns:row_id", "busy in C": "tests.support.worker_fns:stuck_in_c"}


def settings_of(folder: Path, end: str, work: str) -> dict[str, str]:
    folder.mkdir()
    rows = {i: {"began": str(folder / "began")} for i in range(1000)}
    path = write_rows(folder / "rows.jsonl", 1000, rows)
    return {"end": end, "path": str(path), "tokenize_fn": WORK[work], "over_file": str(folder / "over")}


@pytest.mark.parametrize(
    ("end", "work"),
    [*((end, "reading") for end in ENDS), ("falls off the end", "busy in C"), ("exception", "busy in C")],
)
def test_it_ends_in_time_with_its_own_status(tmp_path, end, work):
    slowest = 0.0
    for number in range(EXITS if work == "reading" else 1):
        settings = settings_of(tmp_path / str(number), end, work)
        with Program.of("unclosed", settings) as program:
            status, said = program.end(END_S)
            ended = time.monotonic()
            program.assert_gone()
        slowest = max(slowest, ended - float(Path(settings["over_file"]).read_text()))
        assert status == ENDS[end], said
        if end not in ("os._exit", "in a waiting thread"):  # a frozen thread keeps its loader: no one is left to warn
            assert "ResourceWarning: unclosed DataLoader" in said, said
        assert "Fatal" not in said
        assert ("Traceback" in said) == (end == "exception"), said

    figures = {"exit_s": slowest} if work == "reading" else {}
    record("R11", f"{end}, workers {work}", exits=number + 1, hangs=0, left=0, **figures)
    say(f"exit without close, {end}, workers {work}: status {ENDS[end]}, 0 processes left; slowest {slowest:.1f} s")


def possessions() -> Counter[str]:
    """What a process has that a loader could leak."""
    threads = (thread.name for thread in threading.enumerate())
    return Counter(
        [
            *(os.readlink(fd).partition(":")[0] for fd in map("/proc/self/fd/{}".format, open_fds())),
            *(name for name in threads if not name.startswith(("AnyIO", "Trio"))),  # kept for a while, for the next one
            *(f"child {child.pid}" for child in psutil.Process().children(recursive=True)),
            *(name for name in os.listdir("/dev/shm") if "asyncdata" in name),
            *("map" for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:asyncdata" in line),
        ]
    )


def open_fds() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_closed_loaders_leave_nothing(tmp_path, num_workers, backend):
    path = write_rows(tmp_path / "rows.jsonl", 500)

    def use() -> None:
        with DataLoader(
            path,
            tokenize_fn="tests.support.tokenize_fns:row_id",
            shuffle=SHUFFLE,
            num_workers=num_workers,
            event_loop=backend,
            timeout_s=NEVER_S,
        ) as loader:
            loader.get_next_batch(700)

    use()  # what is imported and opened once stays
    before = possessions()
    for _ in range(3):
        use()
    deadline = time.monotonic() + GONE_S
    while possessions() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert possessions() - before == Counter()
    say(f"3 loaders opened and closed, {num_workers} workers, {backend}: descriptors, threads, children as before")
