"""S2, S2b and S12: how near to the tokenizer alone, also in a first run, and how much faster with more workers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from asyncdata.workers.machine import num_usable_cpus
from tests.benchmarks.framework import at_least, at_most, ratios, rounds

if TYPE_CHECKING:
    from tests.benchmarks.framework import Bench

__all__ = ("first_run", "scaling", "throughput")

CPUS_FOR_EIGHT = 16
NUM_WARM_ROWS = 100_000
"""Of a fast backend, here and there: until it has seen the usual words, and the read-ahead is found."""


def throughput(bench: Bench) -> None:
    """S2: steady rows/s, shuffled, over the tokenizer alone in as many processes, on fresh text."""
    for backend in bench.backends:
        is_fast = backend != "hf"
        knobs: dict[str, Any] = {"path": bench.fresh if is_fast else bench.small, "tokenizer": bench.tokenizer}
        knobs |= {"backend": backend}
        loading = {"num_rows": (16_000 if bench.quick else 190_000) if is_fast else (4000 if bench.quick else 20_000)}
        loading["num_warm_rows"] = (4096 if bench.quick else NUM_WARM_ROWS) if is_fast else 1024
        raw = partial(bench.probe, "raw_in_processes", num_processes=bench.num_workers, **loading, **knobs)
        loading["num_workers"] = bench.num_workers
        found = rounds(
            partial(bench.probe, "steady", **loading, **knobs),
            raw,
            *([partial(bench.probe, "steady", buffer_size=8192, **loading, **knobs)] if is_fast else ()),
            num_rounds=bench.num_rounds,
        )
        _report(bench, backend, found)
    if not bench.fast_backends:
        bench.note("S2", "fast backend over the tokenizer alone", "not installed")


def _report(bench: Bench, backend: str, found: list[dict[str, list[float]]]) -> None:
    ours, raw = found[0]["rows_per_s"], found[1]["rows_per_s"]
    bench.data[backend] = {"ours": ours, "raw": raw}
    bench.report("S2", f"{backend}: ours, steady, {bench.num_workers} workers", ours, "rows/s")
    bench.report("S2", f"{backend}: the tokenizer alone in {bench.num_workers} processes", raw, "rows/s")
    bench.report("S2", f"{backend}: the same", found[1]["megabytes_per_s"], "MB/s")
    goal = at_least(0.95 if backend == "hf" else 0.80)
    bench.report("S2", f"{backend}: ours over the tokenizer alone", ratios(ours, raw), "", goal)
    for extra in found[2:]:
        bench.report("S2", f"{backend}: the same, 8192 samples read ahead", ratios(extra["rows_per_s"], raw))


def first_run(bench: Bench) -> None:
    """S2b: a run with nothing proven, at full speed: rows/s until its workers switch, and the seconds until then."""
    if not bench.fast_backends:
        bench.note("S2b", "first run", "no fast backend is installed")
        return

    knobs = {"path": bench.fresh, "tokenizer": bench.tokenizer, "num_workers": bench.num_workers}
    num_rows = 2048 if bench.quick else 60_000
    ours, of_hf = rounds(
        partial(bench.probe, "first_run", at_most_s=2.0 if bench.quick else 60.0, num_rows=num_rows, **knobs),
        partial(bench.probe, "steady", backend="hf", num_rows=num_rows, num_warm_rows=1024, **knobs),
        num_rounds=bench.num_long_rounds,
    )
    before = ratios(ours["rows_per_s"], of_hf["rows_per_s"])
    bench.report("S2b", "first run: rows/s until the switch, over HF's tokenizer", before, "", at_least(0.95))
    bench.report("S2b", "first run: seconds until the fast rate", ours["switch_s"], "s", at_most(20))
    after = ratios(ours["fast_rows_per_s"], of_hf["rows_per_s"])
    bench.report("S2b", "first run: rows/s after the switch, over HF's tokenizer", after, "x")


def scaling(bench: Bench) -> None:
    """S12: rows/s with more workers over one."""
    num_rows = 2000 if bench.quick else 10_000
    for num_workers, goal in ((2, 1.9), (8, 7.0)):
        if num_workers == 8 and num_usable_cpus() < CPUS_FOR_EIGHT:
            bench.note("S12", "8 workers over 1", f"needs {CPUS_FOR_EIGHT} cores, here are {num_usable_cpus()}")
            continue

        knobs = {"path": bench.small, "tokenizer": bench.tokenizer, "num_warm_rows": 1024}
        one, more = rounds(
            partial(bench.probe, "steady", num_workers=1, num_rows=num_rows, **knobs),
            partial(bench.probe, "steady", num_workers=num_workers, num_rows=num_workers * num_rows, **knobs),
            num_rounds=bench.num_rounds,
        )
        found = ratios(more["rows_per_s"], one["rows_per_s"])
        bench.report("S12", f"rows/s with {num_workers} workers over 1", found, "x", at_least(goal))
