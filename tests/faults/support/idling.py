"""A trainer whose workers are idle, or as busy as they can be, when it is killed.

Run with ``python -m tests.faults.support.idling SETTINGS``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from asyncdata import DataLoader
from tests.support.worker_fns import waits


def multiplies(row: dict[str, Any]) -> list[int]:
    """Announces itself, then works out a power for hours: C code that holds the GIL."""
    waits({"id": row["id"], "began": row["began"]})
    pow(7, 1 << 4_000_000, (1 << 400_000) - 1)
    return [row["id"]]


def keeps_a_thread(row: dict[str, Any]) -> list[int]:
    """Leaves a thread behind that does not end with the process's main thread."""
    threading.Thread(target=time.sleep, args=(3600,)).start()
    return [row["id"]]


def trainer(path: str, tokenize_fn: str, ready: str, state: str, num_workers: int, forks: bool = False) -> None:
    """Start a loader, and wait for the end. ``ready`` is there when all its workers are in ``state``.

    ``none`` is the state of a loader that was only made. If it ``forks``, the file has the pid of its child, which
    waits as well.
    """
    loader = DataLoader(path, tokenize_fn=tokenize_fn, num_workers=num_workers, shuffle=False)
    if state != "none":
        loader.start()
    while state != "none" and [worker.state for worker in loader.statistics().workers] != [state] * num_workers:
        time.sleep(0.005)
    child = os.fork() if forks else 0
    if child or not forks:
        Path(f"{ready}.written").write_text(str(child), encoding="ascii")
        Path(f"{ready}.written").rename(ready)
    signal.pause()


if __name__ == "__main__":
    trainer(**json.loads(sys.argv[1]))
