"""Trainers that end, in each possible way, with a loader that was not closed.

Run with ``python -m tests.faults.support.unclosed SETTINGS``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from pathlib import Path

from asyncdata import DataLoader
from tests.support.loading import NEVER_S, SHUFFLE

LOADERS: list[DataLoader] = []


def reading(path: str, tokenize_fn: str) -> DataLoader:
    """A loader in the middle of reading; it stays alive to the interpreter's end."""
    loader = DataLoader(path, tokenize_fn=tokenize_fn, shuffle=SHUFFLE, num_workers=2, timeout_s=NEVER_S)
    LOADERS.append(loader)
    if tokenize_fn.endswith("row_id"):
        loader.get_next_batch(10)
    else:
        loader.start()
    return loader


def forever(loader: DataLoader) -> None:
    while True:
        loader.get_next_batch(3)


def main(end: str, path: str, tokenize_fn: str, over_file: str) -> None:
    """Read, and end so; ``over_file`` tells when."""
    loader = reading(path, tokenize_fn)
    Path(over_file).write_text(str(time.monotonic()))
    if end == "exception":
        raise ValueError("the trainer's own fault")
    if end == "sys.exit":
        sys.exit(3)
    if end == "os._exit":
        os._exit(4)
    if end == "in a waiting thread":
        threading.Thread(target=forever, args=(loader,), daemon=True).start()
    if end == "from a thread":
        LOADERS.clear()
        del loader
        thread = threading.Thread(target=reading, args=(path, tokenize_fn))
        thread.start()
        thread.join()
    if end == "garbage":
        LOADERS.clear()


if __name__ == "__main__":
    warnings.simplefilter("always", ResourceWarning)
    main(**json.loads(sys.argv[1]))
