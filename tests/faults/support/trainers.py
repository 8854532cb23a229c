"""Trainers that are killed, interrupted, or run for long, each in a process of its own.

``python -m tests.faults.support.trainers SETTINGS`` runs the one that ``do`` names, with the other settings.
"""

import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from asyncdata import DataLoader, RayExecutor, Shuffle, SoftPacking
from asyncdata.errors import AsyncDataError
from tests.faults.support.streaming import SHUFFLE, entry
from tests.support.faults import until
from tests.support.loading import NEVER_S, id_and_text, in_batches, row_id

STALLED_S = 60.0
"""Longer than any batch takes; a call that an interrupt has made to hang fails then."""

# Killed


def waiting(path: str, tokenize_fn: str, ready: str, state: str, forks: bool = False) -> None:
    """Start a loader, and wait for the end. ``ready`` is there when all its workers are in ``state``.

    ``none`` is the state of a loader that was only made. If it ``forks``, the file has the pid of its child, which
    waits as well.
    """
    loader = DataLoader(path, tokenize_fn=tokenize_fn, num_workers=2, shuffle=False)
    if state != "none":
        loader.start()
        until(lambda: [worker.state for worker in loader.statistics().workers] == [state] * 2)
    child = os.fork() if forks else 0
    if child or not forks:
        Path(f"{ready}.written").write_text(str(child), encoding="ascii")
        Path(f"{ready}.written").rename(ready)
    signal.pause()


def without_a_cluster(path: str, process: str) -> None:
    """Kill the cluster's processes of that name, and ask for data, without ``timeout_s``; print the error.

    In a process of its own, as Ray ends a process that uses what is lost.
    """
    from tests.support.ray_cluster import two_nodes

    with two_nodes() as nodes:
        executor = RayExecutor(num_workers=2, num_cpus=0.5)
        loader = DataLoader(path, tokenize_fn=row_id, shuffle=SHUFFLE, executor=executor)
        loader.get_next_batch(1)
        nodes.kill(process)
        try:
            while True:
                loader.get_next_batch(20)
        except AsyncDataError as error:
            sys.stdout.write(f"{error}\n")
        loader.close()
        sys.stdout.write("closed\n")
        sys.stdout.flush()
        nodes.stop()
        os._exit(0)  # Ray's own end could wait for what is lost


# Interrupted. A call is *interrupted* if KeyboardInterrupt came out of it. What was assigned before it came was
# received: an interrupt after the assignment is the caller's.


class Interrupts:
    """SIGINT at random instants from another thread; KeyboardInterrupt wherever the main thread is, as often as it is
    ``armed`` for, directly one after another: also while the first one is handled."""

    def __init__(self, seed: int) -> None:
        self.armed = self.num_raised = 0
        self._chance = random.Random(seed)
        self._is_over = threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._run, daemon=True)
        signal.signal(signal.SIGINT, self._interrupt)
        signal.signal(signal.SIGALRM, self._interrupt)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _interrupt(self, *_: Any) -> None:
        if self.armed:
            self.armed -= 1
            self.num_raised += 1
            if self.armed:  # the next one from the kernel's timer: another thread would wait for the GIL
                signal.setitimer(signal.ITIMER_REAL, self._chance.uniform(1e-6, 6e-5))
            raise KeyboardInterrupt

    def _run(self) -> None:
        while not self._is_over.wait(self._chance.choice([0, 0.0001, 0.001, 0.01]) * self._chance.random()):
            signal.pthread_kill(self._main, signal.SIGINT)


def storm(path: str, number: int, most: int, knobs: dict[str, Any]) -> dict[str, Any]:
    """Until ``number`` interrupts have come, and some more samples; all are asked for in each way there is."""
    settings = {"tokenize_fn": id_and_text, "shuffle": SHUFFLE, "timeout_s": STALLED_S, "batch_size": 33, **knobs}
    chance = random.Random(5)
    with DataLoader(path, **settings) as loader:
        found = list(map(entry, loader.get_next_batch(1, timeout_s=NEVER_S)))
        interrupts, loop = Interrupts(seed=1), iter(loader)
        while interrupts.num_raised < number:
            way, size = chance.randrange(3), chance.choice([1, 5, 40, 300])
            groups, batch = [], []
            try:
                try:
                    interrupts.armed = most
                    if way == 0:
                        batch = loader.get_next_batch(size)
                    elif way == 1:
                        groups = loader.get_samples(size)
                    else:
                        batch = loop.__next__()  # next() would lose its result to an interrupt, whatever we do
                finally:
                    interrupts.armed = 0
            except KeyboardInterrupt:
                interrupts.armed = 0
            except StopIteration:
                loop = iter(loader)
            found += map(entry, [*batch, *(sample for group in groups for sample in group)])
        interrupts.stop()
        found += map(entry, loader.get_next_batch(200))
        return {"found": found, "raised": interrupts.num_raised, "restarts": loader.statistics().worker_restarts_total}


def group(path: str, number: int, knobs: dict[str, Any]) -> dict[str, Any]:
    """The same, interrupted from outside, with the whole group of processes.

    The handler only counts: this is about the workers, and a KeyboardInterrupt could come in any statement of ours.
    """
    found, raised = [], []
    signal.signal(signal.SIGINT, lambda number, frame: raised.append(number))
    with DataLoader(path, tokenize_fn=id_and_text, shuffle=SHUFFLE, timeout_s=NEVER_S, **knobs) as loader:
        sys.stdout.write("go\n")
        sys.stdout.flush()
        until(lambda: len(raised) >= number)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for _ in range(20):
            found += map(entry, loader.get_next_batch(50))
        return {"found": found, "raised": len(raised), "restarts": loader.statistics().worker_restarts_total}


# They run for long


BATCH = 500
WARM_UP = 0.2
"""Of the run: caches fill, and allocators take what they will keep."""
PACKS = SoftPacking(max_length=256, window_samples=512, across_epochs=True)
WAYS: dict[str, dict[str, Any]] = {
    "rollouts": {"n_samples_per_prompt": 4, "commit": "on_ack"},
    "packed": {"packing": PACKS, "batch_size": 1, "collate_fn": len},
    "by the index": {"shuffle": "full", "cache": {"folder": ""}},
    "a stream": {},
}


def possessions() -> dict[str, int]:
    """What a process has that could leak. The threads of an event loop may end a little after it."""
    names = os.listdir("/proc/self/fd")
    return {
        "fds": sum(os.path.exists(f"/proc/self/fd/{name}") for name in names),
        "threads": sum(not thread.name.startswith(("AnyIO", "Trio")) for thread in threading.enumerate()),
        "children": len(psutil.Process().children(recursive=True)),
        "shared_memory": sum("asyncdata" in name for name in os.listdir("/dev/shm"))
        + sum("memfd:asyncdata" in line for line in Path("/proc/self/maps").read_text().splitlines()),
        "temporary_files": len(os.listdir(tempfile.gettempdir())),
    }


def memory_mb() -> float | None:
    """Resident memory of the trainer and of its workers; None while one of them is replaced."""
    process = psutil.Process()
    try:
        workers = sum(child.memory_full_info().uss for child in process.children(recursive=True))
    except psutil.NoSuchProcess:
        return None

    return (process.memory_info().rss + workers) / (1 << 20)


def step(loader: DataLoader, way: str, number: int) -> int:
    num_samples = BATCH
    if way == "packed":
        before = loader.statistics().samples_total
        for count, _ in enumerate(loader):
            if count == 50:
                break
        num_samples = loader.statistics().samples_total - before
    elif way == "rollouts":
        groups = loader.get_samples(BATCH // 4)
        if number % 3 == 0:
            loader.add_samples(groups[:5])
        loader.ack(groups[5:] if number % 3 == 0 else groups)
    else:
        num_samples = len(loader.get_next_batch(BATCH))
    if number % 20 == 0:
        json.dumps(loader.state_dict())
    return num_samples


def use(path: str, way: str, num_samples: int) -> tuple[int, list[tuple[int, float]]]:
    """A loader's life: how many samples it made; and two hundred times, how many it had made, and the memory then."""
    settings: dict[str, Any] = {"num_workers": 2, "timeout_s": NEVER_S, "tokenize_fn": in_batches} | WAYS[way]
    settings = {"shuffle": Shuffle(block_bytes=8192, window_blocks=64)} | settings
    done = number = 0
    seen = [(0, 0.0)]
    with DataLoader(path, **settings) as loader:
        while done < num_samples:
            done += step(loader, way, number)
            number += 1
            if done - seen[-1][0] >= num_samples / 200 and (now := memory_mb()) is not None:
                seen.append((done, now))
    return done, seen


def soak(path: str, way: str, num_samples: int) -> dict[str, Any]:
    """What a long run has left, and MB per 100,000 samples after the warm-up, by least squares."""
    use(path, way, 2 * BATCH)  # what is imported and opened once stays
    gc.collect()
    before, began = possessions(), time.monotonic()
    done, seen = use(path, way, num_samples)
    seconds = time.monotonic() - began
    gc.collect()
    after = possessions()
    late = np.array([one for one in seen if one[0] >= WARM_UP * num_samples])
    slope = float(np.polyfit(late[:, 0] / 100_000, late[:, 1], 1)[0])
    left = {name: after[name] - before[name] for name in before}
    return {"samples": done, "slope": slope, "left": left, "seconds": seconds}


TRAINERS = {function.__name__: function for function in (waiting, without_a_cluster, storm, group, soak)}

if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    told = TRAINERS[given.pop("do")](**given)
    if told is not None:
        sys.stdout.write(f"{json.dumps(told)}\n")
