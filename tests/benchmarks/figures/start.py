"""S5 and S7: how soon the first batch is ready, for any size of the file and any place where the run continues."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import TYPE_CHECKING

from tests.benchmarks.contestants import OURS, Contestant, present
from tests.benchmarks.framework import at_least, at_most, ratios, rounds
from tests.benchmarks.watching import MeasurementError

if TYPE_CHECKING:
    from tests.benchmarks.framework import Bench

__all__ = ("first_batch", "resume")

PERCENTS = [0, 50, 90, 99]
LARGEST_LEGACY_MB = 50
"""A loader that reads everything first would take minutes of the suite for the others."""


def first_batch(bench: Bench) -> None:
    """S5, from the process's first statement."""
    found, absent = present(bench, OURS, "hf")
    knobs = {"tokenizer": bench.tokenizer}
    calls = [
        partial(found[0].first_batch, bench, bench.small),
        partial(found[0].first_batch, bench, bench.large),
        partial(bench.probe, "load_vocabulary", path=bench.small, **knobs),
        *(partial(peer.first_batch, bench, bench.small) for peer in found[1:]),
    ]
    small, large, load, *hf = rounds(*calls, num_rounds=bench.num_rounds)
    ours = small["first_batch_s"]
    bench.report("S5", f"first batch of 32, {bench.small_mb} MB", ours, "s", at_most(0.6))
    bench.report("S5", f"first batch of 32, {bench.large_mb} MB", large["first_batch_s"], "s", at_most(0.6))
    bench.report("S5", "large file over small file", ratios(large["first_batch_s"], ours), "x", at_most(1.1))
    bench.report("S5", "a process that only loads the vocabulary", load["load_s"], "s")
    bench.report("S5", "ours over that", ratios(ours, load["load_s"]), "x")
    for one in hf:
        bench.report("S5", "HF streaming over ours", ratios(one["first_batch_s"], ours), "x", at_least(4))
    for name, why in absent.items():
        bench.note("S5", name, why)
    _backends(bench)
    _sizes(bench)


def _backends(bench: Bench) -> None:
    for backend in bench.fast_backends:
        (ours,), _ = present(bench, f"{OURS} {backend}")
        (found,) = rounds(partial(ours.first_batch, bench, bench.small), num_rounds=bench.num_long_rounds)
        bench.report("S5", f"first batch with {backend}", found["first_batch_s"], "s")


def _sizes(bench: Bench) -> None:
    """For the plot: each contestant at each size."""
    found, _ = present(bench, OURS, "hf", "legacy")
    sizes = [1, bench.small_mb, bench.fresh_mb] if bench.quick else [5, bench.small_mb, 500, bench.large_mb]
    taken: dict[str, dict[str, list[float]]] = {contestant.name: {} for contestant in found}
    for size in sizes:
        able = [one for one in found if one.name != "legacy" or size <= LARGEST_LEGACY_MB]
        calls = [partial(one.first_batch, bench, bench.input(size)) for one in able]
        for one, result in zip(able, rounds(*calls, num_rounds=min(2, bench.num_long_rounds)), strict=True):
            taken[one.name][str(size)] = result["first_batch_s"]
    bench.data["sizes"] = taken


def resume(bench: Bench) -> None:
    """S7, at 0 % and at 99 % of the large file; and beside the peers on the small one."""
    (ours,), _ = present(bench, OURS)
    with tempfile.TemporaryDirectory(dir=bench.folder) as scratch:
        ours.save(bench, bench.large, f"{scratch}/s", PERCENTS, 0, "")
        start, end = rounds(
            partial(ours.resume, bench, bench.large, f"{scratch}/s.0", ""),
            partial(ours.resume, bench, bench.large, f"{scratch}/s.99", ""),
            num_rounds=2 * bench.num_rounds,
        )
    bench.report("S7", f"resume at 0 % of {bench.large_mb} MB, first batch", start["resume_s"], "s")
    bench.report("S7", "resume at 99 %, first batch", end["resume_s"], "s")
    found = ratios(end["resume_s"], start["resume_s"])
    bench.report("S7", "resume at 99 % over resume at 0 %", found, "x", at_most(1.05))
    peers, _ = present(bench, OURS, "hf", "torchdata", "grain", "mosaic")
    bench.data["resume"] = {}
    for peer in peers:
        _curve(bench, peer)


def _curve(bench: Bench, contestant: Contestant) -> None:
    """For the plot: seconds to the first batch after a restore, by position."""
    with open(bench.small, "rb") as file:
        num_rows = sum(1 for _ in file)
    with tempfile.TemporaryDirectory(dir=bench.folder) as scratch:
        state, folder = f"{scratch}/state", f"{scratch}/converted"
        try:
            contestant.save(bench, bench.small, state, PERCENTS, num_rows, folder)
        except MeasurementError as error:
            bench.note("S7", f"{contestant.label}: save", f"failed: {error.last_words}")
            return

        curve = bench.data["resume"].setdefault(contestant.name, {})
        for percent in PERCENTS:
            call = partial(contestant.resume, bench, bench.small, f"{state}.{percent}", folder)
            what = f"{contestant.label}: resume at {percent} % of {bench.small_mb} MB"
            try:
                (found,) = rounds(call, num_rounds=min(2, bench.num_long_rounds))
            except MeasurementError as error:
                bench.note("S7", what, f"failed: {error.last_words}")
            else:
                curve[str(percent)] = found["resume_s"]
                bench.report("S7", what, found["resume_s"], "s")
