"""A loader from its first statement: first batch, rate, epoch, resume, order; and what its calls cost the trainer."""

import contextlib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
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

    from tests.benchmarks.backends import tokenize_fn

    return DataLoader(source, tokenize_fn=tokenize_fn(kind, tokenizer, backend), **knobs)


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


def steady(path, tokenizer, num_rows=20_000, num_warm_rows=BATCH, pause_s=0.0, rest_s=0.0, num_beside=0, **knobs):
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


def first_run(path, tokenizer, runs_s, num_rows, num_beside=0, **knobs):
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


def resume(path: str, tokenizer: str, state: str, **knobs: Any) -> dict[str, float]:
    """Seconds from this process's first statement to the first batch after a restore."""
    with loader(path, tokenizer, **knobs) as made:
        made.restore(state)
        made.get_next_batch(BATCH)
        return {"resume_s": seconds()}


def make_snapshots(path: str, tokenizer: str, state: str, percents: list[int], **knobs: Any) -> dict[str, float]:
    """Snapshots ``state.0``, ``state.99`` of an epoch: the position is set, not reached."""
    from asyncdata.checkpoint.snapshot import from_state_dict, save

    with loader(path, tokenizer, **knobs) as made:
        made.get_next_batch(BATCH)
        made.get_next_batch(BATCH)
        of_now = made.state_dict()
    num_windows = -(-of_now["order"]["num_blocks"] // of_now["order"]["window_blocks"])
    for percent in percents:
        if percent:
            of_now["position"] = [0, num_windows * percent // 100, 2 * BATCH]
        save(f"{state}.{percent}", from_state_dict(of_now))
    return {}


def delivered_ids(path: str, out: str, **knobs: Any) -> dict[str, float]:
    """Write, as int32, the line number (token 0) of every sample of one epoch, in the order of delivery."""
    import numpy as np

    from asyncdata import DataLoader

    ids: list[int] = []
    began = time.perf_counter()
    function = "tests.support.loading:row_id"
    with DataLoader(path, tokenize_fn=function, batch_size=256, epochs=1, **knobs) as made:
        for batch in made:
            ids += [int(sample.tokens[0]) for sample in batch]
    np.array(ids, dtype=np.int32).tofile(out)
    return {"rows": len(ids), "seconds": time.perf_counter() - began}


READY_SAMPLES = 20_000
STALL_US = 5_000
"""A stall: a call that takes longer than the interpreter's switch interval."""


def _fill(made: Any, num_samples: int) -> None:
    """Wait until so much is ready and the workers are at rest."""
    while (now := made.statistics()).in_flight_rows or now.ready_samples < num_samples:
        time.sleep(0.05)


def _percentile(times: list[float], per_mille: int) -> float:
    return sorted(times)[min(len(times) * per_mille // 1000, len(times) - 1)]


def call_cost(path: str, tokenizer: str, **knobs: Any) -> dict[str, float]:
    """Microseconds of one get_next_batch(32) with everything ready and the workers at rest."""
    with loader(path, tokenizer, epochs=1, buffer_size=2 * READY_SAMPLES, **knobs) as made:
        made.get_next_batch(BATCH)
        _fill(made, min(READY_SAMPLES, made.statistics().capacity_samples - BATCH))
        times = _times(lambda: made.get_next_batch(BATCH), 600)
    return {"call_us_p50": _percentile(times, 500), "call_us_p99": _percentile(times, 990)}


def _times(call: Callable[[], Any], num_calls: int) -> list[float]:
    """Microseconds of each call."""
    times = []
    for _ in range(num_calls):
        began = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - began) / 1e3)
    return times


def group_calls(path: str, tokenizer: str, n_samples_per_prompt: int = 8, **knobs: Any) -> dict[str, float]:
    """Milliseconds of one get_samples(32), ready, of groups of so many samples."""
    with loader(path, tokenizer, n_samples_per_prompt=n_samples_per_prompt, buffer_size=8192, **knobs) as made:
        made.get_samples(BATCH)
        _fill(made, 4096)
        times = [each / 1e3 for each in _times(lambda: made.get_samples(BATCH), 100)]
    return {"call_ms_p50": _percentile(times, 500), "call_ms_p99": _percentile(times, 990)}


def idle_trainer(seconds: float = 4.0) -> dict[str, float]:
    """The turns that :func:`busy_trainer` makes when no other process runs beside it."""
    began, num_turns = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        num_turns += 1
    return {"turns_per_s": num_turns / (time.perf_counter() - began)}


def busy_trainer(path: str, tokenizer: str, rows_per_s: float, seconds: float = 8.0, **knobs: Any) -> dict[str, float]:
    """A trainer that never lets go of the GIL, taking 32 rows at a fixed rate: its worst stall, and the rate it got."""
    with loader(path, tokenizer, **knobs) as made:
        made.get_next_batch(BATCH)
        made.get_next_batch(BATCH)
        began = due = time.perf_counter()
        worst = waited = 0.0
        num_batches = num_turns = 0
        while due - began < seconds:
            while time.perf_counter() < due:
                num_turns += 1
            asked = time.perf_counter()
            made.get_next_batch(BATCH)
            stall = time.perf_counter() - asked
            worst, waited = max(worst, stall), waited + stall
            num_batches += 1
            due = max(due + BATCH / rows_per_s, time.perf_counter() - 0.05)
        wall = time.perf_counter() - began
    return {
        "rows_per_s": num_batches * BATCH / wall,
        "worst_stall_ms": worst * 1e3,
        "turns_per_busy_s": num_turns / (wall - waited),
    }


def data_wait(path: str, tokenizer: str, rows_per_s: float, seconds: float = 10.0, **knobs: Any) -> dict[str, float]:
    """A trainer that takes 32 rows at a fixed rate and lets go of the GIL in its step, across windows and epochs.

    :return: the share of its time that it waited for data, and that it was in calls at all; how many calls were stalls,
        and of those how many within two batches of the end of a window or an epoch.
    """
    from asyncdata import Shuffle

    # Small windows, so that there are many edges in little time.
    with loader(path, tokenizer, shuffle=Shuffle(window_blocks=32), **knobs) as made:
        for _ in range(50):
            made.get_next_batch(BATCH)
        _fill(made, made.statistics().capacity_samples // 2)
        times, edges, before = [], [], None
        waited = made.statistics().data_wait_seconds_total
        began = due = time.perf_counter()
        while due - began < seconds:
            time.sleep(max(0.0, due - time.perf_counter()))
            asked = time.perf_counter_ns()
            batch = made.get_next_batch(BATCH)
            times.append((time.perf_counter_ns() - asked) / 1e3)
            window = (batch[-1].position.epoch, batch[-1].position.window)
            if window != before:
                edges.append(len(times) - 1)
            before = window
            due += BATCH / rows_per_s
        wall = time.perf_counter() - began
        waited = made.statistics().data_wait_seconds_total - waited
    at_edges = [time for edge in edges[1:] for time in times[max(0, edge - 2) : edge + 3]]
    return {
        "waited_share": waited / wall,
        "called_share": sum(times) / 1e6 / wall,
        "call_us_p999": _percentile(times, 999),
        "num_edges": len(edges) - 1,
        "stalls": sum(time > STALL_US for time in times),
        "stalls_at_edges": sum(time > STALL_US for time in at_edges),
    }
