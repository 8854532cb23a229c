"""Workers, fork servers and trainers are killed or stopped: what is delivered is D, and no process is left."""

import contextlib
import gzip
import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncdata import DataLoader, Limits, Mix, Part
from tests.faults.support.streaming import PACKS, Log, delivered, entry, num_lines, read_log, with_media
from tests.support import loaders
from tests.support.faults import Program, num_rounds, record, until
from tests.support.loading import NEVER_S, id_and_text, order_of, write_rows
from tests.support.parts import change
from tests.support.sources import frames, write

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(1200)]


ROUNDS = num_rounds(quick=5, full=60)
MIXTURE_ROUNDS = num_rounds(quick=5, full=100)
STOP_ROUNDS = min(ROUNDS, 10)
DENSE_KILLS = min(16, num_rounds(quick=12, full=16))  # with the waits between them, less than the patience there is
NUM_ROWS = 2000


make = partial(loaders.make, tokenize_fn=id_and_text)


def pids(loader: DataLoader, *states: str) -> list[int]:
    return [worker.pid for worker in loader.statistics().workers if worker.pid and worker.state in states]


def workers(loader: DataLoader) -> list[int]:
    return pids(loader, "idle", "busy")


def fork_servers(loader: DataLoader) -> list[int]:
    """The child of this process that is not a worker; empty if there is none."""
    return [child.pid for child in psutil.Process().children() if child.pid not in workers(loader)]


def family(loader: DataLoader) -> list[int]:
    return fork_servers(loader) + workers(loader)


class Killer:
    """Sends ``number`` signals from a thread: to one of the ``victims`` each time, at a random instant after something
    was delivered; None: to all processes of the pool, the moment that they are seen."""

    def __init__(self, loader, number, seed, victims, number_of_signal=signal.SIGKILL):
        self.num_sent = 0
        self._loader, self._number, self._victims, self._signal = loader, number, victims, number_of_signal
        self._chance = random.Random(seed)
        self._delivered = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def stream(self) -> list[list[int]]:
        """What is delivered until all are sent, and a little more."""
        found: list[list[int]] = []
        sizes = random.Random(self._number)
        self._thread.start()
        try:
            while self._thread.is_alive():
                found += [entry(sample) for sample in self._loader.get_next_batch(sizes.choice([1, 7, 32, 100]))]
                self._delivered.set()
        finally:
            self._is_over.set()
            self._delivered.set()
            self._thread.join()
        return found + [entry(sample) for sample in self._loader.get_next_batch(500)]

    def _run(self) -> None:
        seen: set[int] = set()
        while self.num_sent < self._number and not self._is_over.is_set():
            if self._victims is None:
                new = {child.pid for child in psutil.Process().children(recursive=True)} - seen
                seen |= new
            else:
                self._delivered.clear()
                self._delivered.wait()
                self._is_over.wait(self._chance.random() * 0.05)
                alive = self._victims(self._loader)
                new = {self._chance.choice(alive)} if alive else set()
            for pid in new:
                with contextlib.suppress(ProcessLookupError):  # it was lost, and reaped, this very moment
                    os.kill(pid, self._signal)
                    self.num_sent += 1


def check(source: Any, found: list[list[int]], of: str, kills: int) -> None:
    """Compare with D, as it is read without workers, and of a file also as it is worked out without the engine."""
    with make(source, num_workers=0) as loader:
        expected = [entry(sample) for sample in loader.get_next_batch(len(found))]
    assert found == expected
    if isinstance(source, Path) and source.suffix == ".jsonl":
        assert [item[4] for item in found] == order_of(source, 1 + len(found) // NUM_ROWS)[: len(found)]
    record("R1", of, kills=kills, lost=0, repeated=0, out_of_order=0)


@pytest.mark.parametrize("victims", [workers, fork_servers, family])
def test_kill_9_of_workers_and_fork_servers_at_random_instants_loses_nothing(path, victims):
    with make(path, num_workers=2, buffer_size=200) as loader:
        killer = Killer(loader, ROUNDS, 7, victims)
        found = killer.stream()
        restarts = loader.statistics().worker_restarts_total

    check(path, found, f"kill -9 of {victims.__name__}", killer.num_sent)
    assert killer.num_sent == ROUNDS
    assert restarts <= 3 * ROUNDS


@pytest.mark.parametrize(("what", "rounds"), [("a stream", ROUNDS), ("a mixture", MIXTURE_ROUNDS)])
def test_kill_9_while_a_stream_or_a_mixture_is_read_loses_nothing(tmp_path, path, what, rounds):
    source: Any = path.with_suffix(".jsonl.gz")
    source.write_bytes(gzip.compress(path.read_bytes()))
    if what == "a mixture":
        parts = zip("abc", (1500, 300, 700), (5, 1, 3), strict=True)
        named = {name: Part(write_rows(tmp_path / f"{name}.jsonl", num), weight=weight) for name, num, weight in parts}
        source = Mix(named, quota=10)
    with make(source, num_workers=2, buffer_size=200) as loader:
        killer = Killer(loader, rounds, 13, family)
        found = killer.stream()

    check(source, found, f"kill -9, {what}", killer.num_sent)
    assert killer.num_sent == rounds


def test_kill_9_of_all_that_start_ends_when_the_kills_do(path, monkeypatch):
    """Nothing that starts comes up, for far longer than what ends by itself while it starts is tried again."""
    change(monkeypatch, patience_with_starts_s=NEVER_S)  # however long so many starts take here
    with make(path, num_workers=2, buffer_size=200) as loader:
        killer = Killer(loader, DENSE_KILLS, 0, None)
        found = killer.stream()
        restarts = loader.statistics().worker_restarts_total

    check(path, found, "kill -9 of all that start", killer.num_sent)
    assert killer.num_sent >= DENSE_KILLS
    assert restarts > 3


def test_a_stopped_worker_is_replaced(path):
    with make(path, num_workers=2, buffer_size=200, limits=Limits(row_timeout_s=1.0)) as loader:
        killer = Killer(loader, STOP_ROUNDS, 11, workers, signal.SIGSTOP)
        found = killer.stream()
        while loader.statistics().worker_restarts_total == 0:
            found += [entry(sample) for sample in loader.get_next_batch(100)]

    check(path, found, "SIGSTOP", killer.num_sent)


OF_VIDEOS = ("videos", *PACKS)
TRAINER_ROUNDS = {
    "files": num_rounds(quick=3, full=90),
    "mixture": num_rounds(quick=2, full=100),
    "media": num_rounds(quick=2, full=100),
    "pictures": num_rounds(quick=2, full=60),
    "sounds": num_rounds(quick=2, full=60),
    **dict.fromkeys(OF_VIDEOS, num_rounds(quick=1, full=30)),
    **dict.fromkeys(("gzip", "zstd", "array", "iterable", "hf stream"), num_rounds(quick=1, full=4)),
}
"""Of each kind of data, how many processes are killed."""
ROWS_OF_FILES = (700, 30, 450)
PICTURED_ROWS = (70, 3, 45)
"""Fewer: to decode pictures takes its time."""
FILMED_ROWS = (20, 3, 12)
EPOCHS = 2
OF_FILES = ("pictures", "sounds", *OF_VIDEOS)
"""The kinds whose media lie in files."""
MEDIA_BYTES = {"media": [1, 500, 10_000], **dict.fromkeys(OF_FILES, [1, 500_000, 10_000_000])}
"""The limit of what is loaded ahead: a sample, some of them, or all."""
MODULES = {"zstd": ["zstandard"], "hf stream": ["datasets"], "pictures": ["transformers", "PIL"]}
MODULES |= {"sounds": ["transformers", "soundfile", "soxr"]}
MODULES |= dict.fromkeys(OF_VIDEOS, ["transformers", "av", "torchvision"])
SIZES = {"files": [1, 3, 8, 17], **dict.fromkeys(OF_FILES, [1, 3, 8])}


def ids_of(kind: str) -> list[list[int]]:
    """No two rows of all files are alike."""
    numbers = FILMED_ROWS if kind in OF_VIDEOS else PICTURED_ROWS if kind in OF_FILES else ROWS_OF_FILES
    return [[part * 10_000 + i for i in range(num)] for part, num in enumerate(numbers)]


def coded(path, kind: str):
    if kind in OF_FILES:
        return with_media(path, kind)

    data = path.read_bytes()
    if kind == "gzip":
        return write(path.with_suffix(".jsonl.gz"), gzip.compress(data))

    if kind == "zstd":
        return write(path.with_suffix(".jsonl.zst"), frames([data[: len(data) // 2], data[len(data) // 2 :]]))

    return write(path.with_suffix(".json"), b"[" + b",".join(data.splitlines()) + b"]") if kind == "array" else path


class Chain:
    """Processes that go on, one after another, where the one before had last saved."""

    def __init__(self, folder, chance: random.Random, kind: str) -> None:
        folder.mkdir()
        self.logs: list[Log] = []
        self._folder, self._kind, self._chance = folder, kind, chance
        self._paths = []
        for part, ids in enumerate(ids_of(kind)):
            special = {number: {"id": id_} for number, id_ in enumerate(ids)}
            self._paths.append(str(coded(write_rows(folder / f"{part}.jsonl", len(ids), special), kind)))

    def settings(self, log, **knobs: Any) -> dict[str, Any]:
        chance = self._chance
        most = 2 if self._kind in OF_VIDEOS else 3  # each of which imports torch
        settings = {"num_workers": chance.randint(1, most), "buffer_size": chance.choice([1, 40, 1000])}
        if self._kind in MEDIA_BYTES:
            settings["limits"] = {"max_media_bytes": chance.choice(MEDIA_BYTES[self._kind])}
        return {
            "paths": self._paths,
            "kind": self._kind,
            "log": str(log),
            "snapshot": str(self._folder / "snapshot"),
            # Each save takes its time.
            "batch_size": chance.choice(SIZES.get(self._kind, [8, 17])),
            "save_every": chance.randint(1, 5),
            "step_s": chance.choice([0, 0.0005, 0.002]),
            "knobs": {"epochs": EPOCHS, "dp_size": chance.choice([1, 8]), **settings, **knobs},
        }

    def uninterrupted(self) -> list[list[int]]:
        """What a process gets that is not killed, and has no workers, or one that imports torch."""
        log = self._folder / "log.all"
        settings = self.settings(log, num_workers=int(self._kind in OF_VIDEOS))
        settings |= {"snapshot": str(self._folder / "none"), "save_every": 10**9}
        with Program.of("streaming", settings) as program:
            program.said()
        return read_log(log).entries

    def run(self, number: int, *, may_kill: bool) -> bool:
        """One more process; whether it was killed before the end."""
        log = self._folder / f"log.{number}"
        kill_after = self._chance.choice([0, 1, self._chance.randint(2, 12 if self._kind in PACKS else 150)])
        with Program.of("streaming", self.settings(log)) as program:
            was_killed = program.kill_when(
                (lambda: num_lines(log) > kill_after) if may_kill else None,
                lambda: time.sleep(self._chance.random() * (0.3 if kill_after == 0 else 0.02)),
            )
        found = read_log(log)
        self.logs += [] if found is None else [found]
        return was_killed


@pytest.mark.parametrize("kind", TRAINER_ROUNDS)
def test_killed_at_random_instants_nothing_is_lost_repeated_or_reordered(tmp_path, kind):
    for module in MODULES.get(kind, []):
        pytest.importorskip(module)
    chance, num_kills, num_processes = random.Random(f"2024 {kind}"), 0, 0
    while num_kills < TRAINER_ROUNDS[kind]:
        chain, is_running = Chain(tmp_path / f"chain {num_processes}", chance, kind), True
        expected = chain.uninterrupted()
        while is_running:
            is_running = chain.run(num_processes, may_kill=num_kills < TRAINER_ROUNDS[kind])
            num_kills += is_running
            num_processes += 1
        found = delivered(chain.logs)
        assert found == expected
        for epoch in range(EPOCHS if kind not in PACKS else 0):
            assert sorted(item[4] for item in found if item[1] == epoch) == sum(ids_of(kind), [])

    record("R2", kind, kills=num_kills, lost=0, repeated=0, out_of_order=0)


KILLS = num_rounds(quick=1, full=12)
"""For each of the things that workers may be doing."""
ROW_ID = "tests.support.loading:row_id"
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


def write_waiting(folder) -> str:
    """Rows that announce themselves in ``began``, and wait for ever."""
    folder.mkdir()
    row = {"began": str(folder / "began"), "gate": str(folder / "never")}
    return str(write_rows(folder / "rows.jsonl", 1000, dict.fromkeys(range(1000), row)))


# The trainer is killed, whatever its workers are doing, and wherever it lives


def kill_trainer(folder, doing: str, chance: random.Random, *, forks: bool = False) -> tuple[int, float]:
    """How many workers there were when it was killed, and how long they took to be gone; a child may live on."""
    path, began, ready = write_waiting(folder), folder / "began", folder / "ready"
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
