"""The token cache: a run that is tokenized and written down, and a run after it that reads what was written."""

from __future__ import annotations

import time
from typing import Any

from tests.benchmarks.probes.loading import BATCH, loader

__all__ = ("second_epoch",)


def second_epoch(path: str, tokenizer: str, cache: str, **knobs: Any) -> dict[str, float]:
    """Rows per second of an epoch that fills the cache, and of the next one, each after its first batch.

    The next one is another loader's: one that goes on into its second epoch opens the first window of it before the
    last of the first is written. ``cached_share`` is how much of it came out of the cache.
    """
    fill = _epoch(path, tokenizer, wait_s=1.0, token_cache=cache, **knobs)
    second = _epoch(path, tokenizer, token_cache=cache, **knobs)
    return {
        "first_rows_per_s": fill["rows_per_s"],
        "second_rows_per_s": second["rows_per_s"],
        "cached_share": second["cached_share"],
        "second_cpu_us_per_row": second["cpu_us_per_row"],
    }


def _epoch(path: str, tokenizer: str, wait_s: float = 0.0, **knobs: Any) -> dict[str, float]:
    """``wait_s`` is for what is on its way into the cache when the last row is delivered."""
    num_rows, began, cpu = 0, 0.0, 0.0
    with loader(path, tokenizer, epochs=1, batch_size=BATCH, buffer_size=8192, **knobs) as made:
        for batch in made:
            if not began:
                began, cpu = time.perf_counter(), time.process_time()
            num_rows += len(batch)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        time.sleep(wait_s)
        cached = getattr(made.statistics(), "cached_rows_total", 0)
    return {
        "rows_per_s": (num_rows - BATCH) / wall,
        "cached_share": cached / num_rows,
        "cpu_us_per_row": cpu / num_rows * 1e6,
    }
