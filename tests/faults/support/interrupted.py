"""A trainer whose user presses Ctrl-C again and again: it continues, and reports what it was given.

Run with ``python -m tests.faults.support.interrupted SETTINGS``. A call is *interrupted* if KeyboardInterrupt came out
of it. What was assigned before it came was received: an interrupt after the assignment is the caller's.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from typing import Any

from asyncdata import DataLoader
from tests.faults.support.streaming import SHUFFLE, entry
from tests.support.loading import NEVER_S
from tests.support.tokenize_fns import id_and_text

STALLED_S = 60.0
"""Longer than any batch takes; a call that an interrupt has made to hang fails then."""


class Interrupts:
    """SIGINT at random instants from another thread; KeyboardInterrupt wherever the main thread is, while armed.

    :param most: so many at most come in one call, directly one after another: also while the first one is handled.
    """

    def __init__(self, seed: int, most: int) -> None:
        self.armed = 0
        self.num_signals = self.num_raised = self.num_calls = 0
        self._most = most
        self._chance = random.Random(seed)
        self._is_over = threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._run, daemon=True)
        signal.signal(signal.SIGINT, self._interrupt)
        signal.signal(signal.SIGALRM, self._interrupt)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def arm(self) -> None:
        self.armed = self._most

    def _interrupt(self, *_: Any) -> None:
        self.num_signals += 1
        if self.armed:
            self.armed -= 1
            self.num_raised += 1
            if self.armed:  # the next one from the kernel's timer: another thread would wait for the GIL
                signal.setitimer(signal.ITIMER_REAL, self._chance.uniform(1e-6, 6e-5))
            raise KeyboardInterrupt

    def _run(self) -> None:
        while not self._is_over.wait(self._chance.choice([0, 0.0001, 0.001, 0.01]) * self._chance.random()):
            signal.pthread_kill(self._main, signal.SIGINT)


class Caller:
    """Asks for samples in each of the ways there are."""

    def __init__(self, loader: DataLoader, interrupts: Interrupts, chance: random.Random) -> None:
        self._loader = loader
        self._interrupts = interrupts
        self._chance = chance
        self._loop = iter(loader)

    def take(self) -> list[Any]:
        """One call; what the caller has got of it."""
        way, size = self._chance.randrange(3), self._chance.choice([1, 5, 40, 300])
        groups: list[list[Any]] = []
        batch: list[Any] = []
        try:
            try:
                self._interrupts.arm()
                if way == 0:
                    batch = self._loader.get_next_batch(size)
                elif way == 1:
                    groups = self._loader.get_samples(size)
                else:
                    batch = self._loop.__next__()  # next() would lose its result to an interrupt, whatever we do
            finally:
                self._interrupts.armed = 0
        except KeyboardInterrupt:
            self._interrupts.armed = 0
            self._interrupts.num_calls += 1
        except StopIteration:
            self._loop = iter(self._loader)
        return batch + [sample for group in groups for sample in group]


def storm(path: str, log: str, number: int, most: int, knobs: dict[str, Any]) -> None:
    """Until ``number`` interrupts have come, and some samples more."""
    chance = random.Random(5)
    found: list[list[int]] = []
    settings = {"tokenize_fn": id_and_text, "shuffle": SHUFFLE, "timeout_s": STALLED_S, "batch_size": 33, **knobs}
    with DataLoader(path, **settings) as loader:
        found += map(entry, loader.get_next_batch(1, timeout_s=NEVER_S))
        interrupts = Interrupts(seed=1, most=most)
        caller = Caller(loader, interrupts, chance)
        interrupts.start()
        while interrupts.num_raised < number:
            found += map(entry, caller.take())
        interrupts.stop()
        found += map(entry, loader.get_next_batch(200))
        restarts = loader.statistics().worker_restarts_total
    _write(log, found, interrupts.num_raised, interrupts.num_calls, restarts)


def group(path: str, log: str, number: int, knobs: dict[str, Any]) -> None:
    """The same, interrupted from outside, with the whole group of processes.

    The handler only counts: this is about the workers, and a KeyboardInterrupt could come in any statement of ours.
    """
    found: list[list[int]] = []
    raised: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: raised.append(number))
    deadline = time.monotonic() + NEVER_S
    with DataLoader(path, tokenize_fn=id_and_text, shuffle=SHUFFLE, timeout_s=NEVER_S, **knobs) as loader:
        sys.stdout.write("go\n")
        sys.stdout.flush()
        while len(raised) < number:
            assert time.monotonic() < deadline, len(raised)
            time.sleep(0.01)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for _ in range(20):
            found += map(entry, loader.get_next_batch(50))
        restarts = loader.statistics().worker_restarts_total
    _write(log, found, len(raised), len(raised), restarts)


def _write(log: str, found: list[list[int]], num_raised: int, num_calls: int, restarts: int) -> None:
    with open(f"{log}.{os.getpid()}", "w", encoding="ascii") as out:
        json.dump({"found": found, "raised": num_raised, "calls": num_calls, "restarts": restarts}, out)
    os.rename(f"{log}.{os.getpid()}", log)


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    {"storm": storm, "group": group}[settings.pop("do")](**settings)
