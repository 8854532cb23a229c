"""What a loader costs the trainer: microseconds of a call, CPU, stalls beside a busy GIL, waits, groups."""

import time
from collections.abc import Callable
from typing import Any

from tests.benchmarks.probes.loading import BATCH, loader

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
