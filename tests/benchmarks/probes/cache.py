"""The token cache: a run that is tokenized and written down, and a run after it that reads what was written."""

from __future__ import annotations

import time
from itertools import chain
from typing import Any

from tests.benchmarks.probes.loading import BATCH, loader

__all__ = ("second_epoch",)

_NUM_READ = 8


def second_epoch(path: str, tokenizer: str, cache: str, **knobs: Any) -> dict[str, float]:
    """Rows per second of an epoch that fills the cache, and of those behind it, each after its first batch.

    Those are another loader's: one that continues into its second epoch opens the first window of it before the last of
    the first is written. There are several, as one is over in a tenth of a second. ``cached_share`` is how much of them
    came out of the cache.
    """
    fill = _epochs(path, tokenizer, 1, wait_s=1.0, cache={"tokens": cache}, **knobs)
    second = _epochs(path, tokenizer, _NUM_READ, cache={"tokens": cache}, **knobs)
    return {
        "first_rows_per_s": fill["rows_per_s"],
        "second_rows_per_s": second["rows_per_s"],
        "cached_share": second["cached_share"],
        "second_cpu_us_per_row": second["cpu_us_per_row"],
        "second_workers_us_per_row": second["workers_us_per_row"],
    }


def _epochs(path: str, tokenizer: str, num_epochs: int, wait_s: float = 0.0, **knobs: Any) -> dict[str, float]:
    """``wait_s`` is for what is on its way into the cache when the last row is delivered."""
    num_rows, began, cpu, of_workers = 0, 0.0, 0.0, 0.0
    with loader(path, tokenizer, epochs=num_epochs, batch_size=BATCH, buffer_size=8192, **knobs) as made:
        for batch in chain.from_iterable(made for _ in range(num_epochs)):
            if not began:
                began, cpu, of_workers = time.perf_counter(), time.process_time(), _used_by_workers(made)
            num_rows += len(batch)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        of_workers = _used_by_workers(made) - of_workers
        time.sleep(wait_s)
        cached = getattr(made.statistics(), "cached_rows_total", 0)
    return {
        "rows_per_s": (num_rows - BATCH) / wall,
        "cached_share": cached / num_rows,
        "cpu_us_per_row": cpu / num_rows * 1e6,
        "workers_us_per_row": of_workers / num_rows * 1e6,
    }


def _used_by_workers(made: Any) -> float:
    """CPU seconds."""
    import psutil

    times = [psutil.Process(worker.pid).cpu_times() for worker in made.statistics().workers if worker.pid]
    return sum(one.user + one.system for one in times)
