"""The token cache beside no cache: ``python -m tests.benchmarks.token_cache FOLDER TOKENIZER`` prints ratios.

Each way runs in a process of its own, all of them in turn, several times; what counts is the median of the ratios.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from asyncdata import Cache
from tests.benchmarks.inputs import prompts

__all__ = ("measure",)

_MEGABYTES = 50
_WINDOW_BLOCKS = 128  # small, so that some windows are stored while it is measured
_WAYS = ("tokenize", "write", "read")


def measure(path: str, tokenizer: str, way: str, cache: str, num_rows: int) -> dict[str, float]:
    """Rows per second after the first batch, and the CPU of this process and of its workers per row (us)."""
    import psutil

    from asyncdata import DataLoader, PromptTokenizeFn, Shuffle

    function, shuffle = PromptTokenizeFn(tokenizer, label_key="label"), Shuffle(window_blocks=_WINDOW_BLOCKS)
    folder = {"tokenize": None, "write": f"{cache}-{time.time_ns()}", "read": cache}[way]
    with DataLoader(
        path, tokenize_fn=function, num_workers=2, cache=Cache(tokens=folder), timeout_s=600, shuffle=shuffle
    ) as loader:
        loader.get_next_batch(1024)
        workers = [psutil.Process(state.pid) for state in loader.statistics().workers if state.pid]
        before, cpu, began = [used(worker) for worker in workers], time.process_time(), time.perf_counter()
        for _ in range(num_rows // 1024):
            loader.get_next_batch(1024)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        of_workers = sum(used(worker) for worker in workers) - sum(before)
        cached = loader.statistics().cached_rows_total
    return {
        "rows_per_s": num_rows / wall,
        "parent_us": cpu / num_rows * 1e6,
        "workers_us": of_workers / num_rows * 1e6,
        "cached_rows": cached,
    }


def used(process: Any) -> float:
    """CPU seconds of a process."""
    times = process.cpu_times()
    return float(times.user + times.system)


def fill(path: str, tokenizer: str, cache: str) -> None:
    """Have all rows stored, whatever is stored already."""
    from asyncdata import DataLoader, PromptTokenizeFn

    function = PromptTokenizeFn(tokenizer, label_key="label")
    with DataLoader(
        path, tokenize_fn=function, num_workers=2, cache=Cache(tokens=cache), epochs=1, batch_size=1024, timeout_s=600
    ) as loader:
        for _ in loader:
            pass
        while not loader._engine._source.token_cache.is_idle:  # noqa: SLF001 - only tests ask for it
            time.sleep(0.01)


def main(folder: str, tokenizer: str, num_rounds: int = 3, num_tokenized: int = 16_384) -> None:
    """Print the ratios."""
    path, cache = str(prompts(Path(folder), _MEGABYTES)), f"{folder}/tokens"
    for _ in range(2):
        fill(path, tokenizer, cache)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in _WAYS}
    for _ in range(num_rounds):
        for way in _WAYS:
            rows = 20 * num_tokenized if way == "read" else num_tokenized
            words = [sys.executable, "-m", "tests.benchmarks.token_cache", path, tokenizer, way, cache, str(rows)]
            done = subprocess.run(words, check=True, capture_output=True, text=True)
            found[way].append(json.loads(done.stdout.splitlines()[-1]))
            print(way, {name: round(value, 2) for name, value in found[way][-1].items()})
    for way in ("write", "read"):
        pairs = zip(found[way], found["tokenize"], strict=True)
        ratio = statistics.median(one["rows_per_s"] / other["rows_per_s"] for one, other in pairs)
        print(f"{way} over tokenize: {ratio:.2f}")


if __name__ == "__main__":
    if len(sys.argv) > 4:
        print(json.dumps(measure(*sys.argv[1:5], int(sys.argv[5]))))
    else:
        main(*sys.argv[1:3])
