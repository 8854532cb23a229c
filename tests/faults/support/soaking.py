"""A trainer that trains for long: what it takes of the machine meanwhile, and what is left of it afterwards.

Run with ``python -m tests.faults.support.soaking SETTINGS``; it prints one JSON object.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from asyncdata import DataLoader, Shuffle, SoftPacking
from tests.support.loading import NEVER_S
from tests.support.tokenize_fns import in_batches

SHUFFLE = Shuffle(block_bytes=8192, window_blocks=64)
BATCH = 500
WARM_UP = 0.2
"""Of the run: caches fill, and allocators take what they will keep."""
WAYS: dict[str, dict[str, Any]] = {
    "rollouts": {"n_samples_per_prompt": 4, "commit": "on_ack"},
    "packed": {
        "packing": SoftPacking(max_length=256, window_samples=512, across_epochs=True),
        "batch_size": 1,
        "collate_fn": len,
    },
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


class Memory:
    """Resident memory of the trainer and of its workers, over the samples they made."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, float]] = []

    def look(self, num_samples: int) -> None:
        """Note it down."""
        process = psutil.Process()
        num_bytes = process.memory_info().rss
        for child in process.children(recursive=True):
            try:
                num_bytes += child.memory_full_info().uss
            except psutil.NoSuchProcess:
                return  # it is being replaced: that is no measurement
        self._rows.append((num_samples, num_bytes / (1 << 20)))

    def slope(self, num_samples: int) -> float:
        """MB per 100,000 samples after the warm-up, by least squares."""
        rows = np.array([row for row in self._rows if row[0] >= WARM_UP * num_samples])
        return float(np.polyfit(rows[:, 0] / 100_000, rows[:, 1], 1)[0])


def step(loader: DataLoader, way: str, number: int) -> int:
    """One step of training; how many samples it took."""
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
        num_samples = BATCH
    else:
        num_samples = len(loader.get_next_batch(BATCH))
    if number % 20 == 0:
        json.dumps(loader.state_dict())
    return num_samples


def use(path: str, way: str, num_samples: int, memory: Memory | None) -> int:
    """A loader's life."""
    settings: dict[str, Any] = {"shuffle": SHUFFLE, "num_workers": 2, "timeout_s": NEVER_S} | WAYS[way]
    done = number = looked = 0
    with DataLoader(path, tokenize_fn=in_batches, **settings) as loader:
        while done < num_samples:
            done += step(loader, way, number)
            number += 1
            if memory is not None and done - looked >= num_samples / 200:
                looked = done
                memory.look(done)
    return done


def main(path: str, way: str, num_samples: int) -> dict[str, Any]:
    """Run, and count."""
    use(path, way, 2 * BATCH, None)  # what is imported and opened once stays
    gc.collect()
    before, memory, began = possessions(), Memory(), time.monotonic()
    done = use(path, way, num_samples, memory)
    seconds = time.monotonic() - began
    gc.collect()
    after = possessions()
    left = {name: after[name] - before[name] for name in before}
    return {"samples": done, "slope": memory.slope(done), "left": left, "seconds": seconds}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(**json.loads(sys.argv[1]))))
