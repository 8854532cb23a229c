"""A loader from its first statement: first batch, steady rate, a whole epoch, resume, and the order it delivers in."""

import contextlib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from tests.benchmarks.clock import seconds
from tests.benchmarks.peers.contest import through

BATCH = 32
BYTES = "bytes"
"""In place of a tokenizer: a tokenize function that costs next to nothing, so that what remains is the library."""


def byte_tokens(row: dict[str, Any]) -> list[int]:
    """What ``tokenizer="bytes"`` stands for."""
    return [len(row["input"])]


def loader(path: str, tokenizer: str, backend: str = "hf", kind: str = "prompt", **knobs: Any) -> Any:
    """Ours. A path that ends in ``.mix.json`` describes a mixture."""
    from asyncdata import DataLoader

    source: Any = path
    if path.endswith(".mix.json"):
        from asyncdata.loader.mix import mix_of_file

        source = mix_of_file(path)
    if tokenizer == BYTES:
        return DataLoader(source, tokenize_fn="tests.benchmarks.probes.loading:byte_tokens", **knobs)

    from tests.benchmarks.backends import KINDS

    return DataLoader(source, tokenize_fn=KINDS[kind](tokenizer, backend), **knobs)


@contextlib.contextmanager
def endless_loops(number: int) -> Iterator[None]:
    """Other programs that leave no CPU idle."""
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            stack.callback(subprocess.Popen([sys.executable, "-c", "while True: pass"]).kill)
        yield


def first_batch(path: str, tokenizer: str, **knobs: Any) -> dict[str, float]:
    """Seconds from this process's first statement."""
    with loader(path, tokenizer, **knobs) as made:
        made.get_next_batch(BATCH)
        return {"first_batch_s": seconds()}


def steady(
    path: str,
    tokenizer: str,
    num_rows: int = 20_000,
    num_warm_rows: int = BATCH,
    pause_s: float = 0.0,
    rest_s: float = 0.0,
    num_beside: int = 0,
    **knobs: Any,
) -> dict[str, float]:
    """Rows per second after the first rows, and CPU of this process per row, beside endless loops.

    :param pause_s: so long nothing is asked for after the first rows, and what is loaded beside the workers is loaded.
    :param rest_s: the same at the end: workers do what waits for a pause.
    """
    with endless_loops(num_beside), loader(path, tokenizer, **knobs) as made:
        for _ in range(num_warm_rows // BATCH):
            made.get_next_batch(BATCH)
        time.sleep(pause_s)
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(num_rows // BATCH):
            made.get_next_batch(BATCH)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        time.sleep(rest_s)
    num_taken = num_rows // BATCH * BATCH
    return {"rows_per_s": num_taken / wall, "parent_cpu_us_per_row": cpu / num_taken * 1e6}


def first_run(
    path: str, tokenizer: str, runs_s: list[float], num_rows: int, num_beside: int = 0, **knobs: Any
) -> dict[str, float]:
    """Runs with nothing proven before the first, at full speed, for so many seconds each, beside endless loops. Rows
    per second until the workers switch to a fast backend, in all of the last run, and with everything proven after the
    first ``num_rows``; and the seconds of the last run until its rate, over a second each, is 0.8 of that.
    """
    from structlog.testing import capture_logs

    with contextlib.ExitStack() as stack:
        os.environ["XDG_CACHE_HOME"] = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(endless_loops(num_beside))
        events, num_before, num_in_second = stack.enter_context(capture_logs()), 0, list[int]()
        for run_s in runs_s:
            with loader(path, tokenizer, "auto", **knobs) as made:
                made.get_next_batch(BATCH)
                began, switch_s, num_before, num_in_second = time.perf_counter(), run_s, 0, [0] * math.ceil(run_s)
                while (second := time.perf_counter() - began) < run_s:
                    num_in_second[int(second)] += len(made.get_next_batch(BATCH))
                    if switch_s == run_s and any(event["event"] == "workers.reopened" for event in events):
                        switch_s, num_before = second, sum(num_in_second)
        proven = steady(path, tokenizer, num_rows, num_rows, backend="auto", **knobs)["rows_per_s"]
    fast_s = next((second for second, number in enumerate(num_in_second) if number >= 0.8 * proven), len(num_in_second))
    rates = {"rows_per_s": num_before / switch_s, "last_rows_per_s": sum(num_in_second) / runs_s[-1]}
    return {**rates, "fast_rows_per_s": proven, "switch_s": switch_s, "fast_s": fast_s}


def contest(path: str, tokenizer: str, num_rows_at_most: int = 0, **knobs: Any) -> dict[str, float]:
    """An epoch in batches, as every peer goes through it."""
    with loader(path, tokenizer, epochs=1, batch_size=BATCH, **knobs) as made:
        return through(made, seconds, num_rows_at_most)


def resume(path: str, tokenizer: str, snapshot: str, **knobs: Any) -> dict[str, float]:
    """Seconds from this process's first statement to the first batch after a restore."""
    with loader(path, tokenizer, **knobs) as made:
        made.restore(snapshot)
        made.get_next_batch(BATCH)
        return {"resume_s": seconds()}


def make_snapshots(path: str, tokenizer: str, snapshot: str, percents: list[int], **knobs: Any) -> dict[str, float]:
    """Snapshots ``snapshot.0``, ``snapshot.99`` of an epoch: the position is set, not reached."""
    from asyncdata.checkpoint.snapshot import from_state_dict, save

    with loader(path, tokenizer, **knobs) as made:
        made.get_next_batch(BATCH)
        made.get_next_batch(BATCH)
        state = made.state_dict()
    num_windows = -(-state["order"]["num_blocks"] // state["order"]["window_blocks"])
    for percent in percents:
        if percent:
            state["position"] = [0, num_windows * percent // 100, 2 * BATCH]
        save(f"{snapshot}.{percent}", from_state_dict(state))
    return {}


def delivered_ids(path: str, out: str, **knobs: Any) -> dict[str, float]:
    """Write, as int32, the line number (token 0) of every sample of one epoch, in the order of delivery."""
    import numpy as np

    from asyncdata import DataLoader

    ids: list[int] = []
    began = time.perf_counter()
    function = "tests.support.tokenize_fns:row_id"
    with DataLoader(path, tokenize_fn=function, batch_size=256, epochs=1, **knobs) as made:
        for batch in made:
            ids += [int(sample.tokens[0]) for sample in batch]
    np.array(ids, dtype=np.int32).tofile(out)
    return {"rows": len(ids), "seconds": time.perf_counter() - began}
