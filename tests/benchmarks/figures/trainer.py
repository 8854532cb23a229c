"""S8, S9 and S13: what a loader costs the trainer, and how long the trainer waits for it."""

from functools import partial
from typing import Any

from tests.benchmarks.contestants import OURS, present
from tests.benchmarks.framework import Bench, at_least, at_most, ratios, rounds
from tests.benchmarks.probes.loading import BYTES

SHARES = (0.25, 0.5, 0.75, 0.9, 1.0)


def trainer_cost(bench: Bench) -> None:
    """S8, with a tokenize function that costs nothing, so that what remains is the library."""
    knobs: dict[str, Any] = {"path": bench.small, "tokenizer": BYTES, "num_workers": bench.num_workers}
    cost = partial(bench.probe, "call_cost", **knobs | {"path": bench.input(max(bench.small_mb, 20))})
    (call,) = rounds(cost, num_rounds=bench.num_rounds)
    bench.report("S8", "get_next_batch(32), everything ready, median", call["call_us_p50"], "us", at_most(5))
    bench.report("S8", "the same, 99th percentile", call["call_us_p99"], "us")
    knobs["buffer_size"] = 8192
    num_rows = 20_000 if bench.quick else 100_000
    (free,) = rounds(partial(bench.probe, "steady", num_rows=num_rows, **knobs), num_rounds=bench.num_rounds)
    cpu = free["parent_cpu_us_per_row"]
    bench.report("S8", "CPU of the trainer's process a row, all its threads", cpu, "us", at_most(1))
    bench.report("S8", "rows/s then, shuffled", free["rows_per_s"], "rows/s")
    _beside_a_busy_trainer(bench, knobs)


def _beside_a_busy_trainer(bench: Bench, knobs: dict[str, Any]) -> None:
    """A trainer that never lets go of the GIL."""
    seconds = 3.0 if bench.quick else 8.0
    (busy,) = rounds(
        partial(bench.probe, "busy_trainer", rows_per_s=20_000, seconds=seconds, **knobs),
        num_rounds=bench.num_long_rounds,
    )
    what = "beside a trainer that keeps the GIL, 20k rows/s asked for"
    bench.report("S8", f"{what}: had", busy["rows_per_s"], "rows/s", at_least(19_600))
    bench.report("S8", f"{what}: longest stall", busy["worst_stall_ms"], "ms", at_most(150))
    slow, idle = rounds(
        partial(bench.probe, "busy_trainer", rows_per_s=10_000, seconds=seconds, **knobs),
        partial(bench.probe, "idle_trainer", seconds=seconds / 2),
        num_rounds=bench.num_long_rounds,
    )
    found = ratios(slow["turns_per_busy_s"], idle["turns_per_s"])
    bench.report("S8", "that trainer's speed at 10k rows/s over its speed alone", found, "", at_least(0.95))


def data_wait(bench: Bench) -> None:
    """S9, at half the rate that each reaches at most; windows are small, so that many ends come by."""
    kinds = {"library alone": (BYTES, "hf"), **{name: (bench.tokenizer, name) for name in bench.backends}}
    for kind, (tokenizer, backend) in kinds.items():
        knobs = {"path": bench.small, "tokenizer": tokenizer, "backend": backend, "num_workers": bench.num_workers}
        num_rows = 40_000 if backend != "hf" or tokenizer == BYTES else 8000
        top = bench.probe("steady", num_rows=min(num_rows, 4000) if bench.quick else num_rows, **knobs)["rows_per_s"]
        seconds = 3.0 if bench.quick else 10.0
        (found,) = rounds(
            partial(bench.probe, "data_wait", rows_per_s=top / 2, seconds=seconds, **knobs),
            num_rounds=bench.num_long_rounds,
        )
        bench.data[kind] = {"top": top, **found}
        share = [100 * one for one in found["waited_share"]]
        bench.report("S9", f"{kind}: data wait at half its top rate, of step time", share, "%", at_most(0.1))
        bench.report("S9", f"{kind}: a call, 99.9th percentile", found["call_us_p999"], "us", at_most(200))
        edges = f"{sum(found['num_edges']):.0f} ends of windows and epochs"
        bench.report("S9", f"{kind}: stalls over 5 ms at {edges}", found["stalls_at_edges"], "", at_most(0))
        bench.report("S9", f"{kind}: stalls over 5 ms anywhere", found["stalls"])
    if bench.draws:
        _by_rate(bench)


def _by_rate(bench: Bench) -> None:
    """For the plot: the share of its time that a trainer waits, by the rate it asks for over the loader's top rate."""
    found, _ = present(bench, OURS, "hf")
    bench.data["by_rate"] = {}
    for contestant in found:
        top = contestant.epoch(bench, bench.small, 2000 if bench.quick else 16_000)["steady_rows_per_s"]
        waits = {
            str(share): contestant.paced(bench, bench.small, share * top, 2.0 if bench.quick else 6.0)["called_share"]
            for share in SHARES
        }
        bench.data["by_rate"][contestant.name] = {"top": top, "waits": waits}


def rollouts(bench: Bench) -> None:
    """S13: 32 groups of 8 samples."""
    knobs = {"path": bench.small, "tokenizer": BYTES, "num_workers": bench.num_workers}
    (found,) = rounds(partial(bench.probe, "group_calls", **knobs), num_rounds=bench.num_rounds)
    bench.report("S13", "get_samples(32), n = 8, ready, median", found["call_ms_p50"], "ms", at_most(0.5))
    bench.report("S13", "the same, 99th percentile", found["call_ms_p99"], "ms")
