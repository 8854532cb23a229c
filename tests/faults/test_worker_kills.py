"""Workers are killed, stopped, and brought down by a row; what is delivered is D all the same."""

import contextlib
import gzip
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncdata import DataLoader, Limits, Mix, Part
from tests.faults.support.streaming import entry
from tests.support.faults import num_rounds
from tests.support.figures import record
from tests.support.inner import change
from tests.support.loading import NEVER_S, SHUFFLE, order_of, write_rows
from tests.support.tokenize_fns import id_and_text

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(1200)]

ROUNDS = num_rounds(quick=5, full=60)
MIXTURE_ROUNDS = num_rounds(quick=5, full=100)
STOP_ROUNDS = min(ROUNDS, 10)
DENSE_KILLS = min(16, num_rounds(quick=12, full=16))  # with the waits between them, less than the patience there is
NUM_ROWS = 2000


def make(source: Path | Mix, tokenize_fn: Any = id_and_text, **knobs: Any) -> DataLoader:
    return DataLoader(source, tokenize_fn=tokenize_fn, **{"shuffle": SHUFFLE, "timeout_s": NEVER_S} | knobs)


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
    """Sends ``number`` signals to processes of the pool, from a thread.

    :param victims: the processes of which one is chosen each time, at a random instant after something was delivered;
        None: all are hit the moment that they are seen.
    """

    def __init__(
        self, loader: DataLoader, number: int, seed: int, victims: Any, number_of_signal: int = signal.SIGKILL
    ) -> None:
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
